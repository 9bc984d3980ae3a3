"""Runs: the seam `Tracker` and its two implementations, MLflow and nothing."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from hvd_ray.config import Config
from hvd_ray.errors import UserError
from hvd_ray.home import atomic_path
from hvd_ray.provenance import masked
from hvd_ray.tracking.artifacts import check_place
from hvd_ray.tracking.store import OFF, Store, find_experiment, open_store, tracking_uri

_MAX_PARAM_CHARS = 6000
_PARAMS_PER_CALL = 100
_METRICS_PER_CALL = 1000
_KEY_TAG = "hvd_ray_key"

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

    def __init__(self, store: Store, run_id: str, *, known: Collection[str] = ()) -> None:
        """Write to a run that is there; `known` names parameters that it has already."""
        self.store = store
        self._run_id = run_id
        self._known = frozenset(known)

    @classmethod
    def taken_up(cls, store: Store, run_id: str) -> MlflowTracker:
        """Go on in a run that was broken off; what it was told before stays as it was.

        Raises:
            UserError: the store cannot be reached or does not have the run.
        """
        with store.readable_errors():
            known = store.client.get_run(run_id).data.params
        return cls(store, run_id, known=known)

    @property
    def run_id(self) -> str:
        return self._run_id

    def log_params(self, params: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        listed = [
            Param(name, str(value)[:_MAX_PARAM_CHARS])
            for name, value in flattened(params).items()
            if name not in self._known
        ]
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
            check_place(self.store, self._place())
            self.store.client.log_artifacts(self._run_id, str(folder), name or None)

    def _place(self) -> str:
        """Where the store says that this run's files go."""
        return str(self.store.client.get_run(self._run_id).info.artifact_uri)

    def finish(self, status: Status = "FINISHED") -> None:
        with self.store.readable_errors():
            self.store.client.set_terminated(self._run_id, status)


def open_tracker(
    config: Config, *, run_name: str, parent: str | None = None, key: str | None = None
) -> Tracker:
    """Begin a run in the configured store, made on first use; under `parent` as a child run.

    A `key` names the run to us: one that was begun with it is taken up instead, so a process that
    is killed at any moment and started again goes on in its run and leaves no second one.

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
        if key is not None:
            tags[_KEY_TAG] = key
            query = f"tags.{_KEY_TAG} = '{key}'"
            found = store.client.search_runs([experiment_id], filter_string=query, max_results=1)
            if found:
                return MlflowTracker.taken_up(store, found[0].info.run_id)
        run = store.client.create_run(experiment_id, run_name=run_name, tags=tags)
    return MlflowTracker(store, run.info.run_id)


@contextmanager
def tracked(
    config: Config, *, run_name: str, parent: str | None = None, note: Path | None = None
) -> Iterator[Tracker]:
    """`open_tracker`, finished whatever happens: an exception marks the run as failed.

    A file at `note` stands as long as the run does; found by a later process, it makes that one go
    on in the run of the one that was killed.
    """
    key = None if note is None else _noted_key(note)
    tracker = open_tracker(config, run_name=run_name, parent=parent, key=key)
    try:
        yield tracker
    except KeyboardInterrupt:
        _finish_quietly(tracker, "KILLED")
        raise
    except BaseException:
        _finish_quietly(tracker, "FAILED")
        raise
    else:
        tracker.finish()
    finally:
        if note is not None:
            note.unlink(missing_ok=True)


def new_key() -> str:
    """A name for a run to come, which nobody else has."""
    return secrets.token_hex(16)


def _noted_key(note: Path) -> str:
    """The key in the file; a new one is written first, before there is a run to lose."""
    if not note.exists():
        with atomic_path(note) as draft:
            draft.write_text(new_key(), encoding="utf-8")
    return note.read_text(encoding="utf-8").strip()


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
