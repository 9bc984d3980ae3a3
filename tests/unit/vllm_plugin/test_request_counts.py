"""A request's own figures, from the worker's count to the response, through vLLM's lists."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_ray.types import Source, Step
from hvd_ray.vllm_plugin import compat
from hvd_ray.vllm_plugin.request_counts import RequestCounts, shares


def step(source: Source, emitted: int) -> Step:
    return Step(0, 0, source, drafted=emitted, accepted=0, emitted=emitted)


def counted() -> RequestCounts:
    counts = RequestCounts()
    for source, emitted in ((Source.NONE, 1), (Source.SUFFIX, 6), (Source.SUFFIX, 2)):
        counts.note("a", step(source, emitted))
    counts.note("b", step(Source.EAGLE3, 3))
    return counts


def test_a_requests_passes_are_taken_once() -> None:
    counts = counted()
    found = shares([], counts.take("a"))
    assert found["source_share"] == pytest.approx({"none": 1 / 3, "suffix": 2 / 3})
    assert (found["num_target_passes"], found["emitted_per_pass"]) == (3, 3)
    assert counts.take("a") == []
    assert len(counts) == 1


def test_vllms_own_lists_stay_what_they_are() -> None:
    """With its detailed figures, of which there are as many drafted as accepted."""
    figures = counted().take("b")
    assert shares([1, 2], [4, 4, *figures])["source_share"] == {"eagle3": 1}
    assert shares([1, 2], [4, 4]) == {}
    assert shares([], []) == {}


def test_the_hooks_carry_them_from_scheduler_to_response(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduling = pytest.importorskip("vllm.v1.core.sched.scheduler")
    stats = pytest.importorskip("vllm.v1.metrics.stats")

    @dataclass
    class Ended:
        request_id: str
        spec_decode_metrics: Any = field(default_factory=lambda: metrics)

    metrics = stats.RequestSpecDecodeMetrics.new(4)
    metrics.observe(3, 2, detailed=True)
    outputs = {0: SimpleNamespace(outputs=[Ended("a"), Ended("c", None)])}
    monkeypatch.setattr(scheduling.Scheduler, "update_from_output", lambda _self: outputs)
    monkeypatch.setattr(stats.RequestSpecDecodeMetrics, "to_dict", stats_to_dict(stats))
    compat.hook_request_metrics(counted().take, shares)
    scheduling.Scheduler.update_from_output(object())
    for _ in range(2):  # a stream may tell it twice
        told = metrics.to_dict()
        assert (told["per_step_accepted"], told["per_step_drafted"]) == ([2], [3])
        assert told["num_target_passes"] == 3


def stats_to_dict(stats: Any) -> Any:
    """vLLM's own, whether or not a hook was set by another test."""
    found = stats.RequestSpecDecodeMetrics.to_dict
    return getattr(found, "__wrapped__", found)
