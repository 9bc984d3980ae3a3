"""`hvd tune` on Ray Tune: trials at once, one tracked run each, and going on after a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvd_ray.config import Config
from hvd_ray.errors import UserError
from hvd_ray.fetch import tokenizer_sha
from hvd_ray.payoff.predictor import MlpPredictor
from hvd_ray.pipelines.label import token_classes_of
from hvd_ray.traces.store import write_traces
from hvd_ray.tracking import resolve_predictor
from hvd_ray.tracking.promotion import find_alias
from hvd_ray.tracking.store import open_store
from hvd_ray.tuning.run import SweepOptions, run_sweep
from hvd_ray.tuning.space import SweepSettings, load_sweep
from tests.e2e.kills import worker_killed_once
from tests.unit.tuning.conftest import Data, label_folder, phrase_traces
from tests.unit.tuning.test_watch import Silent

pytestmark = pytest.mark.ray

REPO = Path(__file__).parents[2]
SMALL = (
    *("trials=4", "concurrency=2", "taus=[0, 6]", "space.depth=1", "space.width={choice: [8, 16]}"),
    *("space.epochs={int: [2, 4]}", "asha={grace_epochs: 1, reduction_factor: 2}"),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, tiny_llama_path: Path) -> Data:
    """Traces in the tokens of the tiny model, and their labels."""
    folder = tmp_path_factory.mktemp("tune")
    model, sha = str(tiny_llama_path), tokenizer_sha(tiny_llama_path)
    traces = [replace(trace, model=model, tokenizer_sha=sha) for trace in phrase_traces()]
    write_traces(traces, folder / "traces" / "traces" / "part-0.parquet")
    classes = token_classes_of(model, sha)
    label_folder(folder / "traces", folder / "labels", classes)
    return Data(folder / "traces", folder / "labels", classes)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One HVD_HOME, with one tracking store, for all tests here."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def _in_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_HOME", str(home))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def children(home: Path, result: dict[str, Any]) -> list[Any]:
    client = open_store(f"sqlite:///{home}/tracking/mlflow.db").client
    experiment = client.get_run(result["run_id"]).info.experiment_id
    query = f"tags.mlflow.parentRunId = '{result['run_id']}'"
    return list(client.search_runs([experiment], filter_string=query))


def small_sweep() -> SweepSettings:
    return load_sweep(None, SMALL)[0]


def test_a_sweep_from_trials_to_a_challenger(
    data: Data, home: Path, tmp_path: Path, ray_session: Any
) -> None:
    assert ray_session.is_initialized()
    options = SweepOptions(data.labels, data.traces, tmp_path / "sweep", "pass")
    result = run_sweep(options, small_sweep(), Config(), progress=Silent())

    rows = result["trials"]
    assert len({row["trial"] for row in rows}) == 4
    assert all(row["status"] in ("finished", "stopped early") for row in rows)
    assert result["best"]["metrics"]["speed"] == max(row["metrics"]["speed"] for row in rows)
    runs = children(home, result)
    assert sorted(run.info.run_name for run in runs) == sorted(f"trial-{r['trial']}" for r in rows)
    assert {run.info.status for run in runs} == {"FINISHED"}
    by_name = {run.info.run_name: run for run in runs}
    for row in rows:
        logged = by_name[f"trial-{row['trial']}"].data
        assert logged.metrics["speed"] == pytest.approx(row["metrics"]["speed"])
        assert logged.params["policy"] == row["params"]["policy"]
        assert list((tmp_path / "sweep/trials" / f"trial-{row['trial']}").glob("events.out*"))

    assert [row["workload"] for row in result["test"]] == ["all", "chat", "tools"]
    assert result["test"][0]["sessions"] == 6
    assert set(result["curves"]["workloads"]) == {"all", "chat", "tools"}
    assert "data-trial" in (tmp_path / "sweep/sweep.html").read_text(encoding="utf-8")
    config = Config(model=result["model"])
    challenger = find_alias("challenger", config=config)
    assert challenger is not None
    assert challenger.ref == result["registered"]
    predictor = MlpPredictor.load(resolve_predictor(challenger.ref, config=config))
    assert predictor.card.training["policy"]["policy"] == result["best"]["params"]["policy"]
    assert "predictor/tools" in predictor.card.metrics

    with pytest.raises(UserError, match=r"holds a sweep already; go on with --resume"):
        run_sweep(options, small_sweep(), Config(), progress=Silent())
    again = replace(options, is_resumed=True)
    assert run_sweep(again, small_sweep(), Config(), progress=Silent()) == result
    other = load_sweep(None, [*SMALL, "space.tau=1"])[0]
    with pytest.raises(UserError, match=r"was filled with space\.tau"):
        run_sweep(again, other, Config(), progress=Silent())


def test_a_sweep_that_is_killed_goes_on_where_it_was(
    data: Data, home: Path, tmp_path: Path, ray_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ray_session.get_runtime_context().gcs_address)
    out = tmp_path / "sweep"
    command = [
        *(sys.executable, "-m", "hvd_ray.cli", "tune", *SMALL, "trials=5"),
        *("--labels", str(data.labels), "--traces", str(data.traces), "--out", str(out)),
        *("--costs", "pass", "--resume", "--json"),
    ]
    first = subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: len(finished(out)) >= 2, process=first)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    before = finished(out)
    assert not (out / "sweep.json").exists()

    second = subprocess.run(
        command, cwd=REPO, capture_output=True, text=True, timeout=400, check=True
    )
    answer = json.loads(second.stdout)
    result = json.loads((out / "sweep.json").read_text(encoding="utf-8"))
    assert answer["best"] == result["best"]
    trials = {row["trial"] for row in result["trials"]}
    assert len(trials) == 5
    assert len(before & trials) >= len(before) - 1, "what was finished and saved is not run again"
    runs = children(home, result)
    alive = [run for run in runs if run.info.status != "KILLED"]
    assert {run.info.run_name for run in alive} == {f"trial-{trial}" for trial in trials}
    assert {run.info.status for run in alive} == {"FINISHED"}


def test_a_trial_whose_worker_is_killed_begins_again(
    data: Data, home: Path, tmp_path: Path, ray_session: Any
) -> None:
    assert ray_session.is_initialized()
    out = tmp_path / "sweep"
    options = SweepOptions(data.labels, data.traces, out, "pass")
    with worker_killed_once(lambda: (out / "predictors").is_dir()) as killed:
        result = run_sweep(options, small_sweep(), Config(), progress=Silent())
    assert killed, "a trial was there to be killed"
    assert {row["status"] for row in result["trials"]} <= {"finished", "stopped early"}
    runs = children(home, result)
    assert sorted(run.info.run_name for run in runs) == sorted(
        f"trial-{row['trial']}" for row in result["trials"]
    )
    assert {run.info.status for run in runs} == {"FINISHED"}


def finished(out: Path) -> set[str]:
    """Trials that Tune's saved state calls over."""
    states = sorted((out / "trials").glob("experiment_state-*.json"))
    if not states:
        return set()
    try:
        saved = json.loads(states[-1].read_text(encoding="utf-8"))
    except ValueError:
        return set()  # being written
    trials = [json.loads(entry[0]) for entry in saved["trial_data"]]
    return {trial["trial_id"] for trial in trials if trial["status"] == "TERMINATED"}


def wait_for(holds: Any, *, process: "subprocess.Popen[bytes]", timeout_s: float = 240) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.2)
