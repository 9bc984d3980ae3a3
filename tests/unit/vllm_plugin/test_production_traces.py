"""Sampled traces of what was served: token ids only, whole files, bounded."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from hvd_ray.context import DecodeContext
from hvd_ray.errors import UserError
from hvd_ray.traces.store import read_steps, read_traces
from hvd_ray.types import SamplingParams, Source, Step, TokenBuffer
from hvd_ray.vllm_plugin import production_traces
from hvd_ray.vllm_plugin.options import TraceOptions
from hvd_ray.vllm_plugin.production_traces import (
    Origin,
    TraceSampler,
    check_folder,
    trim_folder,
)
from hvd_ray.vllm_plugin.requests import Profile, Tracked

ORIGIN = Origin("engine-1", "model", "sha", "hvd_cost", "vllm", 2048)


def tracked(name: str, *, output: list[int], max_tokens: int = 32) -> Tracked:
    profile = Profile("salt:secret/model/", max_tokens=max_tokens, stop_token_ids=frozenset({0}))
    context = DecodeContext(TokenBuffer([5, 6, *output]), 2, max_tokens, room=0)
    return Tracked(name, name, object(), profile, context)


def serve(sampler: TraceSampler, name: str, output: list[int], **limits: int) -> None:
    request = tracked(name, output=output, **limits)
    for cycle, _ in enumerate(output):
        sampler.observe(request, Step(cycle, cycle, Source.NONE, 0, 0, 1))
    sampler.end(request, SamplingParams(max_tokens=32))


def test_what_was_served_can_be_read_as_traces(tmp_path: Path) -> None:
    sampler = TraceSampler(TraceOptions(folder=str(tmp_path), share=1.0, rows_per_part=2), ORIGIN)
    serve(sampler, "a", [7, 8, 0])
    serve(sampler, "b", [7, 8], max_tokens=2)
    serve(sampler, "c", [7])
    sampler.close()
    traces = {trace.finish_reason: trace for trace in read_traces(tmp_path)}
    assert set(traces) == {"stop", "length", "abort"}
    stopped = traces["stop"]
    assert (stopped.prompt_token_ids, stopped.output_token_ids) == ((5, 6), (7, 8, 0))
    assert (stopped.model, stopped.policy, stopped.engine) == ("model", "hvd_cost", "vllm")
    assert len(read_steps(tmp_path)[stopped.trace_id]) == 3
    assert len({trace.trace_id for trace in traces.values()}) == 3
    assert len(list((tmp_path / "traces").glob("*.parquet"))) == 2
    assert sampler.num_kept == 3


def test_no_salt_and_no_text_leaves_the_process(tmp_path: Path) -> None:
    sampler = TraceSampler(TraceOptions(folder=str(tmp_path), share=1.0), ORIGIN)
    serve(sampler, "a", [7])
    sampler.close()
    (part,) = (tmp_path / "traces").glob("*.parquet")
    assert b"secret" not in part.read_bytes()
    assert "secret" not in read_traces(tmp_path)[0].scope


def test_about_the_share_is_sampled_and_nothing_is_kept_of_the_rest(tmp_path: Path) -> None:
    sampler = TraceSampler(
        TraceOptions(folder=str(tmp_path), share=0.2, rows_per_part=9999), ORIGIN
    )
    for number in range(500):
        serve(sampler, f"r{number}", [7, 8])
    sampler.close()
    assert 60 <= sampler.num_kept <= 145
    assert len(read_traces(tmp_path)) == sampler.num_kept


def test_a_trace_does_not_wait_for_its_file_to_fill(tmp_path: Path) -> None:
    sampler = TraceSampler(TraceOptions(folder=str(tmp_path), share=1.0), ORIGIN, max_wait_s=0.01)
    written = threading.Event()
    sampler.on_written = written.set
    for number in (1, 2):
        serve(sampler, f"r{number}", [7])
        assert written.wait(30)
        written.clear()
        assert sampler.num_kept == len(read_traces(tmp_path)) == number
    sampler.close()
    assert len(list((tmp_path / "traces").iterdir())) == 2


def test_what_a_slow_disk_cannot_take_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = TraceOptions(folder=str(tmp_path), share=1.0, rows_per_part=1)
    sampler = TraceSampler(options, ORIGIN)
    is_free, is_writing = threading.Event(), threading.Event()

    def slow(*_: object, **__: object) -> None:
        is_writing.set()
        is_free.wait(30)

    monkeypatch.setattr(production_traces, "write_part", slow)
    monkeypatch.setattr(production_traces, "_END_S", 0.01)
    serve(sampler, "a", [7])
    assert is_writing.wait(30)
    for number in range(6):
        serve(sampler, f"r{number}", [7])
    assert sampler.num_dropped == 2, "four files' worth may wait"
    sampler.close()
    assert (sampler.num_kept, sampler.num_dropped) == (0, 6)
    is_free.set()


def test_parameters_without_a_column_cost_the_trace_only(tmp_path: Path) -> None:
    sampler = TraceSampler(TraceOptions(folder=str(tmp_path), share=1.0), ORIGIN)
    request = tracked("a", output=[7])
    sampler.observe(request, Step(0, 0, Source.NONE, 0, 0, 1))
    sampler.end(request, None)
    sampler.close()
    assert (sampler.num_kept, sampler.num_dropped) == (0, 1)
    assert list(tmp_path.iterdir()) == []


def test_the_oldest_parts_go_first_and_whole(tmp_path: Path) -> None:
    for number in range(4):
        for table in ("traces", "steps"):
            path = tmp_path / table / f"part-{number}.parquet"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"x" * 100)
            os.utime(path, (number, number))
    trim_folder(tmp_path, 450)
    for table in ("traces", "steps"):
        assert sorted(p.name for p in (tmp_path / table).iterdir()) == [
            "part-2.parquet",
            "part-3.parquet",
        ]


def test_a_folder_that_cannot_be_written_costs_traces_only(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    sampler = TraceSampler(TraceOptions(folder=str(blocked), share=1.0, rows_per_part=1), ORIGIN)
    serve(sampler, "a", [7])
    sampler.close()
    assert (sampler.num_kept, sampler.num_dropped) == (0, 1)


def test_a_folder_for_traces_is_tried_out_before_it_is_needed(tmp_path: Path) -> None:
    check_folder(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below"):
        with pytest.raises(UserError, match="cannot write"):
            check_folder(tmp_path / place)
