"""Tracking: runs and registered predictors in SQLite, and one clear line when a store fails."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvd_ray.config import Config
from hvd_ray.errors import UserError
from hvd_ray.shipped import shipped_folder
from hvd_ray.tracking import (
    CHALLENGER,
    CHAMPION,
    NullTracker,
    RegisteredPredictor,
    open_tracker,
    register_predictor,
    registered_name,
    resolve_predictor,
    runs_page,
    tracked,
    tracking_uri,
)
from hvd_ray.tracking.promotion import drop_champion, is_vacant
from hvd_ray.tracking.runs import MlflowTracker, flattened


def config_of(**tracking: Any) -> Config:
    return Config.model_validate({"tracking": tracking})


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One HVD_HOME for the tests that only add runs: making a store takes seconds."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def home(shared_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The shared HVD_HOME, from an empty working folder that must stay empty."""
    monkeypatch.setenv("HVD_HOME", str(shared_home))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield shared_home
    assert list(folder.iterdir()) == [], "nothing may be left in the working folder"


def a_predictor(folder: Path, text: str = "{}") -> Path:
    folder.mkdir(parents=True)
    (folder / "predictor.json").write_text(text)
    (folder / "weights.safetensors").write_bytes(b"weights")
    return folder


def registered(folder: Path, config: Config, **options: Any) -> RegisteredPredictor:
    with tracked(config, run_name="train") as tracker:
        return register_predictor(tracker, folder, config=config, **options)


def fetched(tracker: Any) -> Any:
    assert isinstance(tracker, MlflowTracker)
    return tracker.store.client.get_run(tracker.run_id)


# -- runs --------------------------------------------------------------------------------------


def test_a_run_keeps_what_it_is_told(home: Path, tmp_path: Path) -> None:
    config = Config()
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "table.txt").write_text("42")
    with tracked(config, run_name="train") as tracker:
        tracker.log_params({"policy": {"tau": 6.0}, "note": "x" * 7000})
        for epoch in (1, 2):
            tracker.log_metrics({"loss": 1.0 / epoch, "ap/all": 0.5}, step=epoch)
        tracker.log_artifacts(tmp_path / "made", "report")
    run = fetched(tracker)
    assert run.info.status == "FINISHED"
    assert run.data.params["policy.tau"] == "6.0"
    assert len(run.data.params["note"]) == 6000
    assert run.data.metrics == {"loss": 0.5, "ap/all": 0.5}
    (kept,) = (home / "tracking").rglob("table.txt")
    assert kept.parent.name == "report"
    assert kept.read_text() == "42"


def test_the_runs_have_a_page_once_there_are_some() -> None:
    config = config_of(experiment="of its own")
    uri, name = tracking_uri(config), config.tracking.experiment
    assert runs_page(uri, name) is None
    with tracked(config, run_name="train") as tracker:
        pass
    number = fetched(tracker).info.experiment_id
    assert runs_page(uri, name) == f"#/experiments/{number}/runs?workflowType=machine_learning"


def test_more_params_and_metrics_than_one_call_takes() -> None:
    with tracked(Config(), run_name="many") as tracker:
        tracker.log_params({f"p{i}": i for i in range(250)})
        tracker.log_metrics({f"m{i}": i for i in range(1100)})
    run = fetched(tracker)
    assert (len(run.data.params), len(run.data.metrics)) == (250, 1100)


def test_child_runs_stand_under_their_parent() -> None:
    with (
        tracked(Config(), run_name="sweep") as parent,
        tracked(Config(), run_name="trial", parent=parent.run_id) as child,
    ):
        pass
    assert fetched(child).data.tags["mlflow.parentRunId"] == parent.run_id


@pytest.mark.parametrize(
    ("error", "status"), [(ZeroDivisionError, "FAILED"), (KeyboardInterrupt, "KILLED")]
)
def test_a_run_that_breaks_off_is_marked(error: type[BaseException], status: str) -> None:
    def fail() -> None:
        with tracked(Config(), run_name="breaks") as tracker:
            seen.append(tracker)
            raise error

    seen: list[Any] = []
    with pytest.raises(error):
        fail()
    assert fetched(seen[0]).info.status == status


def test_tracking_off_remembers_nothing(hvd_home: Path, tmp_path: Path) -> None:
    config = config_of(uri="none")
    with tracked(config, run_name="x") as tracker:
        tracker.log_params({"a": 1})
        tracker.log_metrics({"b": 1.0})
        tracker.log_artifacts(tmp_path)
        assert isinstance(tracker, NullTracker)
        with pytest.raises(UserError, match="tracking is off"):
            register_predictor(tracker, tmp_path, config=config)
    assert not hvd_home.exists()


def test_where_runs_go(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracking_uri(Config()) == f"sqlite:///{home}/tracking/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://a")
    assert tracking_uri(Config()) == "http://a"
    assert tracking_uri(config_of(uri="http://b")) == "http://b"


def test_another_sqlite_file_keeps_its_artifacts_beside_it(tmp_path: Path) -> None:
    config = config_of(uri=f"sqlite:///{tmp_path}/mine/runs.db", experiment="e")
    with tracked(config, run_name="x") as tracker:
        assert fetched(tracker).info.artifact_uri.startswith((tmp_path / "mine/artifacts").as_uri())


def test_secrets_never_reach_the_store() -> None:
    params = {"tracking": {"uri": "https://me:hunter2@host"}, "n": {"api_key": "k"}}
    assert flattened(params) == {"tracking.uri": "https://me:***@host", "n.api_key": "***"}


OPEN_RUN = """
from hvd_ray.config import Config
from hvd_ray.tracking import tracked
with tracked(Config(), run_name="x") as tracker:
    tracker.log_metrics({"a": 1.0})
from mlflow.telemetry import get_telemetry_client
assert get_telemetry_client() is None, "telemetry is on"
print(tracker.run_id)
"""


def test_two_processes_at_once_make_one_store(tmp_path: Path) -> None:
    environment = {**os.environ, "HVD_HOME": str(tmp_path / "home")}
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_DISABLE_TELEMETRY", "PYTEST_CURRENT_TEST"):
        environment.pop(name, None)
    command = [sys.executable, "-c", OPEN_RUN]
    both = [
        subprocess.Popen(
            command,
            env=environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    answers = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], answers
    assert len({out for out, _ in answers}) == 2
    assert [err for _, err in answers] == ["", ""], "no chatter on stderr"
    assert not (tmp_path / "mlruns").exists()
    names = {path.name for path in (tmp_path / "home" / "tracking").iterdir()}
    assert names == {".mlflow.db.lock", "mlflow.db", "artifacts"}


# -- the registry ------------------------------------------------------------------------------


def test_the_first_version_is_champion_and_later_ones_challenge(tmp_path: Path) -> None:
    config = Config(model="alias-test")
    with pytest.raises(UserError, match=r"hvd-payoff-alias-test@champion .* `hvd train"):
        resolve_predictor(config=config)
    first = registered(a_predictor(tmp_path / "a", '"first"'), config)
    second = registered(a_predictor(tmp_path / "b", '"second"'), config)
    assert (first.alias, second.alias) == (CHAMPION, CHALLENGER)
    assert (tmp_path / "a" / "predictor.json").is_file(), "the folder given is left alone"

    def read(ref: str | None) -> str:
        folder = resolve_predictor(ref, config=config)
        assert (folder / "weights.safetensors").read_bytes() == b"weights"
        assert sorted(path.name for path in folder.iterdir()) == [
            "predictor.json",
            "weights.safetensors",
        ]
        return (folder / "predictor.json").read_text()

    assert read(None) == '"first"'
    assert read(f"models:/{second.name}@challenger") == '"second"'
    assert read(second.ref) == '"second"'
    third = registered(a_predictor(tmp_path / "c", '"third"'), config, alias=CHAMPION)
    assert read(None) == '"third"'
    assert read(first.ref) == '"first"'
    assert third.alias == CHAMPION


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = a_predictor(tmp_path / "p")
    assert resolve_predictor(str(folder), config=Config()) == folder
    config = Config.model_validate({"policy": {"predictor": str(folder)}})
    assert resolve_predictor(config=config) == folder


@pytest.mark.parametrize("ref", ["models:/x", "models:/x/y", "models:/x@", "models:x@y", "models:"])
def test_a_reference_that_is_none_is_refused(ref: str) -> None:
    with pytest.raises(UserError, match="expected a folder, models:/NAME@ALIAS"):
        resolve_predictor(ref, config=Config())


def test_what_is_not_there_is_refused_with_what_to_type(tmp_path: Path) -> None:
    config = Config(model="absence-test")
    version = registered(a_predictor(tmp_path / "a"), config)
    for ref in (
        f"models:/{version.name}@nobody",
        f"models:/{version.name}/99",
        "models:/nothing/1",
    ):
        with pytest.raises(UserError, match=r"no payoff predictor .* `hvd train LABELS_DIR`"):
            resolve_predictor(ref, config=config)
    with pytest.raises(UserError, match=r"predictor.json; give one written by `hvd train`"):
        resolve_predictor(str(tmp_path / "nowhere"), config=config)


def test_an_empty_home_is_asked_without_making_anything(hvd_home: Path) -> None:
    with pytest.raises(UserError, match=r"champion .* `hvd train LABELS_DIR`"):
        resolve_predictor(config=Config(model="tests/none-ships"))
    off = config_of(uri="none").model_copy(update={"model": "tests/none-ships"})
    with pytest.raises(UserError, match="tracking is off"):
        resolve_predictor(config=off)
    assert not hvd_home.exists()


def test_without_a_champion_the_shipped_predictor_is_taken(tmp_path: Path, hvd_home: Path) -> None:
    shipped = resolve_predictor(config=config_of(uri="none"))
    assert shipped == shipped_folder("smollm2-135m", "payoff")
    assert resolve_predictor(config=Config()) == shipped
    assert not hvd_home.exists()
    version = registered(a_predictor(tmp_path / "own", '"own"'), Config())
    assert version.alias == CHALLENGER, "of what ships"
    assert resolve_predictor(config=Config()) == shipped
    assert is_vacant(config=Config())
    better = registered(a_predictor(tmp_path / "b", '"b"'), Config(), replaces_shipped=True)
    assert better.alias == CHAMPION
    assert (resolve_predictor(config=Config()) / "predictor.json").read_text() == '"b"'
    assert not is_vacant(config=Config())
    third = registered(a_predictor(tmp_path / "c", '"c"'), Config(), replaces_shipped=True)
    assert third.alias == CHALLENGER, "of the champion"
    with pytest.raises(UserError, match="no payoff predictor"):
        resolve_predictor(f"models:/{version.name}@nobody", config=Config())


def test_without_its_champion_what_ships_decides_again(tmp_path: Path, hvd_home: Path) -> None:
    assert drop_champion(config=Config()) is None
    assert not is_vacant(config=Config()), "there is no registry that could say so"
    assert not hvd_home.exists()
    version = registered(a_predictor(tmp_path / "own"), Config(), alias=CHAMPION)
    assert drop_champion(config=Config()) == version
    assert resolve_predictor(config=Config()) == shipped_folder("smollm2-135m", "payoff")
    assert is_vacant(config=Config())
    assert not is_vacant(config=Config(model="another"))
    assert resolve_predictor(version.ref, config=Config()).is_dir(), "the version stays"


def test_a_registered_model_that_is_no_predictor_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "MLmodel").write_text("something else")
    version = registered(tmp_path / "other", Config(model="foreign-test"))
    for _ in range(2):
        with pytest.raises(UserError, match=r"is no payoff predictor \(predictor.json is missing"):
            resolve_predictor(version.ref, config=Config())


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2-135m", "hvd-payoff-smollm2-135m"),
        ("Qwen/Qwen3-8B", "hvd-payoff-qwen-qwen3-8b"),
        ("/data/models/My Model", "hvd-payoff-my-model"),
        ("./local:model", "hvd-payoff-.-local-model"),
    ],
)
def test_the_name_of_a_target_s_predictors(model: str, name: str) -> None:
    assert registered_name(model) == name


# -- stores that fail --------------------------------------------------------------------------


def refusal(config: Config) -> str:
    with pytest.raises(UserError) as caught:
        open_tracker(config, run_name="x")
    message = str(caught.value)
    assert "\n" not in message
    assert "tracking." in message, "it names the setting to change"
    return message


def test_a_broken_database(tmp_path: Path) -> None:
    (tmp_path / "bad.db").write_text("this is not a database at all, by any measure")
    assert "not a database" in refusal(config_of(uri=f"sqlite:///{tmp_path}/bad.db"))


def test_a_server_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    message = refusal(config_of(uri=f"http://me:hunter2@127.0.0.1:{port}"))
    assert "the server does not answer" in message
    assert "hunter2" not in message


@pytest.mark.parametrize("uri", ["gopher://x", "file:///nowhere/mlruns", "just words"])
def test_a_uri_that_is_no_store(uri: str) -> None:
    refusal(config_of(uri=uri))


def test_a_deleted_experiment() -> None:
    config = config_of(experiment="to-be-deleted")
    with tracked(config, run_name="x") as tracker:
        pass
    assert isinstance(tracker, MlflowTracker)
    tracker.store.client.delete_experiment(fetched(tracker).info.experiment_id)
    assert "was deleted" in refusal(config)


def test_importing_it_does_not_import_mlflow() -> None:
    code = "import sys, hvd_ray.tracking; print('mlflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
