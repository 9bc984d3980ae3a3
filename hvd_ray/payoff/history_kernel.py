"""Compiled arithmetic over what the requests of a batch did lately (`context.Recent`).

Import it lazily: it loads numba. All sums run from the oldest item to the newest. Shapes: B
requests, H kept items (newest first) and X their figures, K draft length, N rows of a pass,
S sums.
"""

from __future__ import annotations

from typing import Any

from hvd_ray.compiled import compiled
from hvd_ray.context import SOURCE_NUMBERS
from hvd_ray.payoff.cost_policy import CORRECTION_BOUNDS, PRIOR_CYCLES, PRIOR_TOKENS
from hvd_ray.types import Source

SOURCE, DRAFTED, ACCEPTED, EMITTED = range(4)
"""A cycle's figures."""
SUM_DRAFTED, SUM_EMITTED, NUM_SUFFIX, MOST_DRAFTED, LONGEST_CHAIN = range(5)
"""What `read_histories` leaves of a request's cycles."""
NUM_SUMS = 5
SUFFIX, EAGLE3 = SOURCE_NUMBERS[Source.SUFFIX], SOURCE_NUMBERS[Source.EAGLE3]
LOWEST, HIGHEST = CORRECTION_BOUNDS


@compiled
def read_histories(
    cycles_BHX: Any,
    outcomes_BHX: Any,
    sources_B: Any,
    limits_B: Any,
    acceptance_K: Any,
    cache_BK: Any,
    payoffs_B: Any,
    model_BK: Any,
    sums_BS: Any,
) -> None:
    """Fill `payoffs_B`, `model_BK` and `sums_BS`, and correct the predicted `cache_BK`."""
    for b in range(len(cycles_BHX)):
        payoff, factor = 0.0, correct_by(outcomes_BHX[b])
        for k in range(cache_BK.shape[1]):
            payoff += cache_BK[b, k]
            cache_BK[b, k] *= factor
        payoffs_B[b] = payoff
        write_survival(cycles_BHX[b], sources_B[b], acceptance_K, model_BK[b, : limits_B[b]])
        _sum_cycles(cycles_BHX[b], sums_BS[b])


@compiled
def correct_by(outcomes_HX: Any) -> float:
    """`cost_policy.correction`."""
    actual, predicted = PRIOR_TOKENS, PRIOR_TOKENS
    for h in range(len(outcomes_HX) - 1, -1, -1):
        if outcomes_HX[h, 2]:
            actual += outcomes_HX[h, 0]
            predicted += outcomes_HX[h, 3]
    return min(HIGHEST, max(LOWEST, actual / predicted))


@compiled
def write_survival(cycles_HX: Any, source: int, acceptance_K: Any, survival_K: Any) -> None:
    """`cost_policy.model_survival` of one request into `survival_K`."""
    survival = 1.0
    for k in range(len(survival_K)):
        num_tried, num_hits = 0, 0
        for h in range(len(cycles_HX)):
            if cycles_HX[h, SOURCE] == source and cycles_HX[h, DRAFTED] > k:
                num_tried += cycles_HX[h, ACCEPTED] >= k
                num_hits += cycles_HX[h, ACCEPTED] > k
        prior = acceptance_K[min(k, len(acceptance_K) - 1)] * PRIOR_CYCLES
        survival *= (prior + num_hits) / (PRIOR_CYCLES + num_tried)
        survival_K[k] = survival


@compiled
def _sum_cycles(cycles_HX: Any, sums_S: Any) -> None:
    for h in range(len(cycles_HX)):
        drafted, source = cycles_HX[h, DRAFTED], cycles_HX[h, SOURCE]
        sums_S[SUM_DRAFTED] += drafted
        sums_S[SUM_EMITTED] += cycles_HX[h, EMITTED]
        sums_S[NUM_SUFFIX] += source == SUFFIX
        sums_S[MOST_DRAFTED] = max(sums_S[MOST_DRAFTED], drafted)
        if source == EAGLE3:
            sums_S[LONGEST_CHAIN] = max(sums_S[LONGEST_CHAIN], drafted)


@compiled
def rate_of(
    cycles_BHX: Any, num_cycles_B: Any, sums_BS: Any, verify_ms_N: Any, chain_ms_K: Any
) -> float:
    """`JointCostPolicy._rate`: tokens per millisecond of the requests together."""
    num_requests = len(cycles_BHX)
    all_rows = 0.0
    for b in range(num_requests):
        all_rows += 1 + sums_BS[b, SUM_DRAFTED] / (PRIOR_CYCLES + num_cycles_B[b])
    emitted, spent_ms, model_ms = 0.0, 0.0, 0.0
    for b in range(num_requests):
        weight = PRIOR_CYCLES + num_cycles_B[b]
        plain = all_rows - sums_BS[b, SUM_DRAFTED] / weight
        verify_ms, chain_ms = PRIOR_CYCLES * _at(verify_ms_N, plain), 0.0
        for h in range(num_cycles_B[b] - 1, -1, -1):
            drafted = cycles_BHX[b, h, DRAFTED]
            verify_ms += _at(verify_ms_N, plain + drafted)
            if cycles_BHX[b, h, SOURCE] == EAGLE3:
                chain_ms += chain_ms_K[int(drafted)]
        emitted += (PRIOR_CYCLES + sums_BS[b, SUM_EMITTED]) / weight
        spent_ms += verify_ms / weight
        model_ms = max(model_ms, chain_ms / weight)
    return emitted / (spent_ms / num_requests + model_ms)


@compiled
def _at(values_N: Any, x: float) -> Any:
    """Linear between the entries."""
    low = min(int(x), len(values_N) - 2)
    return values_N[low] + (x - low) * (values_N[low + 1] - values_N[low])
