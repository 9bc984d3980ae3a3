"""Compiled arithmetic of the features; `features.py` says what each number means.

Import it lazily: it loads numba. Every function writes one group into `out_F`
from `at` on, in the order of `features.FEATURE_GROUPS`. Shapes: F features, K draft length,
H kept outcomes (newest first) and X their figures, T last committed tokens, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hvd_ray.compiled import compiled
from hvd_ray.payoff.features import HIGH_PAYOFF
from hvd_ray.payoff.token_classes import TokenClass

DECAY = 0.7
"""Weight of an outcome relative to the next newer one, in the moving averages."""
SURE_PROB = 0.9
MAX_DISTINCT = 64
"""Tokens looked at for repetition: the comparison is quadratic."""

EMPTY = int(TokenClass.EMPTY)
NEWLINE = int(TokenClass.NEWLINE)
PUNCTUATION = int(TokenClass.PUNCTUATION)
LISTED_CLASSES = np.array(
    [
        TokenClass.SPACE,
        TokenClass.NEWLINE,
        TokenClass.PUNCTUATION,
        TokenClass.OPENING,
        TokenClass.CLOSING,
        TokenClass.DIGIT,
        TokenClass.QUOTE,
        TokenClass.DELIMITER,
        TokenClass.WORD_START,
        TokenClass.LETTER,
    ],
    dtype=np.uint16,
)
TAIL_CLASSES = np.array(
    [TokenClass.NEWLINE, TokenClass.PUNCTUATION, TokenClass.DIGIT, TokenClass.LETTER],
    dtype=np.uint16,
)


@compiled
def write_features(
    draft_K: Any,
    draft_len: int,
    probs_K: Any,
    num_probs: int,
    score: float,
    match_len: int,
    is_local: bool,
    prompt_len: int,
    tail_T: Any,
    num_committed: int,
    outcomes_HX: Any,
    num_outcomes: int,
    num_since_mismatch: int,
    selection_rate: float,
    flags_V: Any,
    balance_V: Any,
    evidence_E: Any,
    out_F: Any,
) -> None:
    """All features of one draft at one position."""
    at = _cache_match(probs_K, num_probs, score, match_len, draft_len, is_local, out_F, 0)
    at = _decode_state(prompt_len, num_committed, out_F, at)
    at = _recent_history(outcomes_HX, num_outcomes, num_since_mismatch, selection_rate, out_F, at)
    at = _draft_tokens(draft_K, draft_len, flags_V, balance_V, out_F, at)
    at = _tail_tokens(tail_T, flags_V, balance_V, out_F, at)
    out_F[at : at + len(evidence_E)] = evidence_E


@compiled
def _cache_match(
    probs_K: Any,
    num_probs: int,
    score: float,
    match_len: int,
    draft_len: int,
    is_local: bool,
    out_F: Any,
    at: int,
) -> int:
    low, total, num_sure, num_likely = 0.0, 0.0, 0, 0
    if num_probs > 0:
        low = probs_K[0]
    for k in range(num_probs):
        prob = probs_K[k]
        low = min(low, prob)
        total += prob
        num_sure += num_sure == k and prob >= SURE_PROB
        num_likely += num_likely == k and prob >= 0.5
    out_F[at] = score
    out_F[at + 1] = match_len
    out_F[at + 2] = draft_len
    out_F[at + 3] = math.log1p(match_len)
    out_F[at + 4] = math.log1p(draft_len)
    out_F[at + 5] = is_local
    out_F[at + 6] = draft_len >= match_len
    out_F[at + 7] = probs_K[0] if num_probs else 0.0
    out_F[at + 8] = total / num_probs if num_probs else 0.0
    out_F[at + 9] = low
    out_F[at + 10] = probs_K[num_probs - 1] if num_probs else 0.0
    out_F[at + 11] = num_sure
    out_F[at + 12] = num_likely
    return at + 13


@compiled
def _decode_state(prompt_len: int, num_committed: int, out_F: Any, at: int) -> int:
    num_generated = num_committed - prompt_len
    out_F[at] = math.log1p(prompt_len)
    out_F[at + 1] = math.log1p(num_generated)
    out_F[at + 2] = num_generated / max(1, num_committed)
    return at + 3


@compiled
def _recent_history(
    outcomes_HX: Any,
    num_outcomes: int,
    num_since_mismatch: int,
    selection_rate: float,
    out_F: Any,
    at: int,
) -> int:
    accepted_H, drafted_H = outcomes_HX[:, 0], outcomes_HX[:, 1]
    for which in range(3):
        window = min(num_outcomes, 1 << which)
        accepted, drafted = 0.0, 0.0
        for i in range(window):
            accepted += accepted_H[i]
            drafted += drafted_H[i]
        out_F[at + which] = accepted / max(1, window)
        out_F[at + 3 + which] = accepted / max(1.0, drafted)
    weight, weights, mean, ratio, num_high, num_none = 1.0, 0.0, 0.0, 0.0, 0, 0
    for i in range(num_outcomes):
        mean += weight * accepted_H[i]
        ratio += weight * accepted_H[i] / max(1.0, drafted_H[i])
        weights += weight
        weight *= DECAY
        num_high += accepted_H[i] >= HIGH_PAYOFF
        num_none += accepted_H[i] == 0
    out_F[at + 6] = mean / max(1.0, weights)
    out_F[at + 7] = ratio / max(1.0, weights)
    out_F[at + 8] = num_high / max(1, num_outcomes)
    out_F[at + 9] = num_none / max(1, num_outcomes)
    out_F[at + 10] = num_outcomes
    out_F[at + 11] = num_outcomes > 0 and accepted_H[0] == drafted_H[0]
    out_F[at + 12] = math.log1p(num_since_mismatch)
    out_F[at + 13] = selection_rate
    return at + 14


@compiled
def _draft_tokens(
    draft_K: Any, draft_len: int, flags_V: Any, balance_V: Any, out_F: Any, at: int
) -> int:
    num_classes = len(LISTED_CLASSES)
    out_F[at : at + 2 * num_classes] = 0.0
    balance, lowest, newline_at, punctuation_at = 0, 0, draft_len, draft_len
    special_at = draft_len
    share = np.float32(1.0) / np.float32(max(1, draft_len))
    for k in range(draft_len):
        flags = _flags_of(draft_K[k], flags_V)
        for c in range(num_classes):
            if flags & LISTED_CLASSES[c]:
                out_F[at + c] += share
                if k == 0:
                    out_F[at + num_classes + c] = 1.0
        balance += _balance_of(draft_K[k], balance_V)
        lowest = min(lowest, balance)
        if flags & NEWLINE and newline_at == draft_len:
            newline_at = k
        if flags & PUNCTUATION and punctuation_at == draft_len:
            punctuation_at = k
        if flags & EMPTY and special_at == draft_len:
            special_at = k
    at += 2 * num_classes
    out_F[at] = balance
    out_F[at + 1] = lowest
    out_F[at + 2] = math.log1p(newline_at)
    out_F[at + 3] = math.log1p(punctuation_at)
    out_F[at + 4] = math.log1p(special_at)
    out_F[at + 5] = _distinct_share(draft_K[:draft_len])
    return at + 6


@compiled
def _tail_tokens(tail_T: Any, flags_V: Any, balance_V: Any, out_F: Any, at: int) -> int:
    num_classes, num_shares, num_tail = len(LISTED_CLASSES), len(TAIL_CLASSES), len(tail_T)
    out_F[at : at + num_classes + num_shares] = 0.0
    balance = 0
    share = np.float32(1.0) / np.float32(max(1, num_tail))
    for t in range(num_tail):
        flags = _flags_of(tail_T[t], flags_V)
        balance += _balance_of(tail_T[t], balance_V)
        for c in range(num_shares):
            if flags & TAIL_CLASSES[c]:
                out_F[at + num_classes + c] += share
        if t == num_tail - 1:
            for c in range(num_classes):
                if flags & LISTED_CLASSES[c]:
                    out_F[at + c] = 1.0
    at += num_classes + num_shares
    out_F[at] = balance
    out_F[at + 1] = _distinct_share(tail_T)
    return at + 2


@compiled
def _flags_of(token: int, flags_V: Any) -> int:
    return flags_V[token] if 0 <= token < len(flags_V) else EMPTY


@compiled
def _balance_of(token: int, balance_V: Any) -> int:
    return balance_V[token] if 0 <= token < len(balance_V) else 0


@compiled
def _distinct_share(tokens: Any) -> float:
    """Different tokens / tokens, over the first `MAX_DISTINCT`; 1 where there are none."""
    num_looked_at = min(len(tokens), MAX_DISTINCT)
    num_distinct = 0
    for i in range(num_looked_at):
        is_new = True
        for j in range(i):
            if tokens[j] == tokens[i]:
                is_new = False
                break
        num_distinct += is_new
    return num_distinct / num_looked_at if num_looked_at else 1.0
