"""Kinds of predictors on labels whose payoff can be told from the features."""

import json
from pathlib import Path

import pytest

from hvd_ray.cli import main
from hvd_ray.payoff.dataset import read_labels_table
from hvd_ray.payoff.training_settings import TrainingSettings
from hvd_ray.tuning import rivals as module
from hvd_ray.tuning.rivals import rivals
from tests.unit.payoff.label_tables import label_table, write_labels


@pytest.fixture(autouse=True)
def few_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TREES", {**module.TREES, "max_iter": 30, "min_samples_leaf": 20})


def test_all_kinds_learn_and_beat_the_score() -> None:
    settings = TrainingSettings(
        kind="survival", epochs=10, hidden=(16,), members=2, learning_rate=0.01
    )
    score, *learnt = rivals(read_labels_table(label_table()), settings)
    names = ["mlp, 256x256", "survival, 256x256", "survival, 2 of 16", "boosted trees, 30"]
    assert [row.name for row in learnt] == names
    assert score.ask_us is None
    for row in learnt:
        assert row.average_precision is not None
        assert score.average_precision is not None
        assert row.average_precision > score.average_precision + 0.05
        assert row.ask_us is not None
        assert row.ask_us > 0


def test_the_command_shows_them_and_keeps_nothing(
    tmp_path: Path, hvd_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = write_labels(tmp_path, label_table(900))
    words = ["train", str(labels), "--rivals", "--kind", "survival", "--epochs", "1", "--json"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert not ended.value.code
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[-1]["name"] == "boosted trees, 30"
    assert not (hvd_home / "runs").exists()
