"""Ray's worker processes below this one, and a thread that kills one of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

POLL_S = 0.02
NOT_AT_WORK = ("IDLE", "_Meter", "JobSupervisor", "Dashboard", "Agent", "Stats", "Autoscaling")
"""In titles of processes that do nothing, count, or keep the house."""


def ray_workers() -> list[psutil.Process]:
    """Those at work: actors of a pool, trials, tasks."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        title = words[0] if words else ""
        if title.startswith("ray::") and not any(word in title for word in NOT_AT_WORK):
            found.append(process)
    return found


@contextmanager
def worker_killed_once(when: Callable[[], object]) -> Iterator[list[int]]:
    """SIGKILL some worker as soon as `when` holds; the list given holds its process id then."""
    killed: list[int] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set() and not killed:
            workers = ray_workers() if when() else []
            if workers:
                workers[0].kill()
                killed.append(workers[0].pid)
            time.sleep(POLL_S)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield killed
    finally:
        is_over.set()
        watcher.join()
