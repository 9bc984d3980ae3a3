"""Log files, row by row, in constant memory: JSON lines, a JSON array, or one JSON document.

A *row* is one JSON value with the line it begins at. A file is never held as a whole: what is in
memory is one row and a read buffer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from hvd_ray.errors import UserError
from hvd_ray.traces.transcripts_agents import is_event_list
from hvd_ray.traces.transcripts_array import element_spans

Layout = Literal["lines", "array", "document"]

LOG_SUFFIXES = (".jsonl", ".ndjson", ".json", ".traj")
LINE_SUFFIXES = (".jsonl", ".ndjson")
MAX_ROW_BYTES = 256 * 2**20
"""A longer row is refused unread: no memory is lost to a file without line ends."""
_SNIFF_BYTES = 2**20
_READ_BYTES = 2**20
_BOM = b"\xef\xbb\xbf"
_UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_SPACE = b" \t\r\n"


@dataclass(frozen=True, slots=True)
class LogRow:
    """One JSON value of a file, not parsed yet."""

    line: int
    """The line it begins at, from 1."""
    offset: int
    """The byte it begins at."""
    text: bytes | None
    """None where it is longer than `MAX_ROW_BYTES`."""
    num_bytes: int


def log_files(places: Sequence[Path]) -> list[Path]:
    """The files named, and those below folders with a suffix of `LOG_SUFFIXES`, each once.

    Raises:
        UserError: a place is absent, a folder holds no log, or a name is no text.
    """
    found: dict[Path, None] = {}
    for place in places:
        files = _below(place) if place.is_dir() else [place]
        if not place.exists():
            raise UserError(
                f"cannot read {place}: no such file; expected a log or a folder of logs"
            )
        if not files:
            known = ", ".join(f"*{suffix}" for suffix in LOG_SUFFIXES)
            raise UserError(f"{place} holds no logs: expected {known} in it")
        found |= dict.fromkeys(files)
    for file in found:
        _refuse_odd_name(file)
    return list(found)


def labels_of(files: Sequence[Path]) -> list[str]:
    """A short name for each file, unlike all others: its own, or with the folders above it."""
    names = [file.name for file in files]
    if len(set(names)) == len(names):
        return names
    absolute = [file.absolute() for file in files]
    base = os.path.commonpath([file.parent for file in absolute])
    return [file.relative_to(base).as_posix() for file in absolute]


def layout_of(path: Path) -> Layout:
    """How the rows lie in a file, told by its first megabyte and its suffix.

    Raises:
        UserError: it cannot be read, is empty or does not begin like JSON.
    """
    with opened(path) as file:
        head = file.read(_SNIFF_BYTES).removeprefix(_BOM).lstrip(_SPACE)
    if not head:
        raise UserError(f"{path} is empty: expected a log in JSON")
    if head.startswith(_UTF_16_MARKS) or b"\0" in head[:4]:
        raise UserError(
            f"{path} is text in UTF-16 or UTF-32: expected UTF-8 "
            f"(`iconv -f UTF-16 -t UTF-8` makes it so)"
        )
    if head[:1] == b"[":
        return "document" if _is_event_array(head) else "array"
    if head[:1] != b"{" and path.suffix not in LINE_SUFFIXES:
        raise UserError(f"{path} is no log: expected JSON lines, a JSON array or a JSON object")
    is_lines = path.suffix in LINE_SUFFIXES or _is_one_of_several_rows(head)
    return "lines" if is_lines else "document"


def rows_of(
    path: Path, layout: Layout, *, offset: int = 0, line: int = 1, num_bytes: int | None = None
) -> Iterator[LogRow]:
    """The rows of a file, or of a stretch of it that begins and ends between rows.

    Args:
        path: the file.
        layout: how its rows lie.
        offset: the byte at which the stretch begins.
        line: the line of that byte.
        num_bytes: of the stretch; None: to the end.

    Raises:
        UserError: the file cannot be read, or an object of an array is far too long.
    """
    with opened(path) as file:
        if layout == "document":
            yield _document(file)
            return
        file.seek(offset)
        end = None if num_bytes is None else offset + num_bytes
        if layout == "lines":
            yield from _lines(file, offset, line, end)
        else:
            yield from _elements(file, path, offset, line, end)


def opened(path: Path) -> BinaryIO:
    """The file, open for reading.

    Raises:
        UserError: it cannot be.
    """
    try:
        return path.open("rb")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(f"cannot read {path}: {reason}; expected a log in JSON") from None


def _below(folder: Path) -> list[Path]:
    files = (file for suffix in LOG_SUFFIXES for file in folder.rglob(f"*{suffix}"))
    visible = (file for file in files if not file.name.startswith("."))
    return sorted(file for file in visible if file.is_file())


def _refuse_odd_name(file: Path) -> None:
    """Traces bear the names of their logs, and those are written as text."""
    if not file.name.isprintable():
        raise UserError(f"{file.name!a}: the name of a log must be printable: rename the file")


def _is_one_of_several_rows(head: bytes) -> bool:
    """Whether the first line is a JSON value by itself and another one begins after it."""
    first, newline, rest = head.partition(b"\n")
    if not newline:
        return len(head) > _SNIFF_BYTES // 2  # cut off: as lines it is read right either way
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return False
    return rest.lstrip(_SPACE)[:1] == b"{"


def _is_event_array(head: bytes) -> bool:
    """Whether an array lists the events of one trajectory rather than rows."""
    element = next(element_spans(head, is_last=len(head) < _SNIFF_BYTES), None)
    if element is None:
        return False
    try:
        return is_event_list([json.loads(head[slice(*element)])])
    except (ValueError, RecursionError):
        return False


def _document(file: BinaryIO) -> LogRow:
    text = file.read(MAX_ROW_BYTES + 1)
    size = len(text)
    return LogRow(1, 0, text.removeprefix(_BOM) if size <= MAX_ROW_BYTES else None, size)


def _lines(file: BinaryIO, offset: int, line: int, end: int | None) -> Iterator[LogRow]:
    while end is None or offset < end:
        text = file.readline(MAX_ROW_BYTES)
        if not text:
            return
        size = len(text)
        is_long = size == MAX_ROW_BYTES and not text.endswith(b"\n")
        if is_long:
            size += _skip_line(file)
        if offset == 0:
            text = text.removeprefix(_BOM)
        if text := text.strip():
            yield LogRow(line, offset, None if is_long else text, size)
        offset += size
        line += 1


def _skip_line(file: BinaryIO) -> int:
    skipped = 0
    while rest := file.readline(_READ_BYTES):
        skipped += len(rest)
        if rest.endswith(b"\n"):
            break
    return skipped


def _elements(
    file: BinaryIO, path: Path, offset: int, line: int, end: int | None
) -> Iterator[LogRow]:
    """The elements of an array; see `element_spans` for what becomes of broken ones."""
    buffer, base, is_last = b"", offset, False
    """`buffer` begins at byte `base` of the file, on line `line`."""
    while not is_last:
        chunk = file.read(max(_READ_BYTES, len(buffer)))  # doubled: a long object is scanned anew
        buffer, is_last, done = buffer + chunk, not chunk, 0
        for start, stop in element_spans(buffer, is_last=is_last):
            if end is not None and base + start >= end:
                return
            line += buffer.count(b"\n", done, start)
            if base or not _is_before_the_array(buffer, start, stop):
                yield LogRow(line, base + start, buffer[start:stop], stop - start)
            line += buffer.count(b"\n", start, stop)
            done = stop
        if len(buffer) - done > MAX_ROW_BYTES:
            raise UserError(f"{path}:{line}: an object of more than {MAX_ROW_BYTES:,} bytes")
        buffer, base = buffer[done:], base + done


def _is_before_the_array(buffer: bytes, start: int, stop: int) -> bool:
    """Whether this is a byte order mark, or the whole of an array that holds nothing."""
    is_first = not buffer[:start].strip(_BOM + _SPACE)
    return is_first and (buffer[start:stop] == _BOM or buffer[start : start + 1] == b"[")
