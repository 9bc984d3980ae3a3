"""What a search for slim models takes, where it writes, what it says; the frontier of several."""

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hvd_ray.config import Config
from hvd_ray.errors import UserError
from hvd_ray.pipelines.output import claimed
from hvd_ray.traces.schema import Trace
from hvd_ray.tuning import slim
from hvd_ray.tuning.slim import SlimOptions, frontier_curves, read_search, warning_of
from hvd_ray.types import SamplingParams
from hvd_ray.verify.slim_window import Recorded


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"methods": ()}, "--methods names none; choose from prefix, dp"),
        ({"methods": ("dp", "magic")}, "'magic': unknown"),
        ({"max_escalated": 7.0}, "--escalated must be from 0 to 1, got 7"),
        ({"max_escalated": float("nan")}, "--escalated must be"),
        ({"concurrency": 0}, "--concurrency must be 1 or more, got 0"),
        ({"num_trials": 0}, "--trials must be 1"),
        ({"skip_ratio": 1.0}, "--skip must be"),
    ],
)
def test_what_no_search_can_use_is_refused(tmp_path, given, message):
    with pytest.raises(UserError, match=message):
        SlimOptions(tmp_path, tmp_path / "out", **given)


def test_a_folder_is_one_searchs(tmp_path, monkeypatch):
    """The trials read their recordings from it: those of another search would go unnoticed."""
    recordings = [Recorded(np.arange(9, dtype=np.int32), 2)] * 4
    engine = SimpleNamespace(capabilities=SimpleNamespace(can_slim=True, vocab_size=9))
    monkeypatch.setattr(slim, "refuse_unknown_tokens", lambda *_, **__: None)
    monkeypatch.setattr(slim, "read_traces", lambda _: [])
    monkeypatch.setattr(slim, "record", lambda *_, **__: recordings)
    monkeypatch.setattr(slim, "load_engine", lambda _: (engine, None))
    options, config = SlimOptions(tmp_path, tmp_path / "out"), Config()
    quiet = SimpleNamespace(stage=lambda _: None)

    def refused(**changes) -> str:
        asked = SlimOptions(tmp_path, tmp_path / "out", **changes)
        with pytest.raises(UserError) as error:
            slim.run_slim_search(asked, config, progress=quiet)
        assert not (tmp_path / "out" / slim.RECORDINGS).exists()
        return str(error.value)

    with claimed(options.out, slim._settings(options, config, recordings)):
        assert "another run is writing there" in refused()
    assert "was filled with skip=0.45, and this run has skip=0.2" in refused(skip_ratio=0.2)


def test_too_few_traces_are_accounted_for():
    def trace(number: int, tokens: tuple[int, ...] = (5, 6) * 4, **changes) -> Trace:
        given = {"prompt_token_ids": (1, 2), "output_token_ids": tokens}
        given |= {"split": "train", "context_length": 64}
        about = {"workload": "w", "family": "", "scope": "s", "session_id": f"s{number}"}
        made = {"created_at": datetime(2026, 1, 1, tzinfo=UTC), "model": "m", "tokenizer_sha": ""}
        return Trace(trace_id=f"t{number}", prompt_id="p", **about, **made, **(given | changes))

    hot = SamplingParams(temperature=0.7)
    traces = [
        *(trace(i, sampling=hot) for i in range(3)),
        *(trace(i, split="test") for i in range(3, 5)),
        trace(5, (7,)),
        trace(6, (100, 101, 102, 103, 104, 105, 106, 107)),
        trace(7, tuple(range(20, 30)), prompt_token_ids=tuple(range(20, 30))),
    ]
    with pytest.raises(UserError) as error:
        slim.record(traces, Config(), num_tokens=100)
    said = str(error.value)
    assert said.startswith("1 trace is usable, at least 4 are needed (left out: 3 sampled at a ")
    assert "2 of the test split, 1 under 8 output tokens" in said
    assert "1 the cache drafts nothing for" in said
    assert "--split train --temperature 0" in said


@pytest.mark.parametrize(
    ("num_blocks", "wrong", "said"),
    [
        (80, 0.04, None),
        (33, 0.04, "dp: 33 held-out blocks are few to judge by, record more traces"),
        (
            80,
            0.795,
            r"dp: 79.5% of its unchecked .* 30% of the blocks .* over tiers.max_miss_rate=0.05",
        ),
        (33, 0.795, "few to judge by, .*; 79.5%"),
    ],
)
def test_a_search_says_how_little_its_best_is_worth(num_blocks, wrong, said):
    rows = [{"method": "dp", "wrong_accepts": wrong}, {"method": "ours", "wrong_accepts": 0.9}]
    found = {"best": "dp", "rows": rows, "provenance": {"held_out_blocks": num_blocks}}
    warning = warning_of(found, SlimOptions(Path("t"), Path("o")), Config())
    assert list(warning) == ([] if said is None else ["warning"])
    if said is not None:
        assert "\n" not in warning["warning"]
        assert re.search(said, warning["warning"])


def search(method: str, skipped: list[int], scale: float, escalated: float = 0.5):
    """Of a target of four layers whose sublayers take `scale` ms each, and nothing else."""
    cost = (8 - 2 * len(skipped)) / 8
    point = {"escalated": escalated, "wrong_rate": 0.1, "speed_vs_full": 0.9 / (cost + escalated)}
    row = {"method": method, "skip_ratio": len(skipped) / 4, "curve": [point]}
    layers = {"skipped_attention": skipped, "skipped_mlp": skipped}
    timed = {"attention_ms": scale, "mlp_ms": scale, "fixed_ms": 0.0}
    return {
        "best": method,
        "rows": [{**row, **layers}],
        "num_layers": 4,
        "provenance": {"sublayer_ms": timed},
    }


def test_a_machine_that_was_slower_then_moves_no_curve():
    curves = frontier_curves([search("dp", [1], 1.0), search("knapsack", [1, 2], 3.0)])
    assert list(curves) == ["dp, 25% skipped", "knapsack, 50% skipped"]
    (dp,), (knapsack,) = curves.values()
    assert dp["speed_vs_full"] == pytest.approx(0.9 / 1.25)
    assert knapsack["speed_vs_full"] == pytest.approx(0.9 / 1.0)


def test_costs_are_those_of_the_first_search():
    first, other = search("dp", [1], 1.0), search("ours", [1, 2], 1.0)
    first["provenance"]["sublayer_ms"]["fixed_ms"] = 8.0
    (point,) = frontier_curves([first, other])["ours, 50% skipped"]
    assert point["speed_vs_full"] == pytest.approx(0.9 / (0.75 + 0.5))


@pytest.mark.parametrize("lacks", ["speed_vs_full", "skipped_mlp", "sublayer_ms", "rows", None])
def test_a_result_of_another_version_is_refused_by_name(tmp_path, lacks):
    slim = {"num_layers": 4, "skipped_attention": [1], "skipped_mlp": [1], "method": "dp"}
    kept = {"model": "m", "figures": {}, "provenance": {}, "format_version": 1}
    kept |= {"escalation": {"theta": [0.5], "escalated": [0.5]}}
    (tmp_path / "slim.json").write_text(json.dumps(slim | kept))
    found = search("dp", [1], 1.0)
    places = (found, found["provenance"], found["rows"][0], found["rows"][0]["curve"][0])
    for place in places:
        place.pop(lacks, None)
    (tmp_path / "search.json").write_text(json.dumps(found))
    if lacks is None:
        assert read_search(tmp_path)["num_layers"] == 4
        return
    with pytest.raises(UserError, match=rf"search.json: .*without '?{lacks}.*search again"):
        read_search(tmp_path)
