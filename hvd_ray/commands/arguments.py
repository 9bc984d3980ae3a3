"""Positional words of a command: settings, and what belongs to the option before them.

Click gives an option one value; people write `--prompts A B C`, and so do their shells for `*`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hvd_ray.errors import UserError

_SETTING = re.compile(r"[a-z_]\w*(\.\w+)*=", re.ASCII)


def sorted_out(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """File or workload names, and `key=value` settings; an existing file is always a file."""
    settings = [word for word in words if _SETTING.match(word) and not Path(word).exists()]
    return [word for word in words if word not in settings], settings


def names_in(text: str | None) -> tuple[str, ...] | None:
    """`a,b` as a tuple; None where the option was not given."""
    if text is None:
        return None
    return tuple(name.strip() for name in text.split(",") if name.strip())


def places(
    names: Sequence[str], *, prompts: Sequence[Path], workloads: str | None
) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Prompt files and workloads; loose names belong to whichever option was given.

    Raises:
        UserError: neither was, or a workload list holds no name.
    """
    files, named = tuple(prompts), names_in(workloads)
    if named == ():
        raise UserError("--workloads names none; leave it away for all of them")
    if names and files and not named:
        files += tuple(map(Path, names))
    elif names and named and not files:
        named += tuple(names)
    elif names:
        raise UserError(
            f"{names[0]!r} is no setting: expected key=value, or --prompts or --workloads before it"
        )
    return files, named or ()
