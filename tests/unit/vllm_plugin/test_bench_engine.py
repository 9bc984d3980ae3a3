"""The engines of a comparison: what becomes of them without their parent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep

from hvd_ray.vllm_plugin.bench_engine import _settled

CHILD = (
    "from hvd_ray.vllm_plugin.bench_engine import end_with_parent; import time; "
    "end_with_parent(); print('up', flush=True); time.sleep(60)"
)
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def test_an_engine_ends_with_a_parent_that_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = Path("/proc", parent.stdout.readline().decode().strip())
        assert _is_alive(child)
        parent.kill()
    deadline = monotonic() + 20
    while _is_alive(child):
        assert monotonic() < deadline, "the engine outlived its parent"
        sleep(0.1)


def _is_alive(process: Path) -> bool:
    """A process that ended may still be listed until somebody asks how."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_gpu_is_measured_as_it_is_served() -> None:
    """With CUDA graphs, and with its share of the memory, which a CPU's engines do not take."""
    given = {"model": "m", "gpu_memory_utilization": 0.18}
    on_gpu, on_cpu = (_settled(given, is_cpu=is_cpu) for is_cpu in (False, True))
    assert "enforce_eager" not in on_gpu
    assert on_gpu["gpu_memory_utilization"] == 0.18
    assert on_cpu["enforce_eager"] is True
    assert "gpu_memory_utilization" not in on_cpu
