"""Where state lives (`HVD_HOME`), and how it is written so that a kill leaves nothing half-done.

Naming a folder makes nothing: folders appear when something is written into them.
"""

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hvd_ray.errors import UserError

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_NOT_WRITABLE = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST),
    *(errno.ENAMETOOLONG, errno.ELOOP),
}


def hvd_home() -> Path:
    """Root of all state: `HVD_HOME`, by default `hvd_ray` in the user's cache folder.

    Raises:
        UserError: `HVD_HOME` is an address, which would become a folder named `s3:` right here.
    """
    if chosen := os.environ.get("HVD_HOME", "").strip():
        if "://" in chosen:
            raise UserError(f"HVD_HOME={chosen}: expected a folder on this machine")
        return Path(chosen).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().absolute() / "hvd_ray"


def models_dir() -> Path:
    """Target models, one transformers folder each."""
    return hvd_home() / "models"


def downloads_dir() -> Path:
    """Files on their way in; everything here can be fetched again."""
    return hvd_home() / "downloads"


def runs_dir() -> Path:
    """Outputs of commands: traces, labels, predictors, reports."""
    return hvd_home() / "runs"


def tracking_dir() -> Path:
    """The default tracking database and its artifacts."""
    return hvd_home() / "tracking"


def calibration_dir() -> Path:
    """Cost tables measured on this machine."""
    return hvd_home() / "calibration"


def ensure_dir(path: Path) -> Path:
    """Make `path` with its parents and return it; `UserError` where it cannot be written."""
    with writes_into(path):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileNotFoundError as error:  # under a folder that takes none, /proc say
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path)) from error
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return path


@contextmanager
def writes_into(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals to write at `path` into one clear line."""
    try:
        yield
    except OSError as error:
        if error.filename is not None and not _stands_at(Path(error.filename), path):
            raise
        if error.errno in _NO_ROOM:
            remedy = _remedy(path, "free some space", "on a larger disk")
            raise UserError(
                f"no room left while writing {path}: {error.strerror}; {remedy}"
            ) from error
        if error.errno in _NOT_WRITABLE:
            remedy = _remedy(path, "make it writable", "that is")
            raise UserError(f"cannot write {path}: {error.strerror}; {remedy}") from error
        raise


def _remedy(path: Path, first: str, which: str) -> str:
    """What to do about a place that takes nothing: only our own state moves with `HVD_HOME`."""
    if path.absolute().is_relative_to(hvd_home()):
        return f"{first} or set HVD_HOME to a folder {which}"
    if os.path.isfile(path):  # `Path.is_file` raises where it may not look
        return "choose another place: a file stands there"
    return f"{first} or choose another place"


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Give a temporary sibling to write a file to; on success it becomes `path`, else it goes.

    The sibling keeps the suffix, since some writers choose their format by it. Readers see the
    old file or the whole new one. Raises `UserError` where the place cannot be written.
    """
    draft = _sibling(path)
    ensure_dir(path.parent)
    try:
        with writes_into(path):
            yield draft
            _sync(draft)
            draft.replace(path)
            _sync(path.parent)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def atomic_dir(path: Path) -> Iterator[Path]:
    """Give a temporary sibling folder to fill; on success it becomes `path`, else it goes.

    An existing `path` is replaced. Two writers of one folder need `file_lock` around this.
    """
    draft = _sibling(path)
    ensure_dir(path.parent)
    try:
        with writes_into(path):
            draft.mkdir()
            yield draft
            for file in (*draft.rglob("*"), draft):
                _sync(file)
            _replace_dir(draft, path)
            _sync(path.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def file_lock(path: Path, *, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold `path` against other processes; it is freed even if the holder is killed.

    `on_wait` is called once if somebody else holds it. The lock file `.NAME.lock` beside `path`
    stays: removing it would let two holders in.
    """
    ensure_dir(path.parent)
    with writes_into(path), open(path.with_name(f".{path.name}.lock"), "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if on_wait is not None:
                on_wait()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def clear_leftovers(path: Path) -> None:
    """Remove what killed writers of `path` left beside it; call it while holding its lock."""
    for leftover in path.parent.glob(f".{path.stem}.*.tmp{path.suffix}"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def _stands_at(culprit: Path, path: Path) -> bool:
    """Whether `culprit` is `path`, above it or below its folder."""
    culprit, path = culprit.absolute(), path.absolute()
    return culprit in path.parents or culprit.is_relative_to(path.parent)


def _sibling(path: Path) -> Path:
    return path.with_name(f".{path.stem}.{os.getpid()}-{secrets.token_hex(4)}.tmp{path.suffix}")


def _replace_dir(new: Path, path: Path) -> None:
    """Put `new` at `path`: the old one steps aside, since a rename onto a full folder fails."""
    old = _sibling(path)
    with suppress(FileNotFoundError):
        path.rename(old)
    new.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
