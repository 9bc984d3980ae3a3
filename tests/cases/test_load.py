"""Case H02: drafts under a load that changes by a request must not flip to nothing and back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from hvd_ray.context import DecodeContext
from hvd_ray.payoff.joint_policy import Float64Array, JointCostPolicy
from hvd_ray.payoff.policy import Candidates
from hvd_ray.types import Draft, Float32Array, Source, TokenBuffer

LENGTH = 8
CHANCES = 0.85 ** np.arange(1, LENGTH + 1)


class Chances:
    """Every draft is judged the same."""

    def survival_all(
        self, drafts_B: Sequence[Draft], contexts_B: Sequence[DecodeContext]
    ) -> list[Float32Array]:
        del contexts_B
        return [CHANCES[: len(draft)].astype(np.float32) for draft in drafts_B]


class Knee:
    """Rows are free up to a number and cost the same each beyond it."""

    def __init__(self, free: int, steep_ms: float) -> None:
        self.free, self.steep_ms = free, steep_ms

    def verify_ms(self, num_rows: int) -> Float64Array:
        return 10.0 + self.steep_ms * np.maximum(np.arange(num_rows + 1) - self.free, 0)

    def model_ms(self, num_tokens: int) -> float:
        return float(num_tokens)


def context(position: int) -> DecodeContext:
    return DecodeContext(TokenBuffer(range(4 + position)), 4, max_tokens=100, room=LENGTH)


def num_drafted(num_requests: int, costs: Knee) -> int:
    """Rows of drafts in all, for so many requests alike."""
    draft = Draft(Source.SUFFIX, tuple(range(LENGTH)), tuple(CHANCES.tolist()))
    policy = JointCostPolicy(Chances(), costs, model_draft_tokens=0)
    decisions = policy.decide_all(
        [Candidates(draft)] * num_requests, [context(number) for number in range(num_requests)]
    )
    return sum(decision.length for decision in decisions)


@pytest.mark.parametrize("costs", [Knee(16, 2.0), Knee(32, 0.5), Knee(0, 0.3), Knee(64, 5.0)])
def test_h02_one_request_more_takes_few_rows_and_never_all(costs: Knee) -> None:
    """Rows compete, so a busier batch gives up its worst rows first, not a schedule's step."""
    totals = [num_drafted(requests, costs) for requests in range(1, 40)]
    means = [total / requests for requests, total in enumerate(totals, 1)]
    for requests, (before, after) in enumerate(pairwise(means), 1):
        # What the newcomer takes of the rows, and a token of each at the most.
        assert before - after <= 1 + LENGTH / (requests + 1), (requests, before, after)
        assert after - before <= 1, (requests, before, after)
    for requests, total in enumerate(totals, 1):
        if requests < costs.free:
            assert requests + total >= min(costs.free, requests * (1 + LENGTH)), "free rows unused"


def test_h02_the_same_load_gets_the_same_drafts_whatever_was_before() -> None:
    """No state of the policy's own: a load that comes back finds what it had."""
    costs = Knee(16, 2.0)
    swinging = [num_drafted(requests, costs) for requests in (4, 5, 4, 12, 4, 5)]
    assert swinging[0] == swinging[2] == swinging[4]
    assert swinging[1] == swinging[5]
