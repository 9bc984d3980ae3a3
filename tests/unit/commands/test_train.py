"""`hvd train`: what it prints, writes and registers, and one line for every mistake."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from hvd_ray.cli import main
from hvd_ray.config import Config
from hvd_ray.home import file_lock
from hvd_ray.payoff.predictor import MlpPredictor
from hvd_ray.shipped import shipped_folder
from hvd_ray.tracking import resolve_predictor
from tests.unit.payoff.label_tables import label_table, write_labels

QUICK = ("--epochs", "1")


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labels(tmp_path_factory.mktemp("labels"), label_table(1500))


@pytest.fixture(autouse=True)
def home(hvd_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return hvd_home


def hvd(*arguments: object) -> int:
    """Run the command; its exit code."""
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run it, expect exit code 2 and one line; the line."""
    assert hvd("train", *arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    errors = [line for line in said.err.splitlines() if line.startswith("hvd: error: ")]
    assert len(errors) == 1
    assert "Traceback" not in said.err
    return errors[0]


def test_it_trains_registers_and_answers_in_json(
    labels: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "mine"
    asked = ("--json", "--out", out, "--tau", "4", "seed=7", "model=toy")
    assert hvd("train", labels, *QUICK, *asked) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["predictor"] == str(out)
    assert (answer["registered"], answer["alias"]) == ("models:/hvd-payoff-toy/1", "champion")
    assert answer["beside_shipped"] is None, "nothing ships for it"
    assert answer["training"]["seed"] == 7
    assert {row["workload"] for row in answer["rows"]} == {"all", "chat", "tools"}
    assert {row["tau"] for row in answer["rows"]} == {4, 0.5}, "a chance is called at a half"
    champion = MlpPredictor.load(resolve_predictor(config=Config(model="toy")))
    assert np.array_equal(champion.network.params, MlpPredictor.load(out).network.params)
    assert champion.card.training["provenance"]["seed"] == 7


def test_ablate_shows_what_each_group_adds_and_keeps_nothing(
    labels: Path, capsys: pytest.CaptureFixture[str], home: Path, tmp_path: Path
) -> None:
    asked = ("train", labels, *QUICK, "--kind", "survival", "--ablate")
    assert hvd(*asked) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 100
    assert all(group in said for group in ("nothing", "cache_match", "support", "place"))
    assert hvd(*asked, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[0]["without"] == "nothing"
    assert not (home / "runs").exists()
    assert not (home / "tracking").exists()
    assert "--traces" in refused(capsys, labels, "--ablate", "--costs", "pass")
    assert "--ablate" in refused(capsys, labels, "--traces", tmp_path)


def test_folders_labelled_apart_teach_one_predictor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, sha in (("a", "aa"), ("b", "aa")):
        write_labels(tmp_path / name, label_table(900))
        note = {"settings": {"command": "traces label", "tokenizer_sha": sha}, "model": "toy"}
        (tmp_path / name / "manifest.json").write_text(json.dumps(note))
    whole = ("train", tmp_path, *QUICK, "--no-register", "--json")
    assert hvd(*whole, "--out", tmp_path.with_name("p")) == 0
    both = json.loads(capsys.readouterr().out)["training"]["num_train_positions"]
    assert MlpPredictor.load(tmp_path.with_name("p")).card.tokenizer_sha == "aa"
    assert hvd("train", tmp_path / "a", *QUICK, "--no-register", "--json") == 0
    assert both == 2 * json.loads(capsys.readouterr().out)["training"]["num_train_positions"]
    other = {"settings": {"tokenizer_sha": "bb"}, "model": "toy"}
    (tmp_path / "b" / "manifest.json").write_text(json.dumps(other))
    assert "labelled with tokenizer_sha 'bb'" in refused(capsys, tmp_path)


def test_the_knobs_that_a_sweep_turns_can_be_set(
    labels: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    knobs = {
        "train.depth": 1,
        "train.width": 8,
        "train.members": 2,
        "train.learning_rate": 0.01,
        "train.batch_size": 500,
        "train.dropout": 0.1,
        "train.weight_decay": 0.0,
        "train.without": "cache_match+place",
    }
    given = [f"{key}={value}" for key, value in knobs.items()]
    assert hvd("train", labels, *QUICK, "--no-register", "--json", *given) == 0
    training = json.loads(capsys.readouterr().out)["training"]
    assert training["hidden"] == [8]
    for key in ("members", "learning_rate", "batch_size", "dropout", "weight_decay", "without"):
        assert training[key] == knobs[f"train.{key}"]
    assert training["effective_batch_size"] == 64
    assert hvd("train", "--help") == 0
    said = capsys.readouterr().out
    assert all(key in said for key in knobs)


def test_unknown_knobs_and_groups_are_refused(
    labels: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "train.colour: unknown" in refused(capsys, labels, "train.colour=red")
    assert "'moon' is no feature group" in refused(capsys, labels, "train.without=moon")
    assert "train.dropout" in refused(capsys, labels, "train.dropout=1")


def test_the_table_fits_80_columns_and_names_what_was_made(
    labels: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert hvd("train", labels, *QUICK, "--no-register", "--kind", "survival") == 0
    said = capsys.readouterr().out
    *table, last = said.splitlines()
    assert max(map(len, table)) <= 80
    for word in ("chat", "tools", "predictor", "score", "recall"):
        assert word in said
    folder = Path(last.removeprefix("predictor: "))
    assert folder.parent == home / "runs" / "predictors"
    assert MlpPredictor.load(folder).card.kind == "survival"
    assert "registered" not in said


def test_without_tracking_nothing_but_the_predictor_is_made(
    labels: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, home: Path
) -> None:
    out = tmp_path / "p"
    assert hvd("train", labels, *QUICK, "--out", out, "--json", "tracking.uri=none") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["registered"], answer["run_id"]) == (None, None)
    assert out.is_dir()
    assert not home.exists()


def test_the_labels_note_whose_they_are(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = write_labels(tmp_path / "labels", label_table(600))
    manifest = {"complete": True, "model": "some/other", "settings": {"tokenizer_sha": "ab12"}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert hvd("train", folder, *QUICK, "--out", tmp_path / "p", "tracking.uri=none") == 0
    card = MlpPredictor.load(tmp_path / "p").card
    assert (card.model, card.tokenizer_sha) == ("some/other", "ab12")
    capsys.readouterr()


MISTAKES: dict[str, tuple[tuple[str, ...], str]] = {
    "kind": (("--kind", "forest"), "kind must be one of mlp, survival"),
    "epochs": (("--epochs", "0"), "epochs must be >= 1"),
    "tau, a word": (("--tau", "six"), "--tau 'six': expected a number"),
    "tau, not a number": (("--tau", "nan"), "tau must be a number >= 0"),
    "tau, below 0": (("--tau=-1",), "tau must be a number >= 0"),
    "setting": (("policy.taux=3",), "policy.taux"),
    "config": (("--config", "/nowhere.yaml"), "/nowhere.yaml"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_makes_nothing(
    labels: Path, capsys: pytest.CaptureFixture[str], home: Path, mistake: str
) -> None:
    arguments, says = MISTAKES[mistake]
    assert says in refused(capsys, labels, *arguments)
    assert not home.exists()


def rewritten(labels: Path, folder: Path, **metadata: str) -> Path:
    """The labels with other file metadata."""
    table = pq.read_table(labels / "labels" / "part-0.parquet")
    changed = {f"hvd_ray.{key}".encode(): value.encode() for key, value in metadata.items()}
    (folder / "labels").mkdir(parents=True)
    table = table.replace_schema_metadata({**table.schema.metadata, **changed})
    pq.write_table(table, folder / "labels" / "part-0.parquet")
    return folder


def test_labels_of_another_make_are_refused(
    labels: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, home: Path
) -> None:
    other_schema = rewritten(labels, tmp_path / "a", schema_version="99")
    assert "schema version 99" in refused(capsys, other_schema)
    other_features = rewritten(labels, tmp_path / "b", feature_version="99")
    assert "features of version 99" in refused(capsys, other_features)
    (tmp_path / "empty").mkdir()
    assert "holds no labels" in refused(capsys, tmp_path / "empty")
    assert "no such folder" in refused(capsys, tmp_path / "nowhere")
    (tmp_path / "broken.parquet").write_text("no parquet")
    assert "broken.parquet" in refused(capsys, tmp_path / "broken.parquet")
    assert not home.exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"split": ["train"] * 300}, "in split 'test'"),
        ({"draft_len": np.zeros(300, np.int32), "accepted_len": np.zeros(300, np.int32)}, "train"),
    ],
)
def test_labels_that_cannot_teach_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    folder = write_labels(tmp_path / "labels", label_table(300, **changes))
    assert says in refused(capsys, folder)


def test_a_first_predictor_that_is_not_known_to_be_as_good_only_challenges_what_ships(
    labels: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = shipped_folder("smollm2-135m", "payoff")
    assert hvd("train", labels, *QUICK, "--kind", "mlp") == 0
    said = capsys.readouterr().out
    assert "registered: models:/hvd-payoff-smollm2-135m/1 as challenger" in said
    assert re.search(r"shipped predictor goes on deciding:\n  average precision 0\.\d+, ", said)
    assert "it gives no survival curve, which hvd_cost needs" in said
    assert "a verdict takes 1,000 held-out positions" in said
    assert "hvd promote --traces TRACES_DIR" in said
    assert "policy.predictor=models:/hvd-payoff-smollm2-135m@challenger" in said
    assert "hvd promote --force" in said
    assert resolve_predictor(config=Config()) == shipped
    assert hvd("promote") == 2
    assert "give --traces TRACES_DIR" in capsys.readouterr().err, "the labels are known"

    assert hvd("promote", "--force") == 0
    assert "promoted: forced, though nothing was compared" in capsys.readouterr().out
    assert resolve_predictor(config=Config()) != shipped
    assert hvd("train", labels, *QUICK) == 0
    said = capsys.readouterr().out
    assert "as challenger\nthe champion goes on deciding\n" in said
    assert "no survival curve" not in said, "survival is the usual kind"

    assert hvd("promote", "--shipped") == 0
    assert "was champion: models:/hvd-payoff-smollm2-135m/1 (" in capsys.readouterr().out
    assert resolve_predictor(config=Config()) == shipped
    assert hvd("promote", "--shipped", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"champion": None, "was": None}
    assert hvd("promote", "--shipped", "--force") == 2
    assert hvd("promote", "--shipped", "model=toy") == 2
    assert "no predictor ships for toy" in capsys.readouterr().err


def test_a_first_predictor_that_is_better_than_what_ships_decides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The payoffs of these labels are made up: the shipped one cannot know their rule."""
    many = write_labels(tmp_path / "labels", label_table(4500))
    assert hvd("train", many, "--epochs", "5", "--out", tmp_path / "p") == 0
    said = capsys.readouterr().out
    assert "registered: models:/hvd-payoff-smollm2-135m/1 as champion" in said
    assert "it decides from now on instead of the shipped one:\n  average precision 0." in said
    assert all(len(line) <= 80 for line in said.splitlines() if line.startswith("  "))
    assert "undo:    hvd promote --shipped" in said
    champion = MlpPredictor.load(resolve_predictor(config=Config()))
    assert np.array_equal(champion.network.params, MlpPredictor.load(tmp_path / "p").network.params)


def test_labels_that_are_not_all_there_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = write_labels(tmp_path / "labels", label_table(300))
    manifest = {"complete": False, "settings": {}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert "not finished; type the same `hvd traces label`" in refused(capsys, folder)
    manifest = {"complete": True, "settings": {}, "result": {"positions": 1300}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert "holds 300 of the 1,300 positions" in refused(capsys, folder)


def test_two_trainings_into_one_folder_do_not_mix(
    labels: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with file_lock(tmp_path / "p"):
        assert "another training is writing there" in refused(
            capsys, labels, "--out", tmp_path / "p", "tracking.uri=none"
        )
    assert not (tmp_path / "p").exists()


def test_nothing_but_a_predictor_is_overwritten(
    labels: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    assert "holds 'thesis.tex'" in refused(capsys, labels, "--out", tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_a_store_that_fails_in_the_end_does_not_hide_the_predictor(
    labels: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hvd_ray import tracking
    from hvd_ray.errors import UserError

    def fail(*_args: object, **_options: object) -> None:
        raise UserError("the store is gone")

    monkeypatch.setattr(tracking, "register_predictor", fail)
    line = refused(capsys, labels, *QUICK, "--out", tmp_path / "p")
    assert line.endswith(f"the store is gone; the predictor itself is saved: {tmp_path / 'p'}")
    assert MlpPredictor.load(tmp_path / "p").card.kind == "survival"


def test_a_command_typed_again_finds_what_it_has_made(
    labels: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As after a kill between the end of the run and the answer."""
    words = [str(labels), *QUICK, "--out", str(tmp_path / "p"), "--json"]

    def answer(*more: str) -> dict[str, Any]:
        with pytest.raises(SystemExit) as stop:
            main(["train", *words, *more])
        assert stop.value.code == 0
        return dict(json.loads(capsys.readouterr().out))

    first = answer()
    assert answer() == first
    (tmp_path / ".p.run").write_text("a run that was begun and not ended")
    assert answer() == first
    assert not (tmp_path / ".p.run").exists()
    other = answer("seed=7")
    assert other["run_id"] != first["run_id"]
    (tmp_path / "p" / "predictor.json").unlink()
    assert answer("seed=7")["run_id"] != other["run_id"]
