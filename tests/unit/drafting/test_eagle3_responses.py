"""Responses as they are read: damaged rows are refused by shard and row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hvd_ray.drafting.eagle3_responses import read_responses, refuse_odd_responses
from hvd_ray.errors import UserError

ROW: dict[str, Any] = {
    "prompt_id": "p",
    "family": "f",
    "workload": "w",
    "temperature": 0.0,
    "split": "train",
    "error": None,
    "prompt_token_ids": [1, 2, 3],
    "output_token_ids": [4, 5],
}


def shard(folder: Path, **changes: Any) -> Path:
    """A good row and one with changes; a value `...` takes the column away."""
    odd = {**ROW, **changes}
    kept = [name for name, value in odd.items() if value is not ...]
    rows = [{name: row[name] for name in kept} for row in (ROW, odd)]
    path = folder / "part-0.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"prompt_id": None}, r"row 1.*prompt_id is missing"),
        ({"family": None}, "family is missing"),
        ({"split": None}, "split is missing"),
        ({"temperature": None}, "temperature is None"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"prompt_token_ids": None}, "prompt_token_ids is missing"),
        ({"output_token_ids": None}, "output_token_ids is missing"),
        ({"output_token_ids": [4, None]}, "output_token_ids holds None"),
        ({"prompt_token_ids": [1, -7]}, "prompt_token_ids holds -7, which is no token"),
        ({"output_token_ids": ...}, "the column output_token_ids is missing"),
        ({"workload": ...}, "the column workload is missing"),
    ],
)
def test_a_row_that_is_no_response_is_refused(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    path = shard(tmp_path, **changes)
    with pytest.raises(UserError, match=why) as caught:
        read_responses(path, max_prompt_tokens=10)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_row_that_failed_is_left_out_whatever_it_lacks(tmp_path: Path) -> None:
    path = shard(tmp_path, error="the model fell", output_token_ids=None)
    assert len(read_responses(path, max_prompt_tokens=10)) == 1


def test_tokens_that_are_no_whole_numbers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "part-0.parquet"
    pq.write_table(pa.Table.from_pylist([{**ROW, "output_token_ids": [1.5, 2.5]}]), path)
    with pytest.raises(UserError, match=r"output_token_ids is list<element: double>"):
        read_responses(path, max_prompt_tokens=10)


def test_a_token_beyond_the_target_is_refused_by_its_row(tmp_path: Path) -> None:
    path = shard(tmp_path, output_token_ids=[4, 10**9])
    assert len(read_responses(path, max_prompt_tokens=10)) == 2
    refuse_odd_responses([path], num_token_ids=None)
    with pytest.raises(
        UserError, match=r"row 1, .*1000000000, and the model knows no token beyond"
    ):
        refuse_odd_responses([path], num_token_ids=64)


@pytest.mark.parametrize("place", [0, -1])
def test_a_shard_that_is_damaged_at_either_end_is_refused(tmp_path: Path, place: int) -> None:
    path = shard(tmp_path)
    whole = bytearray(path.read_bytes())
    whole[place] ^= 0xFF
    path.write_bytes(whole)
    with pytest.raises(UserError, match="no readable Parquet file of responses"):
        read_responses(path, max_prompt_tokens=10)
