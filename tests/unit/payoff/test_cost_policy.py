"""`hvd_cost` on costs and survival curves that a test can work out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_ray.context import DecodeContext, DraftOutcome
from hvd_ray.payoff.cost import RowCosts
from hvd_ray.payoff.cost_policy import CostPolicy
from hvd_ray.payoff.policy import Candidates
from hvd_ray.types import NO_DRAFT, Draft, Float32Array, Source, Step, TokenBuffer

FLAT = RowCosts((1, 64), (10.0, 10.0001))
STEEP = RowCosts((1, 2), (10.0, 20.0))
MODEL = RowCosts((1, 64), (10.0, 10.0001), {Source.EAGLE3: 2.0}, {Source.EAGLE3: 1.0})


class CurveEstimator:
    def __init__(self, *survival: float) -> None:
        self._survival_K = np.array(survival, dtype=np.float32)

    def survival(self, draft: Draft, context: DecodeContext) -> Float32Array:  # noqa: ARG002
        return self._survival_K[: len(draft)]


def cycle(source: Source, drafted: int, accepted: int, emitted: int) -> Step:
    return Step(0, 0, source, drafted, accepted, emitted)


def context() -> DecodeContext:
    return DecodeContext(TokenBuffer([1, 2, 3]), 3, max_tokens=100, room=50)


def cache_of(length: int) -> Candidates:
    return Candidates(Draft(Source.SUFFIX, tuple(range(length))))


def test_when_rows_are_free_any_hope_is_taken_whole() -> None:
    decision = CostPolicy(CurveEstimator(0.5, 0.4, 0.3, 0.2), FLAT).decide(cache_of(4), context())
    assert (decision.source, decision.length) == (Source.SUFFIX, 4)
    assert decision.predicted_payoff == pytest.approx(1.4)


def test_when_rows_cost_a_pass_each_an_unsure_draft_is_declined() -> None:
    decision = CostPolicy(CurveEstimator(0.5, 0.4, 0.3, 0.2), STEEP).decide(cache_of(4), context())
    assert (decision.source, decision.length) == (Source.NONE, 0)


def test_a_draft_is_cut_where_the_next_row_stops_paying() -> None:
    costs = RowCosts((1, 2, 3, 4, 5), (10.0, 11.0, 12.0, 13.0, 14.0))  # a row: a tenth of a pass
    decision = CostPolicy(CurveEstimator(0.9, 0.8, 0.05, 0.04), costs).decide(
        cache_of(4), context()
    )
    assert decision.length == 2


def test_the_rate_being_reached_raises_the_bar() -> None:
    """What pays for a slow request would hold a fast one up."""
    costs = RowCosts((1, 2), (10.0, 13.0))
    slow, fast = context(), context()
    for _ in range(60):
        fast.history.cycles.append(cycle(Source.SUFFIX, 1, 1, 6))
    policy = CostPolicy(CurveEstimator(0.4), costs)
    assert policy.decide(cache_of(1), slow).source is Source.SUFFIX
    assert policy.decide(cache_of(1), fast).source is Source.NONE


def test_the_model_drafter_is_weighed_by_its_cost() -> None:
    hopeful = Candidates(NO_DRAFT, Source.EAGLE3, 4)
    always = CostPolicy(CurveEstimator(), MODEL, model_acceptance=(0.9,))
    never = CostPolicy(CurveEstimator(), MODEL, model_acceptance=(0.05,))
    assert always.decide(hopeful, context()).source is Source.EAGLE3
    assert always.decide(hopeful, context()).length == 4
    assert never.decide(hopeful, context()).source is Source.NONE


def test_the_model_drafter_fades_as_it_fails_and_not_at_once() -> None:
    policy = CostPolicy(CurveEstimator(), MODEL, model_acceptance=(0.5,))
    state, candidates = context(), Candidates(NO_DRAFT, Source.EAGLE3, 4)
    declined_after = 0
    while policy.decide(candidates, state).source is Source.EAGLE3:
        state.history.cycles.append(cycle(Source.EAGLE3, 4, 0, 1))
        declined_after += 1
        assert declined_after < 64
    assert declined_after > 2


def test_a_single_bad_step_mutes_nothing() -> None:
    policy = CostPolicy(CurveEstimator(0.9, 0.8), FLAT)
    state = context()
    state.history.outcomes.append(DraftOutcome(2, 0, predicted=1.7))
    assert policy.decide(cache_of(2), state).source is Source.SUFFIX


def test_many_disappointments_lower_the_expectation() -> None:
    """Halved at the most: a row of a third of a pass still pays, one of half a pass does not."""
    cheap, dear = RowCosts((1, 2), (10.0, 13.5)), RowCosts((1, 2), (10.0, 15.0))
    state = context()
    for _ in range(16):
        state.history.outcomes.append(DraftOutcome(4, 0, predicted=3.0))
    for costs, source in ((cheap, Source.SUFFIX), (dear, Source.NONE)):
        policy = CostPolicy(CurveEstimator(0.9), costs)
        assert policy.decide(cache_of(1), context()).source is Source.SUFFIX
        assert policy.decide(cache_of(1), state).source is source


def test_drift_is_followed_both_ways_and_never_on_a_single_step() -> None:
    """Hysteresis by memory: it takes several cycles to turn the cache off, and several back on."""
    costs = RowCosts((1, 2), (10.0, 13.5))
    policy, state = CostPolicy(CurveEstimator(0.6), costs), context()

    def cycles_until(source: Source, accepted_len: int) -> int:
        count = 0
        while policy.decide(cache_of(1), state).source is not source:
            state.history.outcomes.append(DraftOutcome(8, accepted_len, predicted=4.0))
            count += 1
            assert count <= 16, "the history holds no more"
        return count

    assert cycles_until(Source.NONE, accepted_len=0) >= 3
    assert cycles_until(Source.SUFFIX, accepted_len=4) >= 2


def test_the_correction_is_not_corrected_by_itself() -> None:
    """Outcomes are held against the predictor's word, so the reported payoff is that word."""
    policy, state = CostPolicy(CurveEstimator(0.9, 0.8), FLAT), context()
    for _ in range(16):
        state.history.outcomes.append(DraftOutcome(4, 0, predicted=3.0))
    assert policy.decide(cache_of(2), state).predicted_payoff == pytest.approx(1.7)


def test_the_greedy_rival_differs() -> None:
    """The best single cycle declines what dilutes it; the ratio of sums takes it."""
    costs = RowCosts((1, 2), (10.0, 15.0))
    policy = CostPolicy(CurveEstimator(0.45), costs, objective="cycle")
    assert policy.decide(cache_of(1), context()).source is Source.NONE
    assert (
        CostPolicy(CurveEstimator(0.55), costs, objective="cycle")
        .decide(cache_of(1), context())
        .source
        is Source.SUFFIX
    )


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=64),
    st.integers(0, 8),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=80),
)
def test_decisions_stay_in_bounds_and_repeat(
    chances: list[float], model_limit: int, cycles: list[tuple[int, int]]
) -> None:
    policy = CostPolicy(CurveEstimator(*np.cumprod(chances)), MODEL)
    state = context()
    for drafted, accepted in cycles:
        accepted = min(drafted, accepted)
        state.history.cycles.append(cycle(Source.SUFFIX, drafted, accepted, accepted + 1))
    draft = Draft(Source.SUFFIX, tuple(range(len(chances))))
    candidates = Candidates(draft, Source.EAGLE3, model_limit)
    decision = policy.decide(candidates, state)
    assert decision == policy.decide(candidates, state)
    limit = {Source.NONE: 0, Source.SUFFIX: len(draft), Source.EAGLE3: min(4, model_limit)}
    assert decision.length <= limit[decision.source]
    assert (decision.length > 0) == (decision.source is not Source.NONE)
