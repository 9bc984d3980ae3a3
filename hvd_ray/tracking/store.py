"""The MLflow store behind runs and registry: found, made on first use, its errors readable."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_ray.config import Config
from hvd_ray.errors import UserError
from hvd_ray.home import atomic_path, ensure_dir, file_lock, tracking_dir
from hvd_ray.provenance import masked

OFF = "none"
"""The `tracking.uri` that turns tracking off."""
REMOTE = ("http://", "https://", "databricks")


def tracking_uri(config: Config) -> str:
    """Where runs go: the configured store, MLFLOW_TRACKING_URI, or SQLite under HVD_HOME."""
    chosen = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
    return chosen or f"sqlite:///{tracking_dir() / 'mlflow.db'}"


@dataclass(frozen=True, slots=True)
class Store:
    """An MLflow client and the store it talks to."""

    uri: str
    client: Any
    """An `mlflow.MlflowClient`."""

    @property
    def is_server(self) -> bool:
        """Whether somebody else answers, who is not believed in everything."""
        return self.uri.startswith(REMOTE)

    def readable_errors(self) -> AbstractContextManager[None]:
        """Turn what MLflow raises in the block into one line about this store."""
        return _readable_errors(self.uri)


def open_store(uri: str) -> Store:
    """Connect to a store; a SQLite file that is absent is made.

    Raises:
        UserError: the store cannot be used.
    """
    _prepare_environment()
    with _readable_errors(uri):
        if (database := sqlite_path(uri)) is not None:
            with file_lock(database):
                if not database.exists():
                    _make_database(database)
        return Store(uri, _client(uri))


def prepare_store(uri: str) -> None:
    """Make a SQLite store that is absent; any other is left to whoever connects to it.

    Raises:
        UserError: it cannot be made, or what is there is no store.
    """
    if sqlite_path(uri) is not None:
        open_store(uri)


def _prepare_environment() -> None:
    """No telemetry, nothing on stdout, and an answer within seconds from a server that is gone.

    MLflow reads the first when it is imported, the others at every call. What the user has set
    stays, but for telemetry and stdout, which belongs to the commands' own answers.
    """
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")


def _client(uri: str) -> Any:
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic", "urllib3.connectionpool"):  # mlflow sets its own on import
        logging.getLogger(name).setLevel(logging.ERROR)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def _make_database(database: Path) -> None:
    """Create all tables in a draft, so that a kill midway leaves no half-made store."""
    with atomic_path(database) as draft:
        _client(f"sqlite:///{draft}").get_experiment_by_name("none")


def find_experiment(store: Store, name: str) -> str:
    """The id of an experiment, which is made if it is absent."""
    from mlflow.exceptions import MlflowException

    experiment = store.client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return str(store.client.create_experiment(name, artifact_location(store.uri)))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        experiment = store.client.get_experiment_by_name(name)
    if experiment.lifecycle_stage == "deleted":
        raise UserError(
            f"tracking: the experiment {name!r} was deleted; restore it or set tracking.experiment"
        )
    return str(experiment.experiment_id)


def runs_page(uri: str, experiment: str) -> str | None:
    """Where below its address MLflow shows our runs, None before the first one.

    By itself it opens on its pages for chats, on which there is nothing of ours.
    """
    store = open_store(uri)
    with store.readable_errors():
        found = store.client.get_experiment_by_name(experiment)
    if found is None:
        return None
    return f"#/experiments/{found.experiment_id}/runs?workflowType=machine_learning"


def artifact_location(uri: str) -> str | None:
    """Where the files of runs go; a server decides that for itself."""
    if uri.startswith(REMOTE):
        return None
    database = sqlite_path(uri)
    folder = tracking_dir() if database is None else database.absolute().parent
    return ensure_dir(folder / "artifacts").as_uri()


def sqlite_path(uri: str) -> Path | None:
    """The file of a SQLite store."""
    path = uri.partition("sqlite:///")[2].partition("?")[0]
    return Path(path) if uri.startswith("sqlite:///") and path not in ("", ":memory:") else None


_MISREAD = (TypeError, ValueError, LookupError, AttributeError)
"""What MLflow's client raises over an answer that is JSON of another form."""


@contextmanager
def _readable_errors(uri: str) -> Iterator[None]:
    """Turn what MLflow and its database layer raise into one line about the store."""
    from google.protobuf.json_format import Error as AnswerError
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except UserError:
        raise
    except (
        MlflowException,
        SQLAlchemyError,
        AnswerError,
        OSError,
        ImportError,
        *_MISREAD,
    ) as error:
        cause = _first_line(error)
        raise UserError(
            f"tracking store {masked(uri)}: {cause}; check it, choose another with "
            "tracking.uri=URI or go without by tracking.uri=none"
        ) from error


def _first_line(error: Exception) -> str:
    """The gist: database errors carry their statement, connection errors a chain of causes."""
    text = str(getattr(error, "orig", None) or error) or type(error).__name__
    if "HTTPConnectionPool" in text or "HTTPSConnectionPool" in text:
        return "the server does not answer"
    return text.splitlines()[0][:200]
