"""Sampling parameters: what is refused, by name."""

from __future__ import annotations

import pickle  # what Ray uses to send requests to workers

import pytest

from hvd_ray.errors import UserError
from hvd_ray.types import Draft, SamplingParams, Source, TokenBuffer


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e-310}, "temperature must be 0 or >= 1e-05"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 2**40}, "top_k"),
        ({"top_p": 0}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ({"stop": "ab"}, "stop must be a list"),
        ({"stop": ("",)}, "stop"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"logit_bias": {3: 101.0}}, "logit_bias"),
        ({"logprobs": 99}, "logprobs"),
        ({"seed": 1.5}, "seed"),
    ],
)
def test_a_value_out_of_range_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SamplingParams(**changes)  # type: ignore[arg-type]


def test_parameters_travel_between_processes() -> None:
    params = SamplingParams(logit_bias={3: 1.0}, stop=("x",), seed=4)
    assert pickle.loads(pickle.dumps(params)) == params  # noqa: S301


def test_a_sampled_draft_may_not_be_cut() -> None:
    import numpy as np

    draft = Draft(Source.EAGLE3, (1, 2), proposal_probs_KV=np.ones((2, 3)))
    with pytest.raises(AssertionError, match="may not be cut"):
        draft.cut(1)
    assert draft.cut(2) is draft


def test_a_buffer_grows_and_keeps_its_tail() -> None:
    buffer = TokenBuffer([1, 2])
    for token in range(200):
        buffer.extend([token])
    assert len(buffer) == 202
    assert buffer.tail(3).tolist() == [197, 198, 199]
    assert buffer.view()[:3].tolist() == [1, 2, 0]
