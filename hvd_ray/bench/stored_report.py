"""Which file a long check writes: the report that is kept is of a whole run, never of a try."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path


def report_place(
    parser: argparse.ArgumentParser,
    given: Path | None,
    *,
    stored: Path,
    asked: Mapping[str, float],
    full: Mapping[str, float],
) -> Path:
    """Where a run writes its report; exits with 2 for a short run without a file of its own.

    Args:
        parser: of the words, which refuses them.
        given: what was named; None: nothing was.
        stored: the report in the repository.
        asked: each option that decides the length of the run, with its value.
        full: their values in a whole run.
    """
    if given is not None:
        return given
    short = [f"{name} {value:g}" for name, value in asked.items() if value < full[name]]
    if short:
        whole = ", ".join(f"{name} {full[name]:g}" for name in asked if asked[name] < full[name])
        parser.error(
            f"{', '.join(short)}: {stored.name} is kept of runs with {whole}; name a file of its "
            "own for this one with --report FILE"
        )
    return stored
