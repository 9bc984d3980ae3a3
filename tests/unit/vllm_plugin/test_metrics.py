"""Counts, and their way to the front end."""

from __future__ import annotations

import os
from pathlib import Path
from time import monotonic, sleep

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from hvd_ray.context import DraftOutcome
from hvd_ray.types import Source, Step
from hvd_ray.vllm_plugin import metrics
from hvd_ray.vllm_plugin.metrics import CountCollector, Counters, CountFile, read_counts


def counted() -> Counters:
    counters = Counters()
    counters.count_step(Step(0, 0, Source.NONE, 0, 0, 1), skipped="off")
    counters.count_step(Step(1, 1, Source.SUFFIX, 5, 3, 4), skipped="declined")
    counters.count_step(Step(2, 5, Source.EAGLE3, 4, 1, 2, cache_draft_len=3), skipped="declined")
    counters.count_outcome(DraftOutcome(5, 3, predicted=4.5))
    counters.count_outcome(DraftOutcome(5, 3))
    counters.put("hvd_cache_tokens", 77)
    return counters


def test_cycles_are_counted_by_source_and_skips_by_reason() -> None:
    counters = counted()
    assert counters.get("hvd_steps_total", source="suffix") == 1
    assert counters.get("hvd_draft_tokens_total", source="suffix") == 5
    assert counters.get("hvd_accepted_tokens_total", source="suffix") == 3
    assert counters.get("hvd_emitted_tokens_total", source="none") == 1
    assert counters.get("hvd_skipped_total", reason="off") == 1
    assert counters.get("hvd_skipped_total", reason="declined") == 0
    assert counters.get("hvd_fallbacks_total") == 1


def test_only_what_was_predicted_is_held_against_what_came() -> None:
    counters = counted()
    assert counters.get("hvd_predictions_total") == 1
    assert counters.get("hvd_predicted_tokens_total") == 4.5
    assert counters.get("hvd_actual_tokens_total") == 3
    assert counters.get("hvd_prediction_error_tokens_total") == 1.5


def test_the_front_end_shows_what_the_worker_left(tmp_path: Path) -> None:
    path = tmp_path / "made" / "counts.json"
    registry = CollectorRegistry()
    registry.register(CountCollector(path, "m"))
    assert generate_latest(registry) == b""
    counters = counted()
    file = CountFile(path)
    file.write(counters)
    shown = generate_latest(registry).decode()
    assert 'hvd_steps_total{model_name="m",source="suffix"} 1.0' in shown
    assert 'hvd_cache_tokens{model_name="m"} 77.0' in shown
    assert "# TYPE hvd_steps_total counter" in shown
    assert "# TYPE hvd_cache_tokens gauge" in shown
    counters.put("hvd_cache_tokens", 78)
    file.write(counters)  # just written: not again yet
    assert read_counts(path)["hvd_cache_tokens", "", ""] == 77
    file.write(counters, now=True)
    assert read_counts(path)["hvd_cache_tokens", "", ""] == 78
    assert [p.name for p in path.parent.iterdir()] == ["counts.json"]


def test_the_last_counts_show_though_no_step_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "WRITE_EVERY_S", 0.05)
    file, counters = CountFile(tmp_path / "counts.json"), counted()
    file.write(counters)
    counters.put("hvd_cache_tokens", 78)
    file.write(counters)
    deadline = monotonic() + 30
    while read_counts(file.path)["hvd_cache_tokens", "", ""] != 78:
        assert monotonic() < deadline
        sleep(0.01)
    file.write(counters)
    file.remove()
    file.write(counters, now=True)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_takes_nothing_stops_no_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    file = CountFile(blocked / "counts.json")
    for _ in range(3):
        file.write(counted(), now=True)
    assert caplog.text.count("stand still") == 1


def test_what_a_killed_engine_left_is_cleared_away(tmp_path: Path) -> None:
    old, new = tmp_path / "counts-old.json", tmp_path / "counts-new.json"
    for path in (old, new):
        path.write_text("[]")
    os.utime(old, (0, 0))
    file = CountFile(tmp_path / "counts-own.json")
    file.remove_stale()
    file.write(counted())
    file.remove()
    file.remove()
    assert [path.name for path in tmp_path.iterdir()] == [new.name]
