"""A command of `hvd` as a Ray job: the same flags, run from a copy of the checkout.

`jobs/` holds one file a stage; each calls `run_job`. A job's driver runs in a folder that Ray
unpacks on some node and deletes later, so what a job writes must be named by an absolute path, on
storage that every node sees.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hvd_ray.addresses import with_local_paths
from hvd_ray.cli import main, refuse
from hvd_ray.errors import UserError

IN_A_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray sets it for the driver of a submitted job, and for nothing else."""


def run_job(*command: str, output: str | None = "--out", always: Sequence[str] = ()) -> None:
    """Run `hvd COMMAND` with this process's arguments, and exit as `hvd` does.

    Args:
        command: words of the command, such as `traces`, `collect`.
        output: the flag that names what it writes; None where it only answers on stdout.
        always: flags that a job has whatever was typed, such as `--resume`.
    """
    try:
        given = with_local_paths(sys.argv[1:])
    except UserError as error:
        refuse(str(error))
    if IN_A_JOB in os.environ and output is not None and not {"-h", "--help"} & set(given):
        _refuse_what_would_be_lost(output, given)
    main([*command, *given, *always])


def _refuse_what_would_be_lost(flag: str, given: Sequence[str]) -> None:
    """A relative path lies in the job's own folder, which goes with the job."""
    place = _value_of(flag, given)
    if place is None:
        refuse(f"a job must say where its results go: {flag} /SHARED/FOLDER")
    elif not Path(place).expanduser().is_absolute():
        refuse(
            f"{flag} {place} lies in the job's own folder and would be lost with it: give an "
            "absolute path on storage that every node sees"
        )


def _value_of(flag: str, given: Sequence[str]) -> str | None:
    """What follows `flag`, or stands behind its `=`; the last one wins, as for the command."""
    found = None
    for index, word in enumerate(given):
        if word == flag:
            found = next(iter(given[index + 1 :]), None)
        elif word.startswith(f"{flag}="):
            found = word.removeprefix(f"{flag}=")
    return found
