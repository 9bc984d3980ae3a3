"""Compiled arithmetic of a draft's evidence; `evidence.py` says what each number means.

Import it lazily: it loads numba. Shapes: E figures, K draft tokens compared, T committed tokens,
S slots, A draft tokens looked at, N orders of n-grams.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hvd_ray.compiled import compiled
from hvd_ray.drafting.ngram_kernel import _SEED, MAX_ORDER, count_at, mixed, slot_of, tag_of

NUM_AHEAD = 8
UNSEEN_PROB = 1e-4
NEVER_LOG = 12.0
"""Stands for a place that there is not: beyond any distance."""
SEEN_ORDERS = np.array([1, 2, 4, 8])
SEEN_AHEAD = np.array([0, 1, 6])
NEW_ORDERS = np.array([2, 3, 4])
PLACE_ORDER = 3
CONTEXT_ORDER = 6


@compiled
def write_evidence(
    ahead_K: Any,
    tokens_T: Any,
    prompt_len: int,
    own_S: Any,
    last_S: Any,
    before_S: Any,
    scope_S: Any,
    out_E: Any,
) -> None:
    """All figures of one draft at one position."""
    size = min(len(ahead_K), NUM_AHEAD)
    text = _last_tokens(tokens_T, ahead_K, size)
    own_AN = np.zeros((NUM_AHEAD + 1, MAX_ORDER), dtype=np.float32)
    scope_AN = np.zeros((NUM_AHEAD + 1, MAX_ORDER), dtype=np.float32)
    last_AN = np.zeros((NUM_AHEAD + 1, MAX_ORDER), dtype=np.int32)
    before = 0
    num_behind = len(text) - size
    for a in range(size + 1):
        state = _SEED
        for order in range(min(MAX_ORDER, num_behind + a)):
            state = mixed(state, text[num_behind + a - 1 - order])
            tag = tag_of(state)
            slot = slot_of(own_S, tag)
            own_AN[a, order] = own_S[slot] & np.uint64(0xFFFFFF)
            if own_AN[a, order] > 0:
                last_AN[a, order] = last_S[slot]
                if a == 0 and order == CONTEXT_ORDER - 1:
                    before = before_S[slot]
            scope_AN[a, order] = count_at(scope_S, tag)
    at = _probs(own_AN, scope_AN, size, 1.0, 1.0, 1.0, out_E, 0)
    at = _probs(own_AN, scope_AN, size, 1.0, 0.0, 0.5, out_E, at)
    at = _probs(own_AN, scope_AN, size, 0.0, 1.0, 0.5, out_E, at)
    at = _seen(own_AN, scope_AN, out_E, at)
    at = _new(own_AN, scope_AN, size, out_E, at)
    _places(ahead_K, tokens_T, prompt_len, last_AN, before, size, out_E, at)


@compiled
def _last_tokens(tokens_T: Any, ahead_K: Any, size: int) -> Any:
    """The last `MAX_ORDER` committed tokens and the draft's first `size`."""
    behind = min(MAX_ORDER, len(tokens_T))
    text = np.empty(behind + size, dtype=np.int32)
    text[:behind] = tokens_T[len(tokens_T) - behind :]
    text[behind:] = ahead_K[:size]
    return text


@compiled
def _probs(
    own_AN: Any,
    scope_AN: Any,
    size: int,
    own_weight: float,
    scope_weight: float,
    discount: float,
    out_E: Any,
    at: int,
) -> int:
    """Each token's share after ever longer contexts, interpolated as in prediction by matching."""
    run, total, low, low_at = 1.0, 0.0, 2.0, 0
    for a in range(NUM_AHEAD):
        prob = 0.0
        if a < size:
            prob = UNSEEN_PROB
            for order in range(1, MAX_ORDER):
                context = own_weight * own_AN[a, order - 1] + scope_weight * scope_AN[a, order - 1]
                if a == 0:
                    context -= own_weight  # the place that is to be continued
                if context <= 0:
                    break
                hits = own_weight * own_AN[a + 1, order] + scope_weight * scope_AN[a + 1, order]
                prob = (min(hits, context) + discount * prob) / (context + discount)
            if prob < low:
                low, low_at = prob, a
        run *= prob
        total += run
        if a < 4:
            out_E[at + a] = prob
        if a % 2 == 1:
            out_E[at + 4 + a // 2] = run
    out_E[at + 8] = total
    out_E[at + 9] = min(low, 1.0)
    out_E[at + 10] = low_at
    return at + 11


@compiled
def _seen(own_AN: Any, scope_AN: Any, out_E: Any, at: int) -> int:
    for order in SEEN_ORDERS:
        for a in SEEN_AHEAD:
            out_E[at] = math.log1p(own_AN[a, order - 1])
            out_E[at + 1] = math.log1p(scope_AN[a, order - 1])
            at += 2
    return at


@compiled
def _new(own_AN: Any, scope_AN: Any, size: int, out_E: Any, at: int) -> int:
    for order in NEW_ORDERS:
        own_at, scope_at = size, size
        for a in range(size, 0, -1):
            if own_AN[a, order - 1] == 0:
                own_at = a - 1
            if scope_AN[a, order - 1] == 0:
                scope_at = a - 1
        out_E[at] = own_at
        out_E[at + 1] = scope_at
        at += 2
    return at


@compiled
def _places(
    ahead_K: Any,
    tokens_T: Any,
    prompt_len: int,
    last_AN: Any,
    before: int,
    size: int,
    out_E: Any,
    at: int,
) -> None:
    end = len(tokens_T)
    agreement = 0
    if before > 0:
        while (
            agreement < len(ahead_K)
            and before + agreement < end
            and tokens_T[before + agreement] == ahead_K[agreement]
        ):
            agreement += 1
    num_repeated, farthest = 0, 0
    for a in range(1, size + 1):
        place = last_AN[a, PLACE_ORDER - 1]
        num_repeated += place > prompt_len
        if place > 0:
            farthest = max(farthest, end - place)
    out_E[at] = math.log1p(end - before) if before > 0 else NEVER_LOG
    out_E[at + 1] = before > prompt_len
    out_E[at + 2] = agreement
    out_E[at + 3] = num_repeated
    out_E[at + 4] = math.log1p(farthest)
    for which in range(3):
        a = (1, 3, 6)[which]
        place = last_AN[a, PLACE_ORDER - 1] if a <= size else 0
        out_E[at + 5 + which] = math.log1p(end - place) if place > 0 else NEVER_LOG
