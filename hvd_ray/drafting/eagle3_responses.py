"""Recorded responses of a target: what a head learns from and is measured on.

A row with a missing value, or a token that the target does not have, is refused by shard and row:
it would be learnt from in silence, or end a training hours later.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_ray.errors import UserError, shown
from hvd_ray.parquet_file import opened_parquet

HELD_OUT_PERCENT = 4

CutAt = Callable[[Sequence[int]], int | None]
"""Where an output stops being worth anything (its loop begins), or None."""

_TOKENS = ("prompt_token_ids", "output_token_ids")
_NAMES = ("prompt_id", "family", "workload")
_OTHERS = ("temperature", "sampling", "split", "error")


def uncut(_token_ids: Sequence[int]) -> int | None:
    """Take outputs whole."""
    return None


@dataclass(frozen=True, kw_only=True)
class Response:
    """A prompt and what the target answered."""

    prompt_id: str
    family: str
    workload: str
    temperature: float
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]

    @property
    def is_held_out(self) -> bool:
        """By the prompt's tokens, so that no other sample of a held-out prompt is trained on."""
        return zlib.crc32(repr(self.prompt_token_ids).encode()) % 100 < HELD_OUT_PERCENT


def read_responses(
    shard: Path,
    *,
    max_prompt_tokens: int,
    with_test_split: bool = False,
    cut_at: CutAt = uncut,
) -> list[Response]:
    """Responses of a Parquet shard, those of one prompt side by side.

    Outputs end where `cut_at` says. Shards of `traces/` and of the drafter's own collection both
    do. Left out: failed rows, outputs under two tokens, prompts over `max_prompt_tokens` and,
    unless asked for (to measure, never to train), rows of the `test` split.

    Raises:
        UserError: the shard is broken or lacks a column, or a row lacks a value or has one that
            is none; shard and row are named.
    """
    responses = [
        _response(row, cut_at)
        for row in _good_rows(shard)
        if 1 <= len(row["prompt_token_ids"]) <= max_prompt_tokens
        and (with_test_split or row.get("split") != "test")
    ]
    long_enough = (each for each in responses if len(each.output_token_ids) >= 2)
    return sorted(long_enough, key=lambda each: each.prompt_token_ids)


def refuse_odd_responses(shards: Sequence[Path], *, num_token_ids: int | None) -> None:
    """Read every shard once, before anything is loaded or begun.

    Args:
        shards: Parquet files of responses.
        num_token_ids: one more than the largest token that the target has; None: nobody knows.

    Raises:
        UserError: as `read_responses`, and for tokens that the target does not have.
    """
    for shard in shards:
        for _ in _good_rows(shard, num_token_ids=num_token_ids):
            pass


def _good_rows(shard: Path, *, num_token_ids: int | None = None) -> Iterator[Mapping[str, Any]]:
    """The rows that did not fail, each held to what a response is."""
    with opened_parquet(shard, what="responses") as file:
        _check_columns(shard, file.schema_arrow)
        known = [name for name in (*_NAMES, *_TOKENS, *_OTHERS) if name in file.schema_arrow.names]
        rows = file.read(columns=known).to_pylist()
    for number, row in enumerate(rows):
        if row.get("error") is None:
            why = _oddity(row, num_token_ids)
            if why is not None:
                raise UserError(
                    f"{shard}: holds a row that is no response (row {number}, prompt "
                    f"{shown(row['prompt_id'])}: {why})"
                )
            yield row


def _check_columns(shard: Path, schema: Any) -> None:
    import pyarrow as pa

    for name in (*_NAMES, *_TOKENS):
        index = schema.get_field_index(name)
        if index < 0:
            raise UserError(f"{shard}: the column {name} is missing; expected responses")
        kind = schema.field(index).type
        is_right = (
            (pa.types.is_list(kind) or pa.types.is_large_list(kind))
            and pa.types.is_integer(kind.value_type)
            if name in _TOKENS
            else pa.types.is_string(kind) or pa.types.is_large_string(kind)
        )
        if not is_right:
            raise UserError(f"{shard}: the column {name} is {kind}, expected responses")


def _oddity(row: Mapping[str, Any], num_token_ids: int | None) -> str | None:
    """What keeps a row from being a response; None: it is one."""
    for name in (*_NAMES, *_TOKENS, *(name for name in ("split",) if name in row)):
        if row[name] is None:
            return f"{name} is missing"
    temperature = _temperature(row)
    if not isinstance(temperature, int | float) or not 0 <= temperature < math.inf:
        return f"temperature is {shown(temperature)}"
    for name in _TOKENS:
        odd = _odd_token(row[name], num_token_ids)
        if odd is not None:
            return f"{name} holds {odd}"
    return None


def _odd_token(token_ids: Sequence[int | None], num_token_ids: int | None) -> str | None:
    known = [token for token in token_ids if token is not None]
    if len(known) < len(token_ids):
        return "None, which is no token"
    if known and min(known) < 0:
        return f"{min(known)}, which is no token"
    if known and num_token_ids is not None and max(known) >= num_token_ids:
        return f"{max(known)}, and the model knows no token beyond {num_token_ids - 1}"
    return None


def _temperature(row: Mapping[str, Any]) -> Any:
    sampling = row.get("sampling")
    within = sampling.get("temperature", 0.0) if isinstance(sampling, Mapping) else 0.0
    return row.get("temperature", within)


def _response(row: Mapping[str, Any], cut_at: CutAt) -> Response:
    output = row["output_token_ids"]
    return Response(
        prompt_id=row["prompt_id"],
        family=row["family"],
        workload=row["workload"],
        temperature=float(_temperature(row)),
        prompt_token_ids=tuple(row["prompt_token_ids"]),
        output_token_ids=tuple(output[: cut_at(output)]),
    )
