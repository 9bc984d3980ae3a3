"""One system against the others: the same prompts, the times of both."""

from __future__ import annotations

import pytest

from hvd_ray.bench.cells import Arm, Sample
from hvd_ray.bench.workloads import Prompt
from hvd_ray.paper.against import against
from hvd_ray.types import Completion, Request, SamplingParams

SECONDS = {"greedy": 4.0, "suffix": 2.0, "hvd_cost": 1.0}


def sample(
    workload: str, index: int, system: str, *, cache: str = "cold", wave: int | None
) -> Sample:
    prompt = Prompt(f"p{index}", workload, "f", f"s{index}", None, (), None, (5,), (), "here")
    request = Request(f"{workload}/p{index}", (5,), SamplingParams(max_tokens=4))
    completion = Completion(request.request_id, (1, 2, 3, 4), "", "length")
    seconds = SECONDS[system] * (1 + index)
    return Sample(prompt, Arm(system, cache), request, completion, seconds, wave=wave)  # type: ignore[arg-type]


def samples(num: int, *, wave: int | None = None) -> list[Sample]:
    return [
        sample(workload, index, system, wave=wave)
        for workload in "ab"
        for index in range(num)
        for system in SECONDS
    ]


def test_the_ratio_is_of_tokens_per_second_and_all_is_the_mean() -> None:
    found = {(row.workload, row.rival): row for row in against(samples(4), "hvd_cost")}
    assert set(found) == {(w, r) for w in ("a", "b", "all") for r in ("greedy", "suffix")}
    assert found["a", "greedy"].ratio == pytest.approx(4.0)
    assert found["all", "suffix"].ratio == pytest.approx(2.0)
    assert not found["all", "suffix"].is_degenerate


def test_one_wave_gives_no_interval_and_warm_caches_are_left_out() -> None:
    warm = [sample("a", 0, "suffix", cache="warm", wave=0)]
    rows = against([*samples(4, wave=0), *warm], "hvd_cost")
    assert all(row.is_degenerate for row in rows)
    assert len(rows) == 6


def test_without_the_system_there_is_nothing_to_say() -> None:
    rest = [one for one in samples(2) if one.arm.system != "hvd_cost"]
    assert against(rest, "hvd_cost") == []
