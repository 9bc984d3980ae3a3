"""`hvd_cost`: source and length of the draft by what they bring and what they cost.

Throughput is a ratio of sums: tokens emitted over time spent. For such a ratio the best choice in
each cycle is the one that maximises `(1 + E[accepted]) - rate * cost`, with `rate` the throughput
being reached (the optimality condition of a renewal-reward process). Taking the best ratio of the
single cycle instead is greedy: it declines every draft that would dilute a good cycle.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from hvd_ray.context import SOURCE_NUMBERS, DecodeContext, DraftHistory, DraftOutcome, Recent
from hvd_ray.payoff.cost import CostTable
from hvd_ray.payoff.policy import Candidates
from hvd_ray.types import Decision, Draft, Float32Array, Source, Step

# Shapes: K draft length, R rows of a target pass.

_MAX_ROWS = 130
"""Twice the longest draft that is ever judged: a survival curve and a chain end at 64 tokens."""
PRIOR_CYCLES = 8
"""What the prior weighs: plain cycles in the rate, tries at each position of a chain."""
MODEL_ACCEPTANCE = (0.45, 0.4, 0.4, 0.35)
PRIOR_TOKENS = 12.0
"""Tokens foretold and accepted that the correction starts from."""
CORRECTION_BOUNDS = (0.5, 1.5)


@runtime_checkable
class SurvivalEstimator(Protocol):
    """Judges a non-empty cache draft token by token."""

    @property
    def has_survival(self) -> bool:
        """Whether its predictor gives a curve at all."""
        ...

    def survival(self, draft: Draft, context: DecodeContext) -> Float32Array:
        """P(at least k draft tokens are accepted), k = 1..K, never rising."""
        ...


@dataclass(frozen=True, slots=True)
class CostPolicy:
    """The most valuable of: no draft, the cache's draft cut to k, the model drafter's K tokens.

    A pure function of the candidates and the request's own history, so replay decides as live
    decoding does and one request's bad streak never mutes another.
    """

    estimator: SurvivalEstimator
    costs: CostTable
    model_draft_tokens: int = 4
    model_acceptance: tuple[float, ...] = MODEL_ACCEPTANCE
    """Prior of the model drafter: P(token k accepted | those before it were), by position; about
    what a modest head reaches, soon outweighed by the request's own cycles."""
    objective: Literal["rate", "cycle"] = "rate"
    """`cycle` is the greedy rival: the best tokens per millisecond of the single cycle."""
    _costs_R: dict[Source, np.ndarray] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        history = DraftHistory()  # compile now, not in use
        correction(history.outcomes)
        model_survival(history.cycles, Source.EAGLE3, 1)

    def decide(self, candidates: Candidates, context: DecodeContext) -> Decision:
        rate = self._rate(context.history.cycles)
        best = Decision(Source.NONE, 0, reason="no draft pays")
        best_value = self._value(1.0, self._cost(Source.NONE)[1], rate)
        payoff = None
        if candidates.cache.token_ids:
            predicted_K = self._predicted_of_cache(candidates.cache, context)
            payoff = float(predicted_K[-1])
            expected_K = predicted_K * correction(context.history.outcomes)
            length, value = self._best_length(candidates.cache.source, expected_K, rate)
            if value > best_value:
                best = Decision(candidates.cache.source, length, reason=f"cache pays to {length}")
                best_value = value
        if candidates.model_source is not None and candidates.model_limit > 0:
            expected_K = self._expected_of_model(candidates, context)
            length, value = self._best_length(candidates.model_source, expected_K, rate)
            if value > best_value:
                best = Decision(candidates.model_source, length, reason=f"model pays to {length}")
        return Decision(best.source, best.length, payoff, None, best.reason)

    def _best_length(
        self, source: Source, expected_K: np.ndarray, rate: float
    ) -> tuple[int, float]:
        """`(length, value)` of the most valuable cut of a draft."""
        cost_K = self._cost(source)[2 : 2 + len(expected_K)]
        value_K = self._value(1.0 + expected_K, cost_K, rate)
        best = int(np.argmax(value_K))
        return best + 1, float(value_K[best])

    def _value(self, emitted, cost_ms, rate: float):  # type: ignore[no-untyped-def]
        """What a cycle is worth, in tokens (`rate`) or in tokens per millisecond (`cycle`)."""
        return emitted - rate * cost_ms if self.objective == "rate" else emitted / cost_ms

    def _predicted_of_cache(self, draft: Draft, context: DecodeContext) -> np.ndarray:
        """The predictor's own expected accepted length of the draft cut at each k.

        This, uncorrected, is what outcomes are held against later: a correction measured on
        corrected predictions would undo half of itself.
        """
        predicted_K: np.ndarray = np.cumsum(self.estimator.survival(draft, context)[: len(draft)])
        return predicted_K

    def _expected_of_model(self, candidates: Candidates, context: DecodeContext) -> np.ndarray:
        limit = min(self.model_draft_tokens, candidates.model_limit)
        assert candidates.model_source is not None
        survival_K = model_survival(
            context.history.cycles, candidates.model_source, limit, self.model_acceptance
        )
        expected_K: np.ndarray = np.cumsum(survival_K)
        return expected_K

    def _rate(self, cycles: Iterable[Step]) -> float:
        """Tokens per millisecond over the recent cycles, with a few plain ones as the prior."""
        emitted = float(PRIOR_CYCLES)
        spent_ms = PRIOR_CYCLES * float(self._cost(Source.NONE)[1])
        for cycle in cycles:
            emitted += cycle.emitted
            spent_ms += float(self._cost(cycle.source)[cycle.drafted + 1])
        return emitted / spent_ms

    def _cost(self, source: Source) -> np.ndarray:
        """Milliseconds of a cycle by rows, index 0 unused; looked up once for each source."""
        cost_R = self._costs_R.get(source)
        if cost_R is None:
            times = [0.0] + [self.costs.cost_ms(source, rows) for rows in range(1, _MAX_ROWS)]
            cost_R = self._costs_R[source] = np.array(times)
        return cost_R


def model_survival(
    cycles: Recent[Step],
    source: Source,
    limit: int,
    acceptance: tuple[float, ...] = MODEL_ACCEPTANCE,
) -> np.ndarray:
    """P(at least k tokens of the model drafter are accepted), k = 1..limit.

    Args:
        cycles: recent cycles of the request.
        source: the model drafter; only the cycles that it drafted for count.
        limit: tokens of the draft.
        acceptance: the prior P(token k accepted | those before it were), by position.
    """
    from hvd_ray.payoff.history_kernel import write_survival

    survival_K = np.empty(limit)
    write_survival(cycles.figures, SOURCE_NUMBERS[source], np.array(acceptance), survival_K)
    return survival_K


def correction(outcomes: Recent[DraftOutcome]) -> float:
    """How much more or less than predicted recent drafts brought, shrunk and bounded.

    The prior's weight keeps a single bad step from muting the cache.
    """
    from hvd_ray.payoff.history_kernel import correct_by

    factor: float = correct_by(outcomes.figures)
    return factor
