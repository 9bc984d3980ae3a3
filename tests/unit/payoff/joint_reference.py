"""`JointCostPolicy` in plain Python over the histories' own items; slow, and easily read."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_ray.context import DecodeContext
from hvd_ray.payoff.cost_policy import (
    CORRECTION_BOUNDS,
    MODEL_ACCEPTANCE,
    PRIOR_CYCLES,
    PRIOR_TOKENS,
)
from hvd_ray.payoff.joint_policy import BatchCosts
from hvd_ray.payoff.policy import Candidates
from hvd_ray.types import Source

Choice = tuple[Source, int]


def decide_plainly(
    candidates_B: Sequence[Candidates],
    contexts_B: Sequence[DecodeContext],
    curves_B: Sequence[Sequence[float]],
    costs: BatchCosts,
) -> list[Choice]:
    """Source and length for each request; `curves_B` are the predicted survivals."""
    cache_B = [
        [p * _correction(context) for p in curve]
        for curve, context in zip(curves_B, contexts_B, strict=True)
    ]
    model_B = [_model(*pair) for pair in zip(candidates_B, contexts_B, strict=True)]
    entry_B = [
        candidates.model_entry_ms / _cycles_left(context)
        for candidates, context in zip(candidates_B, contexts_B, strict=True)
    ]
    num = len(contexts_B)
    num_rows = num + sum(max(len(c), len(m)) for c, m in zip(cache_B, model_B, strict=True))
    paid = costs.verify_ms(4096).tolist()
    rate = _rate(contexts_B, costs, paid)
    price = rate * (paid[num_rows] - paid[num]) / max(1, num_rows - num)
    best_value, best = float("-inf"), [(Source.NONE, 0)] * num
    for length in range(max(map(len, model_B)) + 1):
        uses = [
            _worth(m[:length], price) - rate * e > _worth(c, price)
            for m, c, e in zip(model_B, cache_B, entry_B, strict=True)
        ]
        if length and not any(uses):
            continue
        rows = [m[:length] if u else c for u, m, c in zip(uses, model_B, cache_B, strict=True)]
        once = sum(e for e, u in zip(entry_B, uses, strict=True) if u)
        once += costs.model_ms(length) if length else 0.0
        value, lengths = _admit(rows, [rate * ms for ms in paid[num:]])
        if value - rate * once > best_value:
            best_value = value - rate * once
            best = [
                (Source.NONE if n == 0 else Source.EAGLE3 if u else Source.SUFFIX, n)
                for n, u in zip(lengths, uses, strict=True)
            ]
    return best


def _worth(curve: Sequence[float], price: float) -> float:
    return sum(max(p - price, 0.0) for p in curve)


def _admit(rows: Sequence[Sequence[float]], paid: Sequence[float]) -> tuple[float, list[int]]:
    ranked = sorted(
        ((p, owner) for owner, curve in enumerate(rows) for p in curve), key=lambda row: -row[0]
    )
    gains = [-paid[0]]
    for number, (p, _) in enumerate(ranked):
        gains.append(gains[-1] + p - paid[number + 1] + paid[number])
    most = max(gains)
    num_admitted = next(n for n, gain in enumerate(gains) if gain >= most - 1e-9)
    owners = [owner for _, owner in ranked[:num_admitted]]
    return gains[num_admitted], [owners.count(owner) for owner in range(len(rows))]


def _correction(context: DecodeContext) -> float:
    known = [o for o in context.history.outcomes if o.predicted is not None]
    actual = PRIOR_TOKENS + sum(o.accepted_len for o in known)
    predicted = PRIOR_TOKENS + sum(o.predicted or 0.0 for o in known)
    low, high = CORRECTION_BOUNDS
    return min(high, max(low, actual / predicted))


def _model(candidates: Candidates, context: DecodeContext) -> list[float]:
    survival, curve = 1.0, []
    limit = min(4, candidates.model_limit) if candidates.model_source else 0
    for k in range(limit):
        tried = [
            c
            for c in context.history.cycles
            if c.source == candidates.model_source and c.drafted > k and c.accepted >= k
        ]
        hits = sum(c.accepted > k for c in tried)
        survival *= (MODEL_ACCEPTANCE[k] * PRIOR_CYCLES + hits) / (PRIOR_CYCLES + len(tried))
        curve.append(survival)
    return curve


def _cycles_left(context: DecodeContext) -> float:
    cycles = list(context.history.cycles)
    weight = PRIOR_CYCLES + len(cycles)
    emitted = (PRIOR_CYCLES + sum(c.emitted for c in cycles)) / weight
    from_cache = sum(c.source is Source.SUFFIX for c in cycles)
    share = 1.0 - (PRIOR_CYCLES / 2 + from_cache) / weight
    return max(1.0, share * min(context.max_tokens - context.num_generated, 256) / emitted)


def _rate(contexts: Sequence[DecodeContext], costs: BatchCosts, paid: Sequence[float]) -> float:
    cycles_B = [list(context.history.cycles) for context in contexts]
    weights = [PRIOR_CYCLES + len(cycles) for cycles in cycles_B]
    extra = [sum(c.drafted for c in cs) / w for cs, w in zip(cycles_B, weights, strict=True)]
    emitted = spent = chains = 0.0
    for cycles, weight, own in zip(cycles_B, weights, extra, strict=True):
        plain = len(contexts) + sum(extra) - own
        times = [_at(paid, plain)] * PRIOR_CYCLES + [_at(paid, plain + c.drafted) for c in cycles]
        emitted += (PRIOR_CYCLES + sum(c.emitted for c in cycles)) / weight
        spent += sum(times) / weight
        head = [costs.model_ms(c.drafted) for c in cycles if c.source is Source.EAGLE3]
        chains = max(chains, sum(head) / weight)
    return emitted / (spent / len(contexts) + chains)


def _at(paid: Sequence[float], rows: float) -> float:
    low = int(rows)
    return paid[low] + (rows - low) * (paid[low + 1] - paid[low])
