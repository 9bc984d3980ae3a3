"""`hvd_cost` for a batch: rows of all requests compete, and the model drafter's pass is shared.

A row is worth the chance that it is reached and accepted, and costs what the target's pass grows
by. The most valuable rows are admitted until the next one would cost more than it brings at the
throughput being reached; for one request this is the rule of `cost_policy`. Running the model
drafter costs the batch once, however many want it, so every length of its chain is tried with its
price. Shapes: B requests, K draft length, N rows in all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hvd_ray.context import DecodeContext
from hvd_ray.payoff.cost import CostTable
from hvd_ray.payoff.cost_policy import MODEL_ACCEPTANCE, PRIOR_CYCLES, correction, model_survival
from hvd_ray.payoff.policy import Candidates
from hvd_ray.types import Decision, Draft, Float32Array, Source

Float64Array = NDArray[np.float64]
_NOTHING: Float64Array = np.empty(0)


class BatchSurvivalEstimator(Protocol):
    """Judges the cache drafts of a batch, token by token."""

    def survival_all(
        self, drafts_B: Sequence[Draft], contexts_B: Sequence[DecodeContext]
    ) -> list[Float32Array]:
        """For each non-empty draft P(at least k tokens are accepted), k = 1..K, never rising."""
        ...


class BatchCosts(Protocol):
    """What a step of the whole batch costs."""

    def verify_ms(self, num_rows: int) -> Float64Array:
        """Milliseconds of a target pass over 0..num_rows rows, [num_rows + 1], never falling."""
        ...

    def model_ms(self, num_tokens: int) -> float:
        """What a chain of `num_tokens` >= 1 from the model drafter adds, for any batch."""
        ...


@dataclass(frozen=True, slots=True)
class TableCosts:
    """A table measured for one request, read for a batch: a pass costs by its rows."""

    table: CostTable

    def verify_ms(self, num_rows: int) -> Float64Array:
        times = [self.table.cost_ms(Source.NONE, max(1, rows)) for rows in range(num_rows + 1)]
        return np.array(times)

    def model_ms(self, num_tokens: int) -> float:
        rows = num_tokens + 1
        return self.table.cost_ms(Source.EAGLE3, rows) - self.table.cost_ms(Source.NONE, rows)


@dataclass(frozen=True, slots=True)
class _Offer:
    """One request's drafts as curves of worth."""

    cache_K: Float64Array
    """Chance that cache draft token k is accepted, corrected; empty without a draft."""
    model_K: Float64Array
    """The same for the model drafter's chain."""
    payoff: float | None
    """The predictor's own word on the cache's draft, uncorrected."""


@dataclass(frozen=True, slots=True)
class _Plan:
    value: float
    sources_B: list[Source]
    lengths_B: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class JointCostPolicy:
    """The most valuable set of rows over all requests, each from the better of its sources."""

    estimator: BatchSurvivalEstimator
    costs: BatchCosts
    model_draft_tokens: int = 4
    model_acceptance: Callable[[], tuple[float, ...]] = lambda: MODEL_ACCEPTANCE
    """What is expected of the model drafter for a request that has not used it much, by position:
    P(token k accepted | those before it were)."""

    def decide_all(
        self, candidates_B: Sequence[Candidates], contexts_B: Sequence[DecodeContext]
    ) -> list[Decision]:
        if not candidates_B:
            return []
        offers = self._offers(candidates_B, contexts_B)
        rows = len(offers) + sum(max(len(o.cache_K), len(o.model_K)) for o in offers)
        verify_ms = self.costs.verify_ms(rows)
        rate = self._rate(contexts_B, verify_ms)
        chain = max(len(offer.model_K) for offer in offers)
        plans = [self._plan(offers, n, rate, verify_ms) for n in range(chain + 1)]
        best = max(plans, key=lambda plan: plan.value)
        return [
            _decision(source, int(length), candidates, offer)
            for source, length, candidates, offer in zip(
                best.sources_B, best.lengths_B, candidates_B, offers, strict=True
            )
        ]

    def _offers(
        self, candidates_B: Sequence[Candidates], contexts_B: Sequence[DecodeContext]
    ) -> list[_Offer]:
        pairs = list(zip(candidates_B, contexts_B, strict=True))
        drafted = [(c.cache, context) for c, context in pairs if c.cache.token_ids]
        curves = iter(self.estimator.survival_all([d for d, _ in drafted], [c for _, c in drafted]))
        acceptance = self.model_acceptance()
        return [
            self._offer(c, context, next(curves) if c.cache.token_ids else None, acceptance)
            for c, context in pairs
        ]

    def _offer(
        self,
        candidates: Candidates,
        context: DecodeContext,
        curve_K: Float32Array | None,
        acceptance: tuple[float, ...],
    ) -> _Offer:
        cache_K, payoff = _NOTHING, None
        if curve_K is not None:
            survival_K = curve_K[: len(candidates.cache)].astype(np.float64)
            payoff = float(survival_K.sum())
            cache_K = survival_K * correction(context.history.outcomes)
        limit = min(self.model_draft_tokens, candidates.model_limit)
        if candidates.model_source is None or limit <= 0:
            return _Offer(cache_K, _NOTHING, payoff)
        cycles = [c for c in context.history.cycles if c.source == candidates.model_source]
        return _Offer(cache_K, model_survival(cycles, limit, acceptance), payoff)

    def _rate(self, contexts_B: Sequence[DecodeContext], verify_ms: Float64Array) -> float:
        """Tokens per millisecond being reached by these requests together.

        Each counts by its recent cycles and a few plain ones as the prior; the head's passes are
        shared, so the request that uses it most stands for them.
        """
        emitted = rows = uses = 0.0
        for context in contexts_B:
            cycles = context.history.cycles
            weight = PRIOR_CYCLES + len(cycles)
            emitted += (PRIOR_CYCLES + sum(c.emitted for c in cycles)) / weight
            rows += 1 + sum(c.drafted for c in cycles) / weight
            uses = max(uses, sum(c.source == Source.EAGLE3 for c in cycles) / weight)
        known = np.arange(len(verify_ms))
        spent_ms = float(np.interp(rows, known, verify_ms))
        if uses:
            spent_ms += uses * self.costs.model_ms(self.model_draft_tokens)
        return emitted / spent_ms

    def _plan(
        self, offers: Sequence[_Offer], num_chained: int, rate: float, verify_ms: Float64Array
    ) -> _Plan:
        """The best rows where the model drafter makes `num_chained` tokens; 0: it does not run."""
        num_requests, num_rows = len(offers), len(verify_ms) - 1
        span = max(1, num_rows - num_requests)
        price = rate * float(verify_ms[num_rows] - verify_ms[num_requests]) / span
        sources, curves = [], []
        for offer in offers:
            source, curve_K = _better(offer, num_chained, price)
            sources.append(source)
            curves.append(curve_K)
        worth_N = np.concatenate(curves)
        owner_N = np.repeat(np.arange(num_requests), [len(curve) for curve in curves])
        order_N = np.argsort(-worth_N, kind="stable")
        gain_N = np.concatenate(([0.0], np.cumsum(worth_N[order_N])))
        gain_N -= rate * verify_ms[num_requests : num_requests + len(gain_N)]
        num_admitted = int(np.argmax(gain_N))
        lengths_B = np.bincount(owner_N[order_N[:num_admitted]], minlength=num_requests)
        value = float(gain_N[num_admitted])
        if num_chained:
            value -= rate * self.costs.model_ms(num_chained)
        return _Plan(value, sources, lengths_B)


def _better(offer: _Offer, num_chained: int, price: float) -> tuple[Source, Float64Array]:
    """The source whose rows are worth more at about this price a row, and their worth."""
    model_K = offer.model_K[:num_chained]
    cache_worth = np.maximum(offer.cache_K - price, 0.0).sum()
    model_worth = np.maximum(model_K - price, 0.0).sum()
    if len(model_K) and model_worth > cache_worth:
        return Source.EAGLE3, model_K
    return Source.SUFFIX, offer.cache_K


def _decision(source: Source, length: int, candidates: Candidates, offer: _Offer) -> Decision:
    if length == 0:
        return Decision(Source.NONE, 0, offer.payoff, reason="no draft pays")
    if source == Source.EAGLE3:
        assert candidates.model_source is not None
        return Decision(
            candidates.model_source, length, offer.payoff, reason=f"model pays to {length}"
        )
    reason = f"cache pays to {length}"
    return Decision(candidates.cache.source, length, offer.payoff, reason=reason)
