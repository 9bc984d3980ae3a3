"""What hears of a sweep's trials in the driver: the tracking store and the progress line.

One process writes to the store, whatever runs at once: a run for the sweep and a child run for
each trial. Their ids stand in `runs.json`, so a sweep that goes on after a kill goes on in them.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hvd_ray.config import Config
from hvd_ray.errors import UserError
from hvd_ray.pipelines.shards import RunProgress
from hvd_ray.tracking import MlflowTracker, NullTracker, Tracker, open_tracker
from hvd_ray.tracking.runs import Status, new_key
from hvd_ray.tracking.store import OFF, open_store, tracking_uri
from hvd_ray.tuning.folder import write_json
from hvd_ray.tuning.objective import EPOCH, SPEED


class TrialWatch(Protocol):
    """Hears of every trial, in the driver, one call at a time."""

    def started(self, trial: str, row: Mapping[str, Any]) -> None:
        """A trial with these flat settings begins, perhaps for the second time after a kill."""
        ...

    def reported(self, trial: str, metrics: Mapping[str, float]) -> None:
        """A trial reached a rung or its end."""
        ...

    def ended(self, trial: str, *, is_ok: bool) -> None:
        """A trial is over: finished, stopped early or failed."""
        ...


class SweepRuns:
    """The tracking runs of a sweep: one parent, one child for each trial."""

    def __init__(self, config: Config, path: Path) -> None:
        """Take up the runs noted at `path`, or begin.

        Raises:
            UserError: the store cannot be used.
        """
        self._config = config
        self._path = path
        noted = _read(path) if tracking_uri(config) != OFF else {}
        self._children: dict[str, str] = noted.get("trials", {})
        self._open: dict[str, Tracker] = {}
        self._key = noted.get("key") or new_key()
        if "parent" in noted:
            self.parent: Tracker = _taken_up(config, noted["parent"])
            return
        if tracking_uri(config) != OFF:  # before there is a run that a kill could orphan
            write_json(path, {"key": self._key, "trials": {}})
        self.parent = open_tracker(config, run_name=f"tune-{path.parent.name}", key=self._key)
        self._note()

    def child(self, trial: str) -> Tracker:
        """The run of a trial, begun at the first call."""
        if trial not in self._open:
            if trial in self._children:
                self._open[trial] = _taken_up(self._config, self._children[trial])
            else:
                self._open[trial] = open_tracker(
                    self._config,
                    run_name=f"trial-{trial}",
                    parent=self.parent.run_id,
                    key=f"{self._key}-{trial}",
                )
                if (run_id := self._open[trial].run_id) is not None:
                    self._children[trial] = run_id
                    self._note()
        return self._open[trial]

    def end_child(self, trial: str, status: Status) -> None:
        """End the run of a trial."""
        self.child(trial).finish(status)
        del self._open[trial]

    def close_all_but(self, trials: set[str]) -> None:
        """End the runs of trials that a kill has wiped out: the sweep knows them no more."""
        for trial in set(self._children) - trials:
            self.end_child(trial, "KILLED")

    def keep_files(self, paths: Sequence[Path]) -> None:
        """Copy files into the sweep's run."""
        with tempfile.TemporaryDirectory() as folder:
            for path in paths:
                shutil.copy(path, folder)
            self.parent.log_artifacts(Path(folder), "sweep")

    def end_quietly(self, status: Status) -> None:
        """Mark the sweep's run and those under way as broken off; the store may be what failed."""
        with suppress(UserError):
            for tracker in (*self._open.values(), self.parent):
                tracker.finish(status)

    def _note(self) -> None:
        if self.parent.run_id is not None:
            noted = {"key": self._key, "parent": self.parent.run_id, "trials": self._children}
            write_json(self._path, noted)


@dataclass(slots=True)
class SweepWatch:
    """A `TrialWatch` that tracks every trial and shows how far the sweep is."""

    runs: SweepRuns
    progress: RunProgress
    unit: str
    done: set[str] = field(default_factory=set)
    best: float | None = None

    def started(self, trial: str, row: Mapping[str, Any]) -> None:
        self.runs.child(trial).log_params(row)

    def reported(self, trial: str, metrics: Mapping[str, float]) -> None:
        self.runs.child(trial).log_metrics(storable(metrics), step=int(metrics[EPOCH]))
        self.best = max(self.best or 0.0, metrics[SPEED])
        self._show()

    def ended(self, trial: str, *, is_ok: bool) -> None:
        self.runs.end_child(trial, "FINISHED" if is_ok else "FAILED")
        self.done.add(trial)
        self._show()

    def _show(self) -> None:
        best = "" if self.best is None else f", best {self.best:,.2f} {self.unit}"
        self.progress.advance(len(self.done), f"trials{best}")


class Counted:
    """Shows how many of so many are done, under a stage's name."""

    def __init__(self, progress: RunProgress, total: int, text: str) -> None:
        progress.stage(text)
        progress.expect(total)
        self._progress, self._text, self._done = progress, text, 0

    def __call__(self, num: int) -> None:
        self._done += num
        self._progress.advance(self._done, self._text)


def storable(metrics: Mapping[str, float]) -> dict[str, float]:
    """Figures under names that the store takes: workloads may be called anything."""
    return {re.sub(r"[^\w\-. :/]", "_", name, flags=re.A): v for name, v in metrics.items()}


def _taken_up(config: Config, run_id: str) -> Tracker:
    uri = tracking_uri(config)
    return NullTracker() if uri == OFF else MlflowTracker.taken_up(open_store(uri), run_id)


def _read(path: Path) -> dict[str, Any]:
    try:
        noted: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return noted
