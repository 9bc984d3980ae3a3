"""Download one file of known size and sha256: resumed after a break, checked, then moved."""

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from hvd_ray.errors import UserError
from hvd_ray.home import ensure_dir, writes_into

_CHUNK_BYTES = 1 << 18
_MAX_BREAKS = 5
_FIRST_PAUSE_S = 0.5


def download(
    url: httpx.URL | str,
    *,
    to: Path,
    num_bytes: int,
    sha256: str,
    client: httpx.Client,
    on_bytes: Callable[[int], None],
) -> None:
    """Write the file at `url` to `to`, continuing the `.part` of an earlier try.

    Args:
        url: Where it lies; the server may or may not support ranges.
        to: Appears only when size and sha256 are right.
        num_bytes: The expected size.
        sha256: The expected hash, hexadecimal.
        client: For the requests.
        on_bytes: Called with the number of bytes there so far.

    Raises:
        UserError: the connection keeps breaking, the content is not the expected one, no room.
        httpx.HTTPStatusError: the server refuses.
    """
    part = to.with_name(f"{to.name}.part")
    ensure_dir(to.parent)
    with writes_into(to):
        was_resumed = _size(part) > 0
        _receive_all(url, part=part, num_bytes=num_bytes, client=client, on_bytes=on_bytes)
        if was_resumed and sha256_of(part) != sha256:  # the old part may be another file's
            part.unlink()
            _receive_all(url, part=part, num_bytes=num_bytes, client=client, on_bytes=on_bytes)
        accept(part, to=to, sha256=sha256)


def accept(candidate: Path, *, to: Path, sha256: str) -> None:
    """Move `candidate` to `to` if its content is the expected one, else remove it.

    Raises:
        UserError: the sha256 differs.
    """
    found = sha256_of(candidate)
    if found != sha256:
        candidate.unlink()
        raise UserError(
            f"{to.name} came with sha256 {found}, expected {sha256}; nothing was kept. "
            "Run the command again; if it repeats, the package index serves another file"
        )
    candidate.replace(to)


def sha256_of(path: Path) -> str:
    """Hexadecimal sha256 of a file's content."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _receive_all(
    url: httpx.URL | str,
    *,
    part: Path,
    num_bytes: int,
    client: httpx.Client,
    on_bytes: Callable[[int], None],
) -> None:
    if _size(part) > num_bytes:
        part.unlink()
    for num_breaks in range(_MAX_BREAKS + 1):
        if _size(part) == num_bytes:
            on_bytes(num_bytes)
            return
        try:
            _receive(url, part=part, num_bytes=num_bytes, client=client, on_bytes=on_bytes)
        except httpx.TransportError as error:
            if num_breaks == _MAX_BREAKS:
                raise UserError(
                    f"the connection broke at {_size(part):,} of {num_bytes:,} bytes of "
                    f"{part.stem} ({error}); run the command again, it resumes there"
                ) from error
            time.sleep(_FIRST_PAUSE_S * 2**num_breaks)


def _receive(
    url: httpx.URL | str,
    *,
    part: Path,
    num_bytes: int,
    client: httpx.Client,
    on_bytes: Callable[[int], None],
) -> None:
    """One request, from where `part` ends; a server without ranges starts over."""
    headers = {"Accept-Encoding": "identity", "Range": f"bytes={_size(part)}-"}
    with client.stream("GET", url, headers=headers) as response:
        response.raise_for_status()
        is_rest = response.status_code == httpx.codes.PARTIAL_CONTENT
        num_there = _size(part) if is_rest else 0
        _check_size(response, num_there=num_there, num_bytes=num_bytes, name=part.stem)
        with part.open("ab" if is_rest else "wb") as handle:
            for chunk in response.iter_raw(_CHUNK_BYTES):
                num_there += len(chunk)
                if num_there > num_bytes:
                    raise _wrong_size(part.stem, expected=num_bytes, offered="more")
                handle.write(chunk)
                on_bytes(num_there)


def _check_size(response: httpx.Response, *, num_there: int, num_bytes: int, name: str) -> None:
    """Refuse a sign-in page or another file before it is written."""
    length = response.headers.get("content-length")
    if length is not None and num_there + int(length) != num_bytes:
        raise _wrong_size(name, expected=num_bytes, offered=f"{num_there + int(length):,}")


def _wrong_size(name: str, *, expected: int, offered: str) -> UserError:
    return UserError(
        f"the server offers {offered} bytes as {name}, expected {expected:,}; "
        "check the network (a sign-in page?) and pip's index settings"
    )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
