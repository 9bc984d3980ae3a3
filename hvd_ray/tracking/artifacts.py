"""Files that a tracking server keeps: from where they may come, how many, for how long.

The server names the place of its files, and MLflow would follow it anywhere: into this machine's
folders, to other servers, through listings that hold themselves, at a byte a second.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from hvd_ray.errors import UserError
from hvd_ray.home import tracking_dir
from hvd_ray.provenance import masked
from hvd_ray.tracking.store import Store

PROXIED = "mlflow-artifacts"
_OBJECT_STORES = frozenset(
    {"s3", "r2", "b2", "gs", "wasbs", "abfss", "dbfs", "hdfs", "viewfs"}
)  # fmt: skip
MAX_FILES = 32
MAX_BYTES = 256 * 2**20
DOWNLOAD_LIMIT_S = 120.0
"""For all of it; a predictor has a megabyte."""
_LOOK_S = 0.1
T = TypeVar("T")


def place_of(store: Store, source: str) -> str:
    """Where the files of a version lie, `runs:/` followed to the place that its run names.

    Raises:
        UserError: that is no place of the store's own.
    """
    parts = urlsplit(source)
    if parts.scheme == "runs":
        run_id, _, path = parts.path.lstrip("/").partition("/")
        root = str(store.client.get_run(run_id).info.artifact_uri)
        source = f"{root.rstrip('/')}/{path}" if path else root
    check_place(store, source)
    return source


def check_place(store: Store, place: str) -> None:
    """See that files may be read from there, and written to.

    Raises:
        UserError: a server names a folder of this machine that is not ours, another server, or a
            way out of its store.
    """
    parts = urlsplit(place)
    path = unquote(unquote(parts.path))
    if ".." in path.replace("\\", "/").split("/") or not path.isprintable():
        raise _refused(store, place, "that leads out of its store")
    if parts.scheme in ("", "file"):
        if store.is_server and not _is_ours(store, Path(path)):
            raise _refused(
                store, place, "a folder of this machine; start it so that it serves its artifacts"
            )
        return
    if parts.scheme == PROXIED:
        if parts.netloc and parts.netloc != urlsplit(store.uri).netloc:
            raise _refused(store, place, "another server")
        return
    if parts.scheme not in _OBJECT_STORES:
        known = ", ".join(sorted({PROXIED, *_OBJECT_STORES}))
        raise _refused(store, place, f"no place for artifacts: expected {known}")


def _is_ours(store: Store, folder: Path) -> bool:
    """`hvd ui` serves the runs of its own store, files and all; it may have another HVD_HOME."""
    if not folder.is_absolute():
        return False
    folder = folder.resolve()
    if folder.is_relative_to(tracking_dir().resolve()):
        return True
    is_here = urlsplit(store.uri).hostname in ("127.0.0.1", "::1", "localhost")
    return is_here and ("tracking", "artifacts") in pairwise(folder.parts)


def _refused(store: Store, place: str, why: str) -> UserError:
    return UserError(
        f"tracking store {masked(store.uri)} names {masked(place)[:120]!r} for its files: {why}"
    )


def fetch_folder(store: Store, source: str, *, to: Path) -> None:
    """Copy the plain files of a version's source into the existing folder `to`.

    Folders in it are left out: a predictor has none.

    Raises:
        UserError: too many, too large, not there in time, or no place of the store's own.
    """
    is_over = threading.Event()

    def copy() -> None:
        repository = _repository(store, place_of(store, source))
        for name in _names(store, repository.list_artifacts(None)):
            if not is_over.is_set():
                repository._download_file(name, str(to / name))

    def check_size() -> None:
        num_bytes = sum(path.stat().st_size for path in to.iterdir())
        if num_bytes > MAX_BYTES:
            raise UserError(
                f"{masked(source)} holds more than {MAX_BYTES:,} bytes, which is no predictor"
            )

    try:
        in_time(store, copy, meanwhile=check_size)
    finally:
        is_over.set()


def in_time(store: Store, work: Callable[[], T], *, meanwhile: Callable[[], None]) -> T:
    """What `work` gives, done in a thread that is left behind when the time is over.

    MLflow's own limit is one for each read, so that a server that drips has no end.

    Raises:
        UserError: it took longer than `DOWNLOAD_LIMIT_S`.
    """
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            failed.append(error)

    thread = threading.Thread(target=run, name="tracking", daemon=True)
    thread.start()
    for _ in range(max(1, round(DOWNLOAD_LIMIT_S / _LOOK_S))):
        thread.join(_LOOK_S)
        meanwhile()
        if failed:
            raise failed[0]
        if found:
            return found[0]
    raise UserError(
        f"tracking store {masked(store.uri)}: it did not answer whole within "
        f"{DOWNLOAD_LIMIT_S:g} s and was given up"
    )


def _repository(store: Store, place: str) -> Any:
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    return get_artifact_repository(place, tracking_uri=store.uri, registry_uri=store.uri)


def _names(store: Store, listed: Any) -> list[str]:
    """The files of a listing by their names, which become names here."""
    names = [str(entry.path) for entry in listed if not entry.is_dir]
    odd = next((name for name in names if not _is_plain(name)), None)
    if odd is not None:
        raise UserError(f"tracking store {masked(store.uri)} lists a file {odd[:80]!r}")
    if len(names) > MAX_FILES:
        raise UserError(
            f"tracking store {masked(store.uri)} lists {len(names)} files: expected a predictor's"
        )
    return names


def _is_plain(name: str) -> bool:
    return (
        name == PurePosixPath(name).name
        and "\\" not in name
        and name.isprintable()
        and name not in (".", "..")
        and len(name) <= 128
    )
