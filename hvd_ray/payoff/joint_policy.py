"""`hvd_cost` for a batch: rows of all requests compete, and the model drafter's pass is shared.

A row is worth the chance that it is reached and accepted, and costs what the target's pass grows
by. The most valuable rows are admitted until the next one would cost more than it brings at the
throughput being reached; for one request this is the rule of `cost_policy`. Running the model
drafter costs the batch once, however many want it, so every length of its chain is tried with its
price. Shapes: B requests, K draft length, N rows in all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
_TOKENS_AHEAD = 256
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
    entry_ms: float = 0.0
    """This cycle's part of what the model drafter must do first for the request."""


@dataclass(frozen=True, slots=True)
class _Plan:
    value: float
    sources_B: list[Source]
    lengths_B: list[int]


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
        verify_ms = self.costs.verify_ms(max(rows, _most_rows(contexts_B)))
        rate = self._rate(contexts_B, verify_ms)
        verify_ms = verify_ms[: rows + 1]
        plans = self._plans(offers, rate, verify_ms)
        best = max(plans, key=lambda plan: plan.value)
        return [
            _decision(source, length, candidates, offer)
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
        model_K = model_survival(cycles, limit, acceptance)
        entry_ms = candidates.model_entry_ms
        if entry_ms:
            entry_ms /= _num_model_cycles(context)
        return _Offer(cache_K, model_K, payoff, entry_ms)

    def _rate(self, contexts_B: Sequence[DecodeContext], verify_ms: Float64Array) -> float:
        """Tokens per millisecond being reached by these requests together.

        Each counts by its recent cycles and a few plain ones as the prior, each cycle beside the
        other requests' mean rows; the head's passes are shared, so the request that uses it most
        stands for them.
        """
        emitted = model_ms = 0.0
        rows_B = [_mean_rows(context) for context in contexts_B]
        all_rows, chain_ms = sum(rows_B), self._chain_prices(contexts_B)
        rows_N: list[float] = []
        weights_N: list[float] = []
        for context, own_rows in zip(contexts_B, rows_B, strict=True):
            cycles = context.history.cycles
            share = 1.0 / (PRIOR_CYCLES + len(cycles))
            emitted += (PRIOR_CYCLES + sum([cycle.emitted for cycle in cycles])) * share
            chains = [cycle.drafted for cycle in cycles if cycle.source is Source.EAGLE3]
            model_ms = max(model_ms, sum([chain_ms[length] for length in chains]) * share)
            plain = 1 + all_rows - own_rows
            rows_N.append(plain)
            rows_N += [plain + cycle.drafted for cycle in cycles]
            weights_N.append(PRIOR_CYCLES * share)
            weights_N += [share] * len(cycles)
        times_N = np.interp(rows_N, np.arange(len(verify_ms)), verify_ms)
        spent_ms = float(np.dot(times_N, weights_N)) / len(rows_B)
        return emitted / (spent_ms + model_ms)

    def _chain_prices(self, contexts_B: Sequence[DecodeContext]) -> list[float]:
        """What a chain of so many tokens costs, from 0 to the longest that was verified lately."""
        most = max([c.drafted for ctx in contexts_B for c in ctx.history.cycles], default=0)
        return [0.0, *(self.costs.model_ms(length) for length in range(1, most + 1))]

    def _plans(
        self, offers: Sequence[_Offer], rate: float, verify_ms: Float64Array
    ) -> Iterator[_Plan]:
        """The best rows for each length of the model drafter's chain; 0: it does not run.

        Every request offers the source whose rows are worth more at about the price of a row. A
        chain that nobody prefers to the cache's draft is left out: it would cost and bring nothing.
        """
        num_requests, num_rows = len(offers), len(verify_ms) - 1
        span = max(1, num_rows - num_requests)
        price = rate * float(verify_ms[num_rows] - verify_ms[num_requests]) / span
        paid_N = rate * verify_ms[num_requests:]
        cache_worth_B = [float(np.maximum(o.cache_K - price, 0.0).sum()) for o in offers]
        model_worth_BK = [np.maximum(o.model_K - price, 0.0).cumsum().tolist() for o in offers]
        yield _best_rows([offer.cache_K for offer in offers], [False] * num_requests, paid_N, 0.0)
        for num_chained in range(1, max(len(offer.model_K) for offer in offers) + 1):
            chains = [offer.model_K[:num_chained] for offer in offers]
            worth_B = [(worth_K[:num_chained] or [0.0])[-1] for worth_K in model_worth_BK]
            is_model_B = [
                m - rate * o.entry_ms > c
                for m, c, o in zip(worth_B, cache_worth_B, offers, strict=True)
            ]
            if any(is_model_B):
                picked = list(zip(is_model_B, chains, offers, strict=True))
                curves = [chain if is_model else o.cache_K for is_model, chain, o in picked]
                model_ms = self.costs.model_ms(num_chained)
                model_ms += sum([o.entry_ms for is_model, _, o in picked if is_model])
                model_price = rate * model_ms
                yield _best_rows(curves, is_model_B, paid_N, model_price)


def _best_rows(
    curves_B: Sequence[Float64Array],
    is_model_B: Sequence[bool],
    paid_N: Float64Array,
    model_price: float,
) -> _Plan:
    """The most valuable rows are admitted until the next ones cost more than they bring.

    Args:
        curves_B: each request's rows by worth, never rising.
        is_model_B: whether they are the model drafter's.
        paid_N: the price of a pass with so many rows beyond one a request.
        model_price: of the model drafter's chain.
    """
    if len(curves_B) == 1:
        gain_N = np.empty(len(curves_B[0]) + 1)
        gain_N[0] = 0.0
        np.cumsum(curves_B[0], out=gain_N[1:])
        gain_N -= paid_N[: len(gain_N)]
        num_admitted = int(gain_N.argmax())
        lengths = [num_admitted]
    else:
        worth_N = np.concatenate(curves_B)
        owner_N = np.repeat(np.arange(len(curves_B)), [len(curve) for curve in curves_B])
        order_N = np.argsort(-worth_N, kind="stable")
        gain_N = np.concatenate(([0.0], np.cumsum(worth_N[order_N])))
        gain_N -= paid_N[: len(gain_N)]
        num_admitted = int(gain_N.argmax())
        lengths = np.bincount(owner_N[order_N[:num_admitted]], minlength=len(curves_B)).tolist()
    sources = [Source.EAGLE3 if is_model else Source.SUFFIX for is_model in is_model_B]
    return _Plan(float(gain_N[num_admitted]) - model_price, sources, lengths)


def _num_model_cycles(context: DecodeContext) -> float:
    """In how many of its cycles a request may yet want the model drafter: where the cache has
    nothing better, as often as lately. Nobody knows where an answer ends, so only so far ahead."""
    cycles = context.history.cycles
    weight = PRIOR_CYCLES + len(cycles)
    emitted = (PRIOR_CYCLES + sum([cycle.emitted for cycle in cycles])) / weight
    from_cache = sum([cycle.source is Source.SUFFIX for cycle in cycles])
    share = 1.0 - (PRIOR_CYCLES / 2 + from_cache) / weight
    left = min(context.max_tokens - context.num_generated, _TOKENS_AHEAD)
    return max(1.0, share * left / emitted)


def _mean_rows(context: DecodeContext) -> float:
    """Rows that a request brings to a pass, by its recent cycles and the plain ones before."""
    cycles = context.history.cycles
    return 1 + sum([cycle.drafted for cycle in cycles]) / (PRIOR_CYCLES + len(cycles))


def _most_rows(contexts_B: Sequence[DecodeContext]) -> int:
    """The most rows that a pass of these requests may have had lately."""
    drafted = (max([c.drafted for c in ctx.history.cycles], default=0) for ctx in contexts_B)
    return len(contexts_B) + sum(drafted)


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
