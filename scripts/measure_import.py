"""Measure `hvd traces import` on a large log: megabytes a second of one core, and its memory.

    python scripts/measure_import.py LOG.jsonl... --mb 1000 --out docs/import.json

The logs are repeated until the file has its size. The import runs in a process of its own with one
worker and one thread; its resident memory is read twice a second and told by quarters of the run,
so that growth would show. The rate is by the process's own CPU time, start and tokenizer included.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from hvd_ray.home import atomic_path
from hvd_ray.provenance import provenance

POLL_S = 0.5
SETTLED = 0.1
"""Share of the run after which memory has no reason to grow."""


def repeat(logs: Sequence[Path], path: Path, num_bytes: int) -> int:
    """Write the logs again and again until the file has its size; the number of lines."""
    text = b"".join(log.read_bytes().rstrip(b"\n") + b"\n" for log in logs)
    times = max(1, round(num_bytes / len(text)))
    with path.open("wb") as file:
        for _ in range(times):
            file.write(text)
    return times * sum(1 for line in text.splitlines() if line.strip())


def run_import(log: Path, out: Path) -> tuple[dict[str, Any], float, list[float]]:
    """What the command answers, its CPU seconds, and its memory in MB at each reading."""
    command = [sys.executable, "-m", "hvd_ray.cli", "traces", "import", str(log), "--json"]
    threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--out", str(out)], stdout=subprocess.PIPE, env=os.environ | threads
    )
    watched, memory, cpu_s = psutil.Process(process.pid), [], 0.0
    while process.poll() is None:
        try:
            memory.append(watched.memory_info().rss / 1e6)
            cpu_s = sum(watched.cpu_times()[:2])
        except psutil.Error:
            break
        time.sleep(POLL_S)
    answer, _ = process.communicate()
    if process.returncode:
        sys.exit(f"the import ended with {process.returncode}")
    return json.loads(answer), cpu_s, memory


def quarters(memory: Sequence[float]) -> list[int]:
    """The highest reading of each quarter of the run, its start left out."""
    settled = list(memory[int(len(memory) * SETTLED) :]) or list(memory)
    edges = [round(len(settled) * quarter / 4) for quarter in range(5)]
    parts = [settled[a:b] or settled[-1:] for a, b in itertools.pairwise(edges)]
    return [round(max(part)) for part in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the import of logs.")
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--mb", type=float, default=1000.0)
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hvdi") as folder:
        log = Path(folder) / "log.jsonl"
        lines = repeat(args.logs, log, int(args.mb * 1e6))
        started, megabytes = time.monotonic(), log.stat().st_size / 1e6
        answer, cpu_s, memory = run_import(log, Path(folder) / "traces")
        seconds = time.monotonic() - started
    found = {
        "megabytes": round(megabytes, 1),
        "mb_per_cpu_second": round(megabytes / cpu_s, 2),
        "mb_per_second": round(megabytes / seconds, 2),
        "cpu_s": round(cpu_s, 1),
        "seconds": round(seconds, 1),
        "memory_mb_by_quarter": quarters(memory),
        "lines": lines,
        "rows": answer["rows"],
        "rows_bad": answer["rows_bad"],
        "traces": answer["traces"],
        "is_every_line_accounted_for": lines == answer["rows"] + answer["rows_bad"],
        "logs": [log.name for log in args.logs],
        "provenance": provenance(),
    }
    print(json.dumps({k: v for k, v in found.items() if k != "provenance"}, indent=1))
    if args.out is not None:
        with atomic_path(args.out) as draft:
            draft.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
