"""What an import has to do: which rows of which files go into which part on disk.

The parts follow from the files alone, a megabyte of rows each, so a run that was killed goes on
where it stopped, and any number of workers writes the same parts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from hvd_ray.errors import UserError
from hvd_ray.traces.transcripts_entries import BadLogRowError, LogEntry
from hvd_ray.traces.transcripts_files import (
    MAX_ROW_BYTES,
    Layout,
    LogRow,
    labels_of,
    layout_of,
    rows_of,
)
from hvd_ray.traces.transcripts_formats import (
    LOG_FORMATS,
    LogFormat,
    RowDefaults,
    entries_of,
    format_of,
    parse_json,
)

PART_BYTES = 2**20
_NUM_SNIFFED = 20
"""Rows that are looked at to tell a file's format."""


@dataclass(frozen=True, slots=True)
class LogSource:
    """A file and how it is to be read."""

    path: Path
    label: str
    """Its name in ids: the same wherever the files lie."""
    index: int
    """Its place among the files of the import."""
    layout: Layout
    log_format: LogFormat

    @property
    def workload(self) -> str:
        """For rows that name none: agents write one document a task into a folder."""
        is_document = self.layout == "document"
        return self.path.absolute().parent.name if is_document else self.path.stem

    def entries(self, row: LogRow) -> list[LogEntry]:
        """What a row holds; nothing where there is no answer in it.

        Raises:
            BadLogRowError: it is no JSON or not of the file's format.
        """
        own_id = self.label if self.layout == "document" else f"{self.label}:{row.line}"
        try:
            return entries_of(
                _value_of(row),
                log_format=self.log_format,
                line=row.line,
                defaults=RowDefaults(id=own_id, workload=self.workload),
            )
        except RecursionError:
            raise BadLogRowError("is nested too deeply") from None

    def place(self, row: LogRow) -> str:
        return f"{self.path}:{row.line}"


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive rows of one file."""

    source: LogSource
    offset: int
    line: int
    num_bytes: int

    def rows(self) -> Iterator[LogRow]:
        source = self.source
        return rows_of(
            source.path,
            source.layout,
            offset=self.offset,
            line=self.line,
            num_bytes=self.num_bytes,
        )


@dataclass(frozen=True, slots=True)
class ImportPart:
    """Rows that become one part on disk."""

    number: int
    stretches: tuple[Stretch, ...]
    num_rows: int

    def traces_file(self, out: Path) -> Path:
        return out / "traces" / f"p{self.number:05d}.parquet"


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """All that is to be imported."""

    sources: tuple[LogSource, ...]
    parts: tuple[ImportPart, ...]
    logs_hash: str
    """Names the rows, the files' labels and formats, and their order."""

    @property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.parts)


def find_sources(files: Sequence[Path], *, log_format: LogFormat | None = None) -> list[LogSource]:
    """Tell layout and format of each file from its first rows.

    Args:
        files: in the order in which they are to be taken as having happened.
        log_format: of all of them; None: to be told.

    Raises:
        UserError: a file cannot be read, or its rows are of no known format.
    """
    sources = []
    for index, (path, label) in enumerate(zip(files, labels_of(files), strict=True)):
        layout = layout_of(path)
        found = log_format or _format_in(path, layout)
        sources.append(LogSource(path, label, index, layout, found))
    return sources


def plan_import(
    sources: Sequence[LogSource], *, limit: int | None = None, refuse_bad_rows: bool = True
) -> ImportPlan:
    """Read the files once and divide their rows into parts.

    Args:
        sources: see `find_sources`.
        limit: rows of each file at the most.
        refuse_bad_rows: parse every row now, so that a bad one is found before anything is
            written; otherwise it is found, counted and left out when its part is made.

    Raises:
        UserError: a file cannot be read or, with `refuse_bad_rows`, a row is bad.
    """
    packer, digest = _Packer(), hashlib.sha256()
    for source in sources:
        digest.update(f"\0{source.label}\0{source.log_format}\0".encode())
        for row in islice(rows_of(source.path, source.layout), limit):
            if refuse_bad_rows:
                _refuse_if_bad(source, row)
            digest.update(row.text if row.text is not None else b"\0")
            digest.update(b"\n")
            packer.add(source, row)
    return ImportPlan(tuple(sources), tuple(packer.parts()), digest.hexdigest()[:32])


class _Packer:
    """Puts rows into parts, in their order."""

    def __init__(self) -> None:
        self._done: list[ImportPart] = []
        self._stretches: list[Stretch] = []
        self._num_rows = self._num_bytes = 0

    def add(self, source: LogSource, row: LogRow) -> None:
        if self._num_rows and self._num_bytes + row.num_bytes > PART_BYTES:
            self._close()
        last = self._stretches[-1] if self._stretches else None
        if last is not None and last.source is source:
            size = row.offset + row.num_bytes - last.offset
            self._stretches[-1] = Stretch(source, last.offset, last.line, size)
        else:
            self._stretches.append(Stretch(source, row.offset, row.line, row.num_bytes))
        self._num_rows += 1
        self._num_bytes += row.num_bytes

    def parts(self) -> list[ImportPart]:
        if self._num_rows:
            self._close()
        return self._done

    def _close(self) -> None:
        self._done.append(ImportPart(len(self._done), tuple(self._stretches), self._num_rows))
        self._stretches, self._num_rows, self._num_bytes = [], 0, 0


def _refuse_if_bad(source: LogSource, row: LogRow) -> None:
    try:
        source.entries(row)
    except BadLogRowError as error:
        raise UserError(
            f"{source.place(row)}: {error} (read as {source.log_format}; "
            "`--on-bad-line skip` goes on without such rows)"
        ) from None


def _value_of(row: LogRow) -> object:
    if row.text is None:
        raise BadLogRowError(f"is longer than {MAX_ROW_BYTES:,} bytes")
    return parse_json(row.text)


def _format_in(path: Path, layout: Layout) -> LogFormat:
    reasons, num_read = [], 0
    for row in islice(rows_of(path, layout), _NUM_SNIFFED):
        try:
            found = format_of(_value_of(row))
        except BadLogRowError as error:
            reasons.append(f"{path}:{row.line}: {error}")
            continue
        if found is not None:
            return found
        num_read += 1
    if reasons and not num_read:
        raise UserError(f"{reasons[0]}, and no other row tells the format (`--format` says which)")
    if not num_read:
        raise UserError(f"{path} holds no rows: expected a log in JSON")
    raise UserError(
        f"{path}: its first rows are of no known format; expected one of "
        f"{', '.join(LOG_FORMATS)} (`--format` says which)"
    )
