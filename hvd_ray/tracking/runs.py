"""Runs: the seam `Tracker` and its two implementations, MLflow and nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from hvd_ray.config import Config
from hvd_ray.errors import UserError
from hvd_ray.provenance import masked
from hvd_ray.tracking.store import OFF, Store, find_experiment, open_store, tracking_uri

_MAX_PARAM_CHARS = 6000
_PARAMS_PER_CALL = 100
_METRICS_PER_CALL = 1000

Status = Literal["FINISHED", "FAILED", "KILLED"]


class Tracker(Protocol):
    """Remembers one run: what it was told, what it measured, what it made.

    Opened by `open_tracker`; `finish` is the last call. Every method raises `UserError` when the
    store cannot be reached.
    """

    @property
    def run_id(self) -> str | None:
        """Names the run in its store, for child runs to point at; None without a store."""
        ...

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Settings; nested mappings become `section.key`. A name can be logged once."""
        ...

    def log_metrics(self, metrics: Mapping[str, float], step: int = 0) -> None:
        """Figures; the same name again at another step makes a curve."""
        ...

    def log_artifacts(self, folder: Path, name: str = "") -> None:
        """The files of a folder, under `name` in the run."""
        ...

    def finish(self, status: Status = "FINISHED") -> None:
        """End the run."""
        ...


class NullTracker:
    """Remembers nothing."""

    run_id: str | None = None

    def log_params(self, params: Mapping[str, Any]) -> None: ...

    def log_metrics(self, metrics: Mapping[str, float], step: int = 0) -> None: ...

    def log_artifacts(self, folder: Path, name: str = "") -> None: ...

    def finish(self, status: Status = "FINISHED") -> None: ...


class MlflowTracker:
    """One MLflow run. It holds no global state of MLflow's, so any number may be open at once."""

    def __init__(self, store: Store, run_id: str) -> None:
        self.store = store
        self._run_id = run_id

    @property
    def run_id(self) -> str:
        return self._run_id

    def log_params(self, params: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        listed = [Param(k, str(v)[:_MAX_PARAM_CHARS]) for k, v in flattened(params).items()]
        with self.store.readable_errors():
            for start in range(0, len(listed), _PARAMS_PER_CALL):
                part = listed[start : start + _PARAMS_PER_CALL]
                self.store.client.log_batch(self._run_id, params=part)

    def log_metrics(self, metrics: Mapping[str, float], step: int = 0) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        listed = [Metric(name, float(value), now_ms, step) for name, value in metrics.items()]
        with self.store.readable_errors():
            for start in range(0, len(listed), _METRICS_PER_CALL):
                part = listed[start : start + _METRICS_PER_CALL]
                self.store.client.log_batch(self._run_id, metrics=part)

    def log_artifacts(self, folder: Path, name: str = "") -> None:
        with self.store.readable_errors():
            self.store.client.log_artifacts(self._run_id, str(folder), name or None)

    def finish(self, status: Status = "FINISHED") -> None:
        with self.store.readable_errors():
            self.store.client.set_terminated(self._run_id, status)


def open_tracker(config: Config, *, run_name: str, parent: str | None = None) -> Tracker:
    """Begin a run in the configured store, made on first use; under `parent` as a child run.

    Raises:
        UserError: the store cannot be used.
    """
    uri = tracking_uri(config)
    if uri == OFF:
        return NullTracker()
    store = open_store(uri)
    tags = {"mlflow.parentRunId": parent} if parent else {}
    with store.readable_errors():
        experiment_id = find_experiment(store, config.tracking.experiment)
        run = store.client.create_run(experiment_id, run_name=run_name, tags=tags)
    return MlflowTracker(store, run.info.run_id)


@contextmanager
def tracked(config: Config, *, run_name: str, parent: str | None = None) -> Iterator[Tracker]:
    """`open_tracker`, finished whatever happens: an exception marks the run as failed."""
    tracker = open_tracker(config, run_name=run_name, parent=parent)
    try:
        yield tracker
    except KeyboardInterrupt:
        _finish_quietly(tracker, "KILLED")
        raise
    except BaseException:
        _finish_quietly(tracker, "FAILED")
        raise
    tracker.finish()


def _finish_quietly(tracker: Tracker, status: Status) -> None:
    """The store may be what failed; its second complaint would hide the first."""
    try:
        tracker.finish(status)
    except UserError:
        logging.getLogger(__name__).debug("the run could not be marked as %s", status)


def flattened(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as `section.key`; secrets masked."""
    flat: dict[str, Any] = {}
    for key, value in masked(params).items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
