"""Words of a command line where a path is expected: empty ones and addresses are no paths.

An unset variable, `--out "$OUT"`, would fill the folder that one happens to stand in, and
`s3://bucket/traces` one named `s3:` there. Local addresses become paths.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import unquote, urlsplit

from hvd_ray.errors import NotSupportedError, UserError

_ADDRESS = re.compile(r"(?P<flag>--[a-z0-9-]+=)?(?P<scheme>[a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_LOCAL = ("file", "local")


def with_local_paths(words: Sequence[str]) -> list[str]:
    """The words with `file://` addresses as paths; settings stay as they are.

    Raises:
        UserError: a word, or what follows a flag's `=`, is empty.
        NotSupportedError: a word is another address, of an object store or a server.
    """
    _refuse_empty(words)
    return [_with_local_path(word) for word in words]


def _refuse_empty(words: Sequence[str]) -> None:
    for before, word in zip(("", *words), words, strict=False):
        flag, _, value = word.partition("=") if word.startswith("--") else (before, "", word)
        if value.strip() or (word.startswith("--") and "=" not in word):
            continue
        where = flag if flag.strip("-") and flag.startswith("-") else "an argument"
        raise UserError(f"{where} is empty; is a variable unset?")


def _with_local_path(word: str) -> str:
    found = _ADDRESS.match(word)
    if found is None:
        return word
    flag, address = found["flag"] or "", word[found.start("scheme") :]
    parts = urlsplit(address)
    if parts.scheme.lower() in _LOCAL and parts.netloc in ("", "localhost"):
        return flag + unquote(parts.path)
    raise NotSupportedError(
        f"{address}: traces, labels and runs live in folders, with locks and renames, which "
        f"{parts.scheme}:// does not have; mount it, or copy it to a folder that every node sees"
    )
