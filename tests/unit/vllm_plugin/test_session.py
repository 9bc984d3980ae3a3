"""A worker's session up to its end: nothing of what was counted or sampled is lost or left."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest

from hvd_ray.config import SuffixConfig
from hvd_ray.drafting.suffix import SuffixDrafter
from hvd_ray.payoff.policy import AlwaysCache
from hvd_ray.traces.store import read_traces
from hvd_ray.types import NO_DRAFT, SamplingParams
from hvd_ray.vllm_plugin import compat, compat_runner
from hvd_ray.vllm_plugin.metrics import CountFile, read_counts
from hvd_ray.vllm_plugin.options import TraceOptions
from hvd_ray.vllm_plugin.parts import Hybrid
from hvd_ray.vllm_plugin.production_traces import Origin, TraceSampler
from hvd_ray.vllm_plugin.requests import RequestTable
from hvd_ray.vllm_plugin.router import EachAlone, Limits, Router
from hvd_ray.vllm_plugin.session import HybridSession, _end
from hvd_ray.vllm_plugin.step_costs import LearntAcceptance

from .runner_fakes import FakeRunner

ORIGIN = Origin("engine-1", "model", "sha", "suffix", "vllm", 64)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(compat, "log_line", lines.append)
    monkeypatch.setattr(compat_runner, "sampling_of", lambda _: SamplingParams())
    return lines


def opened(folder: Path, runner: FakeRunner) -> HybridSession:
    """A session as `HybridSession.open` makes it, without an engine."""
    table = RequestTable(SuffixDrafter(SuffixConfig()), lambda s: compat_runner.profile_of("m", s))
    router = Router(table, EachAlone(AlwaysCache()), Limits(64, 0))
    traces = TraceSampler(TraceOptions(folder=str(folder / "traces"), share=1.0), ORIGIN)
    file = CountFile(folder / "counts.json")
    session = HybridSession(runner, Hybrid(router, LearntAcceptance()), file, traces)
    session._listen(table)
    return session


def step(session: HybridSession, runner: FakeRunner, sampled: dict[str, list[int]]) -> None:
    choices = session.choose(runner.sample(sampled), 4)
    session.give(choices, [NO_DRAFT] * len(choices))


def test_at_the_end_traces_are_written_and_the_counts_go(tmp_path: Path, said: list[str]) -> None:
    runner = FakeRunner()
    session = opened(tmp_path, runner)
    for name in ("done", "running"):
        runner.add(name, [1, 2], max_tokens=2)
    step(session, runner, {"done": [3, 4], "running": [3]})
    assert session.file.path.exists()
    session.close()
    session.close()
    found = {trace.finish_reason: trace for trace in read_traces(tmp_path / "traces")}
    assert {why: trace.output_token_ids for why, trace in found.items()} == {
        "length": (3, 4),
        "abort": (3,),
    }
    assert said == ["hvd: 2 traces written since the start, 0 dropped"]
    assert not session.file.path.exists()


@pytest.mark.usefixtures("said")
def test_a_file_of_traces_shows_in_the_counts_without_another_step(tmp_path: Path) -> None:
    runner = FakeRunner()
    session = opened(tmp_path, runner)
    assert session.traces is not None
    runner.add("a", [1, 2], max_tokens=1)
    step(session, runner, {"a": [3]})
    session.hybrid.router.table.forget_absent({})
    session.traces.close()
    assert read_counts(session.file.path)["hvd_traces", "", ""] == 1
    assert read_counts(session.file.path)["hvd_traces_dropped", "", ""] == 0


def test_where_python_ends_without_the_engines_end(tmp_path: Path, said: list[str]) -> None:
    session = opened(tmp_path, FakeRunner())
    session.file.write(session.counters)
    file, known = session.file, weakref.ref(session)
    _end(known, file)
    assert len(said) == 1
    assert not file.path.exists()
