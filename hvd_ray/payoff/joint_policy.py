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

from hvd_ray.context import SOURCE_NUMBERS, DecodeContext
from hvd_ray.payoff.cost import CostTable
from hvd_ray.payoff.cost_policy import MODEL_ACCEPTANCE, PRIOR_CYCLES
from hvd_ray.payoff.policy import Candidates
from hvd_ray.types import Decision, Draft, Float32Array, Source

Float64Array = NDArray[np.float64]
_TOKENS_AHEAD = 256
_NOTHING: Float32Array = np.empty(0, dtype=np.float32)


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
class _Offers:
    """The requests' drafts as curves of worth, and what they did lately."""

    cache_BK: Float64Array
    """Chance that cache draft token k is accepted, corrected; 0 behind its end."""
    model_BK: Float64Array
    """The same for the model drafter's chain."""
    payoffs_B: Float64Array
    """The predictor's own word on the cache's draft, uncorrected; 0 without a draft."""
    entry_ms_B: Float64Array
    """This cycle's part of what the model drafter must do first for the request."""
    num_rows: int
    """The most rows that the drafts can bring to a pass."""
    cycles_BHX: Float64Array
    num_cycles_B: NDArray[np.int64]
    sums_BS: Float64Array
    """Of the cycles, see `history_kernel`."""


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
        from hvd_ray.payoff.history_kernel import MOST_DRAFTED

        most_rows = len(contexts_B) + int(offers.sums_BS[:, MOST_DRAFTED].sum())
        verify_ms = self.costs.verify_ms(max(offers.num_rows, most_rows))
        rate = self._rate(offers, verify_ms)
        plans = self._plans(offers, rate, verify_ms[: offers.num_rows + 1])
        best = max(plans, key=lambda plan: plan.value)
        return [
            _decision(source, length, candidates, payoff)
            for source, length, candidates, payoff in zip(
                best.sources_B,
                best.lengths_B,
                candidates_B,
                offers.payoffs_B.tolist(),
                strict=True,
            )
        ]

    def _offers(
        self, candidates_B: Sequence[Candidates], contexts_B: Sequence[DecodeContext]
    ) -> _Offers:
        from hvd_ray.payoff.history_kernel import NUM_SUMS, read_histories

        num_requests = len(candidates_B)
        curves_B = self._curves(candidates_B, contexts_B)
        sources_B = [SOURCE_NUMBERS[c.model_source or Source.NONE] for c in candidates_B]
        limits_B = [
            min(self.model_draft_tokens, c.model_limit) if c.model_source else 0
            for c in candidates_B
        ]
        lengths_B = [len(curve_K) for curve_K in curves_B]
        cache_BK = np.zeros((num_requests, max(*lengths_B, *limits_B)))
        for cache_K, curve_K in zip(cache_BK, curves_B, strict=True):
            cache_K[: len(curve_K)] = curve_K
        model_BK = np.zeros((num_requests, max(limits_B)))
        payoffs_B, sums_BS = np.empty(num_requests), np.zeros((num_requests, NUM_SUMS))
        cycles_BHX = _stacked([context.history.cycles.figures for context in contexts_B])
        read_histories(
            cycles_BHX,
            _stacked([context.history.outcomes.figures for context in contexts_B]),
            np.array(sources_B),
            np.array(limits_B),
            np.array(self.model_acceptance()),
            cache_BK,
            payoffs_B,
            model_BK,
            sums_BS,
        )
        num_cycles_B = np.array([len(context.history.cycles) for context in contexts_B])
        entry_ms_B = np.array([c.model_entry_ms for c in candidates_B])
        if entry_ms_B.any():
            entry_ms_B /= _num_model_cycles(contexts_B, num_cycles_B, sums_BS)
        num_rows = num_requests + sum(map(max, lengths_B, limits_B))
        return _Offers(
            cache_BK, model_BK, payoffs_B, entry_ms_B, num_rows, cycles_BHX, num_cycles_B, sums_BS
        )

    def _curves(
        self, candidates_B: Sequence[Candidates], contexts_B: Sequence[DecodeContext]
    ) -> list[Float32Array]:
        """What the estimator says of each request's cache draft; empty without one."""
        pairs = zip(candidates_B, contexts_B, strict=True)
        drafted = [(c.cache, context) for c, context in pairs if c.cache.token_ids]
        curves = iter(self.estimator.survival_all([d for d, _ in drafted], [c for _, c in drafted]))
        return [
            next(curves)[: len(c.cache)] if c.cache.token_ids else _NOTHING for c in candidates_B
        ]

    def _rate(self, offers: _Offers, verify_ms: Float64Array) -> float:
        """Tokens per millisecond being reached by these requests together.

        Each counts by its recent cycles and a few plain ones as the prior, each cycle beside the
        other requests' mean rows; the head's passes are shared, so the request that uses it most
        stands for them.
        """
        from hvd_ray.payoff.history_kernel import LONGEST_CHAIN, rate_of

        longest = int(offers.sums_BS[:, LONGEST_CHAIN].max())
        chain_ms = [0.0, *(self.costs.model_ms(length) for length in range(1, longest + 1))]
        rate: float = rate_of(
            offers.cycles_BHX, offers.num_cycles_B, offers.sums_BS, verify_ms, np.array(chain_ms)
        )
        return rate

    def _plans(self, offers: _Offers, rate: float, verify_ms: Float64Array) -> Iterator[_Plan]:
        """The best rows for each length of the model drafter's chain; 0: it does not run.

        Every request offers the source whose rows are worth more at about the price of a row. A
        chain that nobody prefers to the cache's draft is left out: it would cost and bring nothing.
        """
        num_requests, num_rows = len(offers.payoffs_B), len(verify_ms) - 1
        span = max(1, num_rows - num_requests)
        price = rate * float(verify_ms[num_rows] - verify_ms[num_requests]) / span
        paid_N = rate * verify_ms[num_requests:]
        yield _best_rows(offers.cache_BK, np.zeros(num_requests, dtype=bool), paid_N, 0.0)
        cache_worth_B = np.maximum(offers.cache_BK - price, 0.0).sum(axis=1)
        cache_worth_B += rate * offers.entry_ms_B
        model_worth_BK = np.maximum(offers.model_BK - price, 0.0).cumsum(axis=1)
        for num_chained in range(1, offers.model_BK.shape[1] + 1):
            is_model_B = model_worth_BK[:, num_chained - 1] > cache_worth_B
            if is_model_B.any():
                curves_BK = offers.cache_BK * ~is_model_B[:, None]
                curves_BK[is_model_B, :num_chained] = offers.model_BK[is_model_B, :num_chained]
                model_ms = self.costs.model_ms(num_chained) + offers.entry_ms_B[is_model_B].sum()
                yield _best_rows(curves_BK, is_model_B, paid_N, rate * float(model_ms))


def _best_rows(
    curves_BK: Float64Array, is_model_B: NDArray[np.bool_], paid_N: Float64Array, model_price: float
) -> _Plan:
    """The most valuable rows are admitted until the next ones cost more than they bring.

    Args:
        curves_BK: each request's rows by worth, never rising; 0: there is none.
        is_model_B: whether they are the model drafter's.
        paid_N: the price of a pass with so many rows beyond one a request.
        model_price: of the model drafter's chain.
    """
    if len(curves_BK) == 1:
        worth_N = curves_BK[0]
    else:
        owner_N = np.nonzero(curves_BK)[0]
        worth_N = curves_BK[curves_BK > 0]
        order_N = np.argsort(-worth_N, kind="stable")
        worth_N = worth_N[order_N]
    gain_N = np.zeros(len(worth_N) + 1)
    np.cumsum(worth_N, out=gain_N[1:])
    gain_N -= paid_N[: len(gain_N)]
    num_admitted = int(gain_N.argmax())
    lengths = [num_admitted]
    if len(curves_BK) > 1:
        admitted_N = owner_N[order_N[:num_admitted]]
        lengths = np.bincount(admitted_N, minlength=len(curves_BK)).tolist()
    sources = [Source.EAGLE3 if is_model else Source.SUFFIX for is_model in is_model_B.tolist()]
    return _Plan(float(gain_N[num_admitted]) - model_price, sources, lengths)


def _num_model_cycles(
    contexts_B: Sequence[DecodeContext], num_cycles_B: NDArray[np.int64], sums_BS: Float64Array
) -> Float64Array:
    """In how many of its cycles a request may yet want the model drafter: where the cache has
    nothing better, as often as lately. Nobody knows where an answer ends, so only so far ahead."""
    from hvd_ray.payoff.history_kernel import NUM_SUFFIX, SUM_EMITTED

    weight_B = PRIOR_CYCLES + num_cycles_B
    emitted_B = (PRIOR_CYCLES + sums_BS[:, SUM_EMITTED]) / weight_B
    share_B = 1.0 - (PRIOR_CYCLES / 2 + sums_BS[:, NUM_SUFFIX]) / weight_B
    left_B = [
        min(context.max_tokens - context.num_generated, _TOKENS_AHEAD) for context in contexts_B
    ]
    return np.maximum(1.0, share_B * left_B / emitted_B)


def _stacked(rows_B: list[Float64Array]) -> Float64Array:
    """The requests' figures as one array; `np.stack` takes twice as long."""
    return np.concatenate(rows_B).reshape(len(rows_B), *rows_B[0].shape)


def _decision(source: Source, length: int, candidates: Candidates, predicted: float) -> Decision:
    payoff = predicted if candidates.cache.token_ids else None
    if length == 0:
        return Decision(Source.NONE, 0, payoff, reason="no draft pays")
    if source == Source.EAGLE3:
        assert candidates.model_source is not None
        return Decision(candidates.model_source, length, payoff, reason=f"model pays to {length}")
    reason = f"cache pays to {length}"
    return Decision(candidates.cache.source, length, payoff, reason=reason)
