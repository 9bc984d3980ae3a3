"""What the head is called with, and what stands in for a part of vLLM's sampling on a CPU."""

from __future__ import annotations

import pytest
import torch

from hvd_ray.vllm_plugin.backlog import Rows
from hvd_ray.vllm_plugin.compat_runner import rows_for_head, spread_over_rows, step_of_rows


def test_the_head_is_called_with_all_rows_of_some_requests() -> None:
    """As the runner hands a step over: three requests, of 2, 1 and 1 rows."""
    pytest.importorskip("vllm")
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts, ends = torch.tensor([0, 2, 3, 4], dtype=torch.int32), torch.tensor([12, 7, 40])
    whole = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=ends,
        seq_lens_cpu_upper_bound=ends,
        num_reqs=3,
        num_actual_tokens=4,
        max_query_len=2,
        max_seq_len=40,
        block_table_tensor=torch.tensor([[1], [2], [3]]),
        slot_mapping=torch.tensor([26, 27, 38, 63]),
    )
    step = {
        "target_token_ids": torch.tensor([5, 6, 7, 8]),
        "target_positions": torch.tensor([10, 11, 6, 39]),
        "target_hidden_states": torch.arange(4.0)[:, None],
        "next_token_ids": torch.tensor([50, 70, 80]),
        "common_attn_metadata": whole,
        "mm_embed_inputs": None,
    }
    rows = rows_for_head(step)
    assert rows is not None
    assert [(part.start, part.end) for part in rows] == [(10, 12), (6, 7), (39, 40)]
    earlier = Rows(38, torch.tensor([9]), torch.tensor([[9.0]]), torch.tensor([62]))
    some = step_of_rows(step, [0, 2], [rows[0], Rows.joined([earlier, rows[2]])])
    assert some["target_positions"].tolist() == [10, 11, 38, 39]
    assert some["target_token_ids"].tolist() == [5, 6, 9, 8]
    assert some["target_hidden_states"][:, 0].tolist() == [0, 1, 9, 3]
    assert some["next_token_ids"].tolist() == [50, 80]
    metadata = some["common_attn_metadata"]
    assert metadata.query_start_loc.tolist() == [0, 2, 4]
    assert metadata.seq_lens.tolist() == [12, 40]
    assert metadata.seq_lens.dtype == torch.int32
    assert metadata.slot_mapping.tolist() == [26, 27, 62, 63]
    assert metadata.block_table_tensor.tolist() == [[1], [3]]
    metadata.seq_lens += 1  # as a chain does
    assert metadata.seq_lens_cpu_upper_bound.tolist() == [12, 40]


def test_values_are_spread_over_the_rows_of_each_request() -> None:
    cu_num_tokens = torch.tensor([2, 2, 5], dtype=torch.int32)
    spread = spread_over_rows(torch.tensor([7, 8, 9], dtype=torch.int32), cu_num_tokens, 5)
    assert spread.tolist() == [7, 7, 9, 9, 9]
    assert spread.dtype == torch.int32


def test_a_greedy_temperature_becomes_one_that_divides() -> None:
    temperature = torch.tensor([0.0, 0.5])
    spread = spread_over_rows(temperature, torch.tensor([1, 3]), 3, replace_from=0, replace_to=1)
    assert spread.tolist() == [1.0, 0.5, 0.5]
    assert spread.dtype == torch.float32


def test_without_rows_there_is_nothing_to_spread() -> None:
    assert spread_over_rows(torch.tensor([0.5]), torch.tensor([0]), 0).tolist() == []
