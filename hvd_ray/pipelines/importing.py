"""Importing transcripts, without Ray: one part's rows to one file, and what all parts hold."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq

from hvd_ray.errors import UserError
from hvd_ray.home import atomic_path
from hvd_ray.traces.schema import TRACES_SCHEMA
from hvd_ray.traces.store import read_footer
from hvd_ray.traces.transcripts import ImportedTrace, TranscriptImporter, traces_table
from hvd_ray.traces.transcripts_files import LogRow
from hvd_ray.traces.transcripts_plan import ImportPart, LogSource

OnBadLine = Literal["fail", "skip"]

ROW_GROUP_TOKENS = 4 * 2**20
"""Token ids that are held before they are written: 16 MB."""
MAX_NAMED = 1000
"""Bad rows of one part that are named; all are counted."""
_COUNT_KEY = b"hvd_ray.count."
_BAD_KEY = b"hvd_ray.bad_rows"
_TEXT_COLUMNS = ["workload", "family", "scope", "session_id", "model", "tokenizer_sha",
                 "finish_reason", "policy", "engine", "split"]  # fmt: skip


@dataclass(frozen=True, slots=True)
class ImportSummary:
    """What a folder of imported traces holds, and what became of every row."""

    rows: int = 0
    """Rows read: each has become traces, has no answer or is bad."""
    rows_imported: int = 0
    rows_without_answer: int = 0
    rows_bad: int = 0
    traces: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    answers_left_out: int = 0
    """Answers without a token, or whose prompt alone fills the context."""
    answers_cut: int = 0
    """Answers that the context or the budget had ended."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def import_part(
    part: ImportPart, *, importer: TranscriptImporter, out: Path, on_bad_line: OnBadLine
) -> Counter[str]:
    """Make a part's traces and write them, with the counts in the file's metadata.

    Memory is bounded by one row and `ROW_GROUP_TOKENS`, whatever the part's size.

    Raises:
        UserError: a row is bad and `on_bad_line` is `fail`; the part is not written then.
    """
    file = part.traces_file(out)
    counts: Counter[str] = Counter()
    bad_rows: list[str] = []
    with atomic_path(file) as draft, _PartWriter(draft) as writer:
        for stretch in part.stretches:
            for row in stretch.rows():
                counts["rows"] += 1
                try:
                    traces = _row_traces(row, stretch.source, importer, counts)
                except UserError as error:
                    counts["rows_bad"] += 1
                    bad_rows.append(f"{stretch.source.place(row)}: {error}")
                    if on_bad_line == "fail":
                        raise UserError(bad_rows[-1]) from None
                else:
                    writer.add(traces)
        writer.note(counts, bad_rows)
    return counts


def summarise(out: Path, parts: Sequence[ImportPart]) -> tuple[ImportSummary, list[str]]:
    """Add up the parts on disk, from their footers; with the names of the bad rows."""
    totals: Counter[str] = Counter()
    bad_rows: list[str] = []
    for part in parts:
        metadata = read_footer(part.traces_file(out)).metadata
        for key, value in metadata.items():
            if key.startswith(_COUNT_KEY):
                totals[key.removeprefix(_COUNT_KEY).decode()] += int(value)
        bad_rows += json.loads(metadata[_BAD_KEY])
    summary = ImportSummary(**totals)
    accounted = summary.rows_imported + summary.rows_without_answer + summary.rows_bad
    assert accounted == summary.rows, f"{summary.rows} rows read, {accounted} accounted for"
    return summary, bad_rows


def _row_traces(
    row: LogRow, source: LogSource, importer: TranscriptImporter, counts: Counter[str]
) -> list[ImportedTrace]:
    """All traces of a row, or none where a part of it is bad."""
    entries = source.entries(row)
    traces = [trace for entry in entries for trace in importer.traces(entry, source)]
    counts["rows_imported" if entries else "rows_without_answer"] += 1
    counts["answers_left_out"] += sum(map(importer.num_answers, entries)) - len(traces)
    return traces


class _PartWriter:
    """Writes traces to one Parquet file, a row group at a time."""

    def __init__(self, path: Path) -> None:
        self._writer = pq.ParquetWriter(
            path, TRACES_SCHEMA, compression="zstd", use_dictionary=_TEXT_COLUMNS
        )
        self._waiting: list[ImportedTrace] = []
        self._num_waiting_tokens = 0
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> _PartWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.close()

    def add(self, traces: Iterable[ImportedTrace]) -> None:
        for trace in traces:
            self._waiting.append(trace)
            self._num_waiting_tokens += trace.num_tokens
            if self._num_waiting_tokens >= ROW_GROUP_TOKENS:
                self._flush()

    def note(self, counts: Counter[str], bad_rows: Sequence[str]) -> None:
        """Write what waits, and what became of the part's rows."""
        self._flush()
        counts.update(self.counts)
        named = list(bad_rows[:MAX_NAMED])
        if len(bad_rows) > MAX_NAMED:
            named.append(f"and {len(bad_rows) - MAX_NAMED} more after {named[-1].split(': ')[0]}")
        noted = {_COUNT_KEY + name.encode(): str(n).encode() for name, n in counts.items()}
        noted[_BAD_KEY] = json.dumps(named, ensure_ascii=False).encode()
        self._writer.add_key_value_metadata(noted)

    def _flush(self) -> None:
        if not self._waiting:
            return
        self._writer.write_table(traces_table(self._waiting))
        self.counts["traces"] += len(self._waiting)
        for trace in self._waiting:
            self.counts["prompt_tokens"] += len(trace.prompt_ids)
            self.counts["output_tokens"] += len(trace.output_ids)
            self.counts["answers_cut"] += trace.facts.finish_reason == "length"
        self._waiting, self._num_waiting_tokens = [], 0
