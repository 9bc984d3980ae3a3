"""Traces at which workers die: noted before each begins, given up after three deaths in one run.

A crash of native code or a want of memory kills a process without an exception, so only what was
written before it can tell who was being decoded. Deaths count within one run of the driver: a run
that is killed as a whole says nothing against the trace that it was at.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from hvd_ray.home import atomic_path

FOLDER = "suspects"
MAX_DEATHS = 3


class PartWatch:
    """Which traces of one part the workers of this run died at; a file, as workers come and go."""

    def __init__(self, path: Path, *, run: str) -> None:
        """Take up what an earlier worker has noted.

        Args:
            path: the part's own file; gone once the part is written.
            run: names the run of the driver; notes of others are forgotten.
        """
        self._path, self._run = path, run
        noted = _read(path)
        self._deaths: Counter[str] = Counter()
        if noted.get("run") == run:
            self._deaths.update(noted["deaths"])
            if noted["current"] is not None:
                self._deaths[noted["current"]] += 1

    def is_given_up(self, trace_id: str) -> bool:
        """Whether this trace has killed so many workers that no other is to be risked."""
        return self._deaths[trace_id] >= MAX_DEATHS

    def begin(self, trace_id: str) -> None:
        """Note that this trace is the next to be decoded."""
        self._write(trace_id)

    def close(self) -> None:
        """The part is written: nobody need ask any more."""
        self._path.unlink(missing_ok=True)

    def _write(self, current: str) -> None:
        notes = {"run": self._run, "current": current, "deaths": dict(self._deaths)}
        with atomic_path(self._path) as draft:
            draft.write_text(json.dumps(notes), encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    try:
        notes: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return notes if isinstance(notes, dict) else {}
