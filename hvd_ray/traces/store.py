"""Traces, steps and labels on disk: one folder a table, one Parquet file a part.

A part appears whole or not at all, so a reader never sees half of one, and a file of another
schema is refused by name with the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hvd_ray.errors import UserError
from hvd_ray.home import atomic_path
from hvd_ray.parquet_file import opened_parquet
from hvd_ray.traces.schema import (
    FEATURE_VERSION_KEY,
    SCHEMA_KEY,
    SCHEMA_VERSION,
    STEPS_SCHEMA,
    TRACES_SCHEMA,
    VERSION_KEY,
    TableName,
    Trace,
    labels_schema,
    steps_from_table,
    steps_to_table,
    traces_from_table,
    traces_to_table,
)
from hvd_ray.types import Step

TOKEN_COLUMNS = ("prompt_token_ids", "output_token_ids")


def write_table(table: Any, path: Path) -> None:
    """Write one part; it appears whole or not at all.

    Raises:
        UserError: the place cannot be written.
    """
    with atomic_path(path) as draft:
        pq.write_table(table, draft, compression="zstd")


def write_traces(traces: Iterable[Trace], path: Path) -> None:
    """Write one part of `traces/`."""
    write_table(traces_to_table(traces), path)


def write_steps(steps: Iterable[tuple[str, Step]], path: Path) -> None:
    """Write one part of `steps/` from `(trace_id, step)` pairs."""
    write_table(steps_to_table(steps), path)


def read_traces(place: Path) -> list[Trace]:
    """The traces in a file, in a folder of parts or under a collection's folder.

    Raises:
        UserError: nothing is there, or a file has another schema.
    """
    return [trace for path in parts_of(place, "traces") for trace in read_trace_part(path)]


def read_trace_part(path: Path) -> list[Trace]:
    """The traces of one file, in the order they were written."""
    with readable_rows(path, "traces"):
        return traces_from_table(read_table(path, "traces", TRACES_SCHEMA))


@contextmanager
def readable_rows(path: Path, table: TableName) -> Iterator[None]:
    """Turn what damaged values raise into one line: a file may be whole and its rows are not."""
    try:
        yield
    except UserError as error:
        told = str(error)
        raise UserError(told if str(path) in told else f"{path}: {told}") from None
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        cause = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"{path}: holds a row that is none of {table} ({cause})") from None


def read_steps(place: Path) -> dict[str, tuple[Step, ...]]:
    """The steps of each trace under `place`, as `read_traces` finds them."""
    tables = [read_table(path, "steps", STEPS_SCHEMA) for path in parts_of(place, "steps")]
    with readable_rows(place, "steps"):
        return steps_from_table(pa.concat_tables(tables))


def read_labels(place: Path, *, feature_names: Sequence[str], feature_version: int) -> Any:
    """The labels under `place` as one table, with the columns of `labels_schema`.

    Raises:
        UserError: nothing is there, or a file was labelled with another schema or other features.
    """
    schema = labels_schema(feature_names, feature_version)
    tables = [_read_labels_part(path, schema) for path in parts_of(place, "labels")]
    return pa.concat_tables(tables)


def parts_of(place: Path, table: TableName) -> list[Path]:
    """The Parquet files of a table: `place` itself, or those of `folders_of`.

    Raises:
        UserError: there are none.
    """
    if place.is_file():
        return [place]
    tables = [_table_folder(folder, table) for folder in folders_of(place, table)]
    parts = [part for folder in tables for part in finished_parts(folder)]
    if not parts:
        raise UserError(f"{place}: holds no {table}; expected Parquet files in {tables[0]}")
    return parts


def folders_of(place: Path, table: TableName) -> list[Path]:
    """`place`, where it holds parts or a folder `TABLE`; else the folders in it that hold one."""
    if not place.is_dir() or (place / table).is_dir() or any(finished_parts(place)):
        return [place]
    return [path for path in sorted(place.iterdir()) if (path / table).is_dir()] or [place]


def _table_folder(place: Path, table: TableName) -> Path:
    return place / table if (place / table).is_dir() else place


def finished_parts(folder: Path) -> Iterator[Path]:
    """The parts of one table's folder in order of name; those being written stay hidden."""
    yield from sorted(p for p in folder.glob("*.parquet") if not p.name.startswith("."))


def read_table(path: Path, table: TableName, schema: Any, *, columns: Sequence[str] = ()) -> Any:
    """One file's columns, all of `schema` or those named, checked against `schema`.

    Raises:
        UserError: the file is absent, broken or of another schema, or a value is missing or
            impossible; the message says where.
    """
    with opened_parquet(path, what=table) as file:
        _check_schema(path, file.schema_arrow, table, schema)
        found = file.read(columns=list(columns) or schema.names)
    _check_values(path, found, table, schema)
    return found


def refuse_unknown_tokens(place: Path, *, num_token_ids: int) -> None:
    """Make sure that a target has every token of the traces under `place`.

    Raises:
        UserError: a token id is `num_token_ids` or more; file, trace and token are named.
    """
    for path in parts_of(place, "traces"):
        if _may_reach(path, num_token_ids):
            columns = ("trace_id", *TOKEN_COLUMNS)
            table = read_table(path, "traces", TRACES_SCHEMA, columns=columns)
            for name in TOKEN_COLUMNS:
                odd = _first_token(table[name], lambda ids: pc.greater_equal(ids, num_token_ids))
                if odd is not None:
                    row, token = odd
                    raise UserError(
                        f"{path}: {_row_name(table, row)}: {name} holds {token}, and the "
                        f"model knows no token beyond {num_token_ids - 1}"
                    )


def _may_reach(path: Path, token_id: int) -> bool:
    """Whether a part may hold such a token, by its footer."""
    footer = read_footer(path)
    groups = (footer.row_group(index) for index in range(footer.num_row_groups))
    for column in (group.column(i) for group in groups for i in range(group.num_columns)):
        if column.path_in_schema.partition(".")[0] in TOKEN_COLUMNS:
            figures = column.statistics
            is_known = figures is not None and (figures.has_min_max or not figures.num_values)
            if not is_known or (figures.has_min_max and figures.max >= token_id):
                return True
    return False


def num_rows(path: Path) -> int:
    """Rows of a part, from its footer alone.

    Raises:
        UserError: the file is absent or broken.
    """
    return int(read_footer(path).num_rows)


def read_footer(path: Path) -> Any:
    """A part's Parquet metadata.

    Raises:
        UserError: the file is absent or broken.
    """
    try:
        with opened_parquet(path, what="rows") as file:
            return file.metadata
    except UserError as error:
        raise UserError(f"{error}; remove it and run again") from None


def _check_schema(path: Path, found: Any, table: TableName, expected: Any) -> None:
    metadata = found.metadata or {}
    kind = metadata.get(SCHEMA_KEY, b"").decode(errors="replace") or "an unknown table"
    if kind != table:
        raise UserError(f"{path}: holds {kind}, expected {table} written by hvd")
    version = metadata.get(VERSION_KEY, b"none").decode(errors="replace")
    if version != str(SCHEMA_VERSION):
        raise UserError(
            f"{path}: {table} of schema version {version}, expected {SCHEMA_VERSION}; "
            "make it again with this version of hvd"
        )
    for column in expected:
        _check_column(path, found, column)


def _check_column(path: Path, found: Any, column: Any) -> None:
    index = found.get_field_index(column.name)
    if index < 0:
        raise UserError(f"{path}: the column {column.name} is missing")
    kind = found.field(index).type
    if not kind.equals(column.type):
        raise UserError(f"{path}: the column {column.name} is {kind}, expected {column.type}")


def _check_values(path: Path, found: Any, table: TableName, schema: Any) -> None:
    """Arrow reads a column that may hold no null as if it may."""
    for name in found.column_names:
        column = found[name]
        if column.null_count and not schema.field(name).nullable:
            row = pc.index(pc.is_null(column), True).as_py()
            _refuse_row(path, found, table, row, f"{name} is missing")
        if name in TOKEN_COLUMNS:
            odd = _first_token(column, lambda ids: pc.fill_null(pc.less(ids, 0), True))
            if odd is not None:
                row, token = odd
                _refuse_row(path, found, table, row, f"{name} holds {token}, which is no token")


def _refuse_row(path: Path, found: Any, table: TableName, row: int, why: str) -> NoReturn:
    name = _row_name(found, row)
    raise UserError(f"{path}: holds a row that is none of {table} ({name}: {why})")


def _first_token(column: Any, is_odd: Callable[[Any], Any]) -> tuple[int, Any] | None:
    """Row and value of the first token of a column of lists for which `is_odd` holds."""
    row = 0
    for chunk in column.chunks:
        ids = chunk.flatten()
        index = pc.index(is_odd(ids), True).as_py()
        if index >= 0:
            return row + pc.list_parent_indices(chunk)[index].as_py(), ids[index].as_py()
        row += len(chunk)
    return None


def _row_name(table: Any, row: int) -> str:
    """`trace ID` where that is known, else `row N`."""
    name = table["trace_id"][row].as_py() if "trace_id" in table.column_names else None
    return f"row {row}" if name is None else f"trace {name}"


def _read_labels_part(path: Path, schema: Any) -> Any:
    expected = schema.metadata[FEATURE_VERSION_KEY].decode()
    found = _feature_version(path)
    if found is not None and found != expected:
        raise UserError(
            f"{path}: labelled with features of version {found}, expected {expected}; "
            "label the traces again"
        )
    return read_table(path, "labels", schema)


def _feature_version(path: Path) -> str | None:
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (pa.ArrowException, OSError):
        return None  # read_table says what is wrong with the file
    value = metadata.get(FEATURE_VERSION_KEY)
    return value.decode(errors="replace") if value is not None else None
