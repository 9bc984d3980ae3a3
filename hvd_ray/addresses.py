"""Addresses of storage where a path is expected: local ones become paths, others are refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import unquote, urlsplit

from hvd_ray.errors import NotSupportedError

_STORAGE_URL = re.compile(
    r"(?P<flag>--[a-z-]+=)?"
    r"(?P<scheme>file|local|memory|s3a?|r2|oss|gc?s|az|abfss?|adl|wasbs?|(web)?hdfs|s?ftp)://",
    re.IGNORECASE,
)


def with_local_paths(words: Sequence[str]) -> list[str]:
    """The words with `file://` addresses as paths; settings stay as they are.

    Taken for a path, `s3://bucket/traces` would silently become a folder named `s3:`.

    Raises:
        NotSupportedError: a word is an address in an object store.
    """
    return [_with_local_path(word) for word in words]


def _with_local_path(word: str) -> str:
    found = _STORAGE_URL.match(word)
    if found is None:
        return word
    flag, address = found["flag"] or "", word[found.start("scheme") :]
    parts = urlsplit(address)
    if parts.scheme.lower() in ("file", "local") and parts.netloc in ("", "localhost"):
        return flag + unquote(parts.path)
    raise NotSupportedError(
        f"{address}: traces, labels and runs live in folders, with locks and renames, which an "
        "object store does not have; mount it, or copy it to a folder that every node sees"
    )
