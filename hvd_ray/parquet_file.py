"""Opening a Parquet file that somebody else may have damaged: whole at both ends, or one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvd_ray.errors import UserError

_MAGIC = b"PAR1"


@contextmanager
def opened_parquet(path: Path, *, what: str) -> Iterator[Any]:
    """The `pyarrow.parquet.ParquetFile`, as long as the block lasts.

    Args:
        path: of the file.
        what: what it should hold, to be named.

    Raises:
        UserError: it is absent or broken, also where that is found while the block reads it.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        _refuse_another_beginning(path, what)
        with pq.ParquetFile(path) as file:
            yield file
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected a Parquet file of {what}") from None
    except (pa.ArrowException, OSError) as error:
        cause = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"{path}: no readable Parquet file of {what} ({cause})") from None


def _refuse_another_beginning(path: Path, what: str) -> None:
    """Arrow reads the end alone, and would take a file whose beginning was written over as whole:
    nobody could say how much of it was."""
    with path.open("rb") as file:
        found = file.read(len(_MAGIC))
    if found != _MAGIC:
        raise UserError(
            f"{path}: no readable Parquet file of {what} (begins with {found!r}, not {_MAGIC!r}); "
            "it was damaged, write or copy it again"
        )
