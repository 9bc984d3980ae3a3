"""What stands in for a part of vLLM's sampling on a CPU."""

from __future__ import annotations

import torch

from hvd_ray.vllm_plugin.compat_runner import spread_over_rows


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
