"""One Ray to work on: the cluster that is named, or a private one that ends with the work.

`RAY_ADDRESS` names a running cluster. Without it a Ray of its own is started on this machine, out
of reach of others (a secret token in this process's environment), and ended again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvd_ray.errors import UserError

OBJECT_STORE_BYTES = 200_000_000
"""Prompts and summaries are small; rows go to disk, not through the object store."""
LONGEST_TEMP_DIR = 40
"""Ray appends some 60 characters for its sockets, whose paths may have 107."""
CONNECT_TIMEOUT_S = 5.0
OWN = ("", "local")
OWNER = "owner.lock"
SECONDS_TO_BE_OWNED = 60


@contextmanager
def connected(
    *,
    num_cpus: int,
    num_gpus: float = 0,
    address: str | None = None,
    has_dashboard: bool = False,
) -> Iterator[Any]:
    """Give the `ray` module, connected; end only what was started here.

    A process that is connected already stays as it is.

    Args:
        num_cpus: logical CPUs that the work needs at once; a private Ray is given that many,
            whatever the machine has, and a running cluster must have them, or be able to grow
            to them.
        num_gpus: GPUs likewise; never more than there are.
        address: a running cluster; None: what `RAY_ADDRESS` says.
        has_dashboard: whether a private Ray shows its pages, on loopback.

    Raises:
        UserError: the cluster cannot be reached or is too small.
    """
    chosen = os.environ.get("RAY_ADDRESS", "") if address is None else address
    _set_environment(is_own=chosen in OWN)
    import ray

    if ray.is_initialized():
        _refuse_if_too_small(ray, num_cpus, num_gpus)
        yield ray
        return
    start = _own(ray, num_cpus, has_dashboard) if chosen in OWN else _joined(ray, chosen)
    with start:
        _quiet_data()
        _refuse_if_too_small(ray, num_cpus, num_gpus)
        yield ray


def is_own_next() -> bool:
    """Whether `connected` without an address would start a Ray of its own now."""
    ray = sys.modules.get("ray")
    is_connected = ray is not None and ray.is_initialized()
    return not is_connected and os.environ.get("RAY_ADDRESS", "") in OWN


@contextmanager
def _own(ray: Any, num_cpus: int, has_dashboard: bool) -> Iterator[None]:
    """A private Ray on this machine, with a temporary folder of its own."""
    with _temp_dir() as folder:
        try:
            ray.init(
                address="local",  # never what an unclean end of another Ray has left behind
                num_cpus=num_cpus,
                include_dashboard=has_dashboard,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=str(folder),
            )
            yield
        finally:
            ray.shutdown()


@contextmanager
def _joined(ray: Any, address: str) -> Iterator[None]:
    _refuse_if_silent(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        cause = str(error).splitlines()[0]
        raise UserError(f"cannot join the Ray cluster at {address}: {cause}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _refuse_if_silent(address: str) -> None:
    """Ray itself waits for minutes where nobody answers."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # "auto" and the like: Ray's to find
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise UserError(
            f"no Ray cluster answers at {address} ({error.strerror or error}); start one with "
            "`ray start --head`, or unset RAY_ADDRESS to work on this machine alone"
        ) from None


def _refuse_if_too_small(ray: Any, num_cpus: int, num_gpus: float) -> None:
    """Work that never fits would wait for ever."""
    found, limits = ray.cluster_resources(), _autoscaling_limits()
    for name, needed in (("CPU", num_cpus), ("GPU", num_gpus)):
        most = max(found.get(name, 0), limits.get(name, 0))
        if most < needed:
            raise UserError(
                f"the Ray cluster has {most:g} {name}s and {needed:g} are needed; "
                "use fewer --workers"
            )


def _autoscaling_limits() -> Mapping[str, float]:
    """What the cluster may grow to, by its autoscaler's settings; empty without an autoscaler."""
    from ray._private.state import state  # Ray Data asks the same; it has no public name

    return state.get_max_resources_from_cluster_config() or {}


def _set_environment(*, is_own: bool) -> None:
    """What Ray reads once, when it is imported; the user's own settings win.

    A private Ray listens on every interface, so it is locked with a token that only this process
    and its children know. Ray itself would keep one in the home folder.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if is_own and "RAY_AUTH_MODE" not in os.environ and "ray" not in sys.modules:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _quiet_data() -> None:
    """Ray Data writes its progress to the terminal and to a file: leave it the file."""
    from ray.data import DataContext

    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setLevel(logging.CRITICAL)


@contextmanager
def _temp_dir() -> Iterator[Path]:
    """A folder that goes with the run; those of killed runs go when the next one starts."""
    base = Path(tempfile.gettempdir())
    if len(str(base)) > LONGEST_TEMP_DIR - len("/hvd-ray-12345678"):
        base = Path("/tmp")
    for other in base.glob("hvd-ray-*"):
        if _is_abandoned(other):
            shutil.rmtree(other, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix="hvd-ray-", dir=base))
    try:
        with open(folder / OWNER, "w") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    """Whether nobody holds the folder any more; a young one may not be held yet."""
    try:
        if time.time() - folder.stat().st_mtime < SECONDS_TO_BE_OWNED:
            return False
        with open(folder / OWNER, "r+") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, gone, or somebody else's
        return False
    return True
