"""One run for the sweep, one child run a trial, the same ones after a kill."""

from pathlib import Path
from typing import Any

import pytest

from hvd_ray.config import Config
from hvd_ray.tracking.store import open_store
from hvd_ray.tuning.watch import SweepRuns, SweepWatch, storable


class Silent:
    """A `RunProgress` that keeps the last line."""

    last: tuple[int, str] = (0, "")

    def stage(self, text: str) -> None: ...

    def expect(self, total: int) -> None: ...

    def advance(self, done: int, text: str) -> None:
        self.last = (done, text)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """One store for all tests here: making one takes seconds."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"
    return Config.model_validate({"tracking": {"uri": uri}})


def children(config: Config, runs: SweepRuns) -> list[Any]:
    client = open_store(str(config.tracking.uri)).client
    query = f"tags.mlflow.parentRunId = '{runs.parent.run_id}'"
    parent = client.get_run(runs.parent.run_id)
    return list(client.search_runs([parent.info.experiment_id], filter_string=query))


def test_trials_that_run_at_once_have_a_child_run_each(config: Config, tmp_path: Path) -> None:
    runs = SweepRuns(config, tmp_path / "runs.json")
    progress = Silent()
    watch = SweepWatch(runs, progress, "tokens/s")
    for trial in ("a", "b", "c"):
        watch.started(trial, {"depth": 2, "cost.objective": "rate"})
    for epoch in (1, 3):
        for trial, speed in (("a", 30.0), ("b", 40.0), ("c", 35.0)):
            watch.reported(trial, {"epoch": epoch, "speed": speed + epoch, "speed/my load!": 1.0})
    watch.ended("b", is_ok=True)
    watch.ended("a", is_ok=False)
    found = {run.info.run_name: run for run in children(config, runs)}
    assert set(found) == {"trial-a", "trial-b", "trial-c"}
    assert found["trial-b"].data.params == {"depth": "2", "cost.objective": "rate"}
    assert found["trial-b"].data.metrics["speed"] == 43.0
    assert found["trial-b"].data.metrics["speed/my load_"] == 1.0
    statuses = {name: run.info.status for name, run in found.items()}
    assert statuses == {"trial-a": "FAILED", "trial-b": "FINISHED", "trial-c": "RUNNING"}
    assert progress.last == (2, "trials, best 43.00 tokens/s")


def test_after_a_kill_the_same_runs_go_on(config: Config, tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    before = SweepRuns(config, path)
    before.child("a").log_metrics({"speed": 1.0})
    before.child("lost")
    after = SweepRuns(config, path)
    assert after.parent.run_id == before.parent.run_id
    assert after.child("a").run_id == before.child("a").run_id
    after.child("b")
    after.close_all_but({"a", "b"})
    statuses = {run.info.run_name: run.info.status for run in children(config, after)}
    assert statuses == {"trial-a": "RUNNING", "trial-b": "RUNNING", "trial-lost": "KILLED"}


def test_an_interrupted_sweep_leaves_no_run_open(config: Config, tmp_path: Path) -> None:
    runs = SweepRuns(config, tmp_path / "runs.json")
    runs.child("done")
    runs.end_child("done", "FINISHED")
    runs.child("open")
    runs.end_quietly("KILLED")
    statuses = {run.info.run_name: run.info.status for run in children(config, runs)}
    assert statuses == {"trial-done": "FINISHED", "trial-open": "KILLED"}


def test_a_trial_that_begins_again_tells_the_same_settings(config: Config, tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    for _ in range(2):
        watch = SweepWatch(SweepRuns(config, path), Silent(), "tokens/s")
        watch.started("a", {"depth": 2, "learning_rate": 0.001})
    assert len(children(config, watch.runs)) == 1


def test_files_are_kept_with_the_sweep_s_run(config: Config, tmp_path: Path) -> None:
    runs = SweepRuns(config, tmp_path / "runs.json")
    (tmp_path / "sweep.html").write_text("page")
    runs.keep_files([tmp_path / "sweep.html"])
    client = open_store(str(config.tracking.uri)).client
    assert [f.path for f in client.list_artifacts(runs.parent.run_id, "sweep")] == [
        "sweep/sweep.html"
    ]


def test_without_tracking_nothing_is_kept(tmp_path: Path) -> None:
    config = Config.model_validate({"tracking": {"uri": "none"}})
    runs = SweepRuns(config, tmp_path / "runs.json")
    watch = SweepWatch(runs, Silent(), "tokens/s")
    watch.started("a", {"depth": 2})
    watch.reported("a", {"epoch": 1, "speed": 3.0})
    watch.ended("a", is_ok=True)
    runs.close_all_but(set())
    assert runs.parent.run_id is None
    assert not (tmp_path / "runs.json").exists()


def test_metric_names_become_what_the_store_takes() -> None:
    assert storable({"speed/a b-c.d:e_1": 1.0, "speed/ü=%": 2.0}) == {
        "speed/a b-c.d:e_1": 1.0,
        "speed/___": 2.0,
    }
