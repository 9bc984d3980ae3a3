"""Every system on the same traces: what bounds what, and what the table and the page say."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hvd_ray.cli import main
from hvd_ray.config import Config
from hvd_ray.fetch import tokenizer_sha
from hvd_ray.payoff.cost import RowCosts
from hvd_ray.payoff.dataset import TEST, read_labels_table
from hvd_ray.payoff.estimator import PredictorEstimator
from hvd_ray.payoff.features import FeatureExtractor
from hvd_ray.payoff.quality import ReliabilityBin, reliability
from hvd_ray.payoff.training import train_predictor
from hvd_ray.payoff.training_settings import TrainingSettings
from hvd_ray.pipelines.label import token_classes_of
from hvd_ray.traces.replay import ModelDrafts
from hvd_ray.traces.store import write_traces
from hvd_ray.tuning.data import label_table, open_material
from hvd_ray.tuning.recorded import ReplaySet
from hvd_ray.tuning.standings import ORACLE, OURS, RIVALS, Standing, standings
from hvd_ray.tuning.standings_page import standings_json, standings_markdown, write_standings
from hvd_ray.types import Source
from tests.unit.tuning.conftest import Data, label_folder, phrase_traces
from tests.unit.tuning.test_pieces import Many

COSTS = RowCosts((1, 8, 64), (40.0, 52.0, 90.0), {Source.EAGLE3: 2.0}, {Source.EAGLE3: 1.5})


@pytest.fixture(scope="module")
def judged(data: Data) -> ReplaySet:
    material = open_material(data.labels, data.traces, Config())
    found = material.replay_set(material.shards(), lambda trace: trace.split == TEST)
    rng = np.random.default_rng(0)
    models = [
        ModelDrafts(Source.EAGLE3, rng.integers(0, 3, len(t.output_token_ids)).astype(np.int32), 4)
        for t in found.traces
    ]
    return replace(found, models=tuple(models))


@pytest.fixture(scope="module")
def estimator(data: Data) -> PredictorEstimator:
    labels = read_labels_table(label_table(data.labels))
    settings = TrainingSettings(kind="survival", epochs=8, hidden=(16,), learning_rate=0.01)
    predictor = train_predictor(labels, settings).predictor
    return PredictorEstimator(predictor, FeatureExtractor(data.classes))


@pytest.fixture(scope="module")
def rows(judged: ReplaySet, estimator: PredictorEstimator) -> list[Standing]:
    return standings(judged, estimator, COSTS, Config())


def test_every_system_stands_in_every_row_and_none_beats_the_oracle(rows: list[Standing]) -> None:
    assert [row.workload for row in rows] == ["all", "chat", "tools"]
    assert rows[0].num_tokens == sum(row.num_tokens for row in rows[1:])
    for row in rows:
        assert set(row.speeds) == {*RIVALS, OURS, ORACLE}
        assert {s.num_tokens for s in row.summaries.values()} == {row.num_tokens}
        mine = {k: v for k, v in row.speeds.items() if k != "ngram"}  # its drafts are others
        assert max(mine.values()) == row.speeds[ORACLE]
        assert row.over_best == row.speeds[OURS] / max(row.speeds[name] for name in RIVALS)
        assert row.gap.estimate.ratio == pytest.approx(row.over_best)


def test_in_pieces_they_are_the_same(
    judged: ReplaySet, estimator: PredictorEstimator, rows: list[Standing]
) -> None:
    told: list[tuple[int, int]] = []
    found = standings(
        judged, estimator, COSTS, Config(), workers=Many(3), on_done=lambda *d: told.append(d)
    )
    assert [row.as_json() for row in found] == [row.as_json() for row in rows]
    assert told[-1] == (27, 27)


def test_systems_fall_back_to_the_head_as_they_do_live(rows: list[Standing]) -> None:
    shares = {name: set(summary.source_share) for name, summary in rows[0].summaries.items()}
    assert shares["suffix"] <= {Source.SUFFIX, Source.NONE}
    assert shares["eagle3"] <= {Source.EAGLE3, Source.NONE}
    assert {Source.SUFFIX, Source.EAGLE3} <= shares[ORACLE]
    for name in ("rule_score", "rule_match", "hvd_tau"):
        assert Source.EAGLE3 in shares[name]


def test_without_labels_of_a_head_it_is_left_out(
    judged: ReplaySet, estimator: PredictorEstimator
) -> None:
    alone = replace(judged, models=(None,) * len(judged.traces))
    whole, *_ = standings(alone, estimator, COSTS, Config())
    assert set(whole.speeds) == {*RIVALS, OURS, ORACLE} - {"eagle3"}


def test_the_reliability_bins_hold_every_long_draft(
    data: Data, estimator: PredictorEstimator
) -> None:
    labels = read_labels_table(label_table(data.labels)).test
    bins = reliability(estimator._predictor, labels)
    assert sum(b.num_positions for b in bins) == (labels.draft_len_N >= 6).sum()
    assert [b.predicted for b in bins] == sorted(b.predicted for b in bins)


def test_what_is_written_says_where_it_falls_short(rows: list[Standing], tmp_path: Path) -> None:
    bins = (ReliabilityBin(30, 0.1, 0.2), ReliabilityBin(10, 0.9, 0.8))
    tree = standings_json(rows, bins, unit="tokens/s", about={"predictor": "shipped for m"})
    written = write_standings(tmp_path, rows, bins, tree)
    names = {"replay.json", "replay.md", "replay.html", "reliability.png"}
    assert {path.name for path in written} == names
    text = standings_markdown(rows, unit="tokens/s", who="Predictor: shipped for m.")
    assert text.endswith("\n\nPredictor: shipped for m.")
    assert (tmp_path / "replay.md").read_text() == text + "\n"
    for row in rows:
        assert f"| {row.workload}" in text
        assert f"{row.of_oracle:.3f}" in text
    worst = replace(rows[1], summaries={**rows[1].summaries, OURS: rows[1].summaries["greedy"]})
    assert f"not on chat ({worst.over_best:.3f})" in standings_markdown(
        [rows[0], worst, rows[2]], unit="tokens/s"
    )
    page = (tmp_path / "replay.html").read_text()
    assert page.count("<svg") == 1
    assert "hvd_cost" in page
    assert "Predictor: shipped for m." in page
    write_standings(tmp_path / "none", rows, (), tree)
    assert not (tmp_path / "none" / "reliability.png").exists()


def hvd(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["report", *map(str, words)])
    return int(ended.value.code or 0)


def test_the_command_replays_labelled_traces(
    tiny_llama_path: Path,
    tmp_path: Path,
    estimator: PredictorEstimator,
    hvd_home: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert hvd_home
    model, sha = str(tiny_llama_path), tokenizer_sha(tiny_llama_path)
    traces, labels = tmp_path / "traces", tmp_path / "labels"
    named = [replace(trace, model=model, tokenizer_sha=sha) for trace in phrase_traces(6)]
    write_traces(named, traces / "traces" / "part-0.parquet")
    label_folder(traces, labels, token_classes_of(model, sha))
    estimator._predictor.save(tmp_path / "predictor")
    given = ("--replay", labels, "--traces", traces, "--predictor", tmp_path / "predictor")
    assert hvd(*given, "--costs", "pass", "--json") == 0
    tree = json.loads(capsys.readouterr().out)
    assert (tree["unit"], tree["rows"][0]["workload"]) == ("tokens/pass", "all")
    assert tree["rows"][0]["speeds"]["greedy"] == 1.0
    assert tree["provenance"]["predictor_kind"] == "survival"
    assert hvd(*given, "--costs", "pass", "--out", tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines()[:8])) <= 80
    assert "replay.md" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--replay", "l"), "--replay needs --traces"),
        (("--replay", "l", "--transfer", "l"), "give results of"),
        (("--transfer", "l", "--costs", "pass"), "--costs goes with --replay only"),
        (("--replay", "nowhere", "--traces", "t"), "nowhere: no labels"),
        (
            ("--replay", "l", "--traces", "t", "--workers", "0"),
            "--workers must be 1 or more, got 0",
        ),
        (("--sweep", "s", "--workers", "2"), "--workers goes with --replay and --transfer only"),
    ],
)
def test_what_the_command_refuses(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hvd(*words) == 2
    assert message in capsys.readouterr().err
