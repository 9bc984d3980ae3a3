"""Compiled arithmetic of `NgramTable`. Import it lazily: it loads numba.

An open-addressing table: a slot holds 40 bits of the n-gram's hash and a count of 24 bits, and the
n-gram stands in the first free slot from where its hash points. Shapes: S slots, T tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_ray.compiled import compiled

MAX_ORDER = 8
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_COUNT_BITS = np.uint64(24)
_COUNT_MASK = np.uint64(0xFFFFFF)
_ONE = np.uint64(1)
_SEED = np.uint64(0x51ED2701)


@compiled
def mixed(state: Any, token: Any) -> Any:
    """The hash of an n-gram with one more token in front."""
    state = (state ^ np.uint64(token + 1)) * _MULTIPLIER
    return state ^ (state >> np.uint64(29))


@compiled
def tag_of(state: Any) -> Any:
    """The 40 bits that stand for an n-gram, never 0."""
    return (state >> _COUNT_BITS) | _ONE


@compiled
def slot_of(slots_S: Any, tag: Any) -> Any:
    """The n-gram's slot, or the empty one where it would stand."""
    mask = len(slots_S) - 1
    slot = np.int64(tag >> _ONE) & mask
    while slots_S[slot] != 0 and (slots_S[slot] >> _COUNT_BITS) != tag:
        slot = (slot + 1) & mask
    return slot


@compiled
def count_at(slots_S: Any, tag: Any) -> Any:
    """How often an n-gram was counted."""
    return np.int64(slots_S[slot_of(slots_S, tag)] & _COUNT_MASK)


@compiled
def longest_repeated(slots_S: Any, tokens_T: Any, num_counted: int) -> int:
    """`NgramTable.longest_repeated`."""
    state = _SEED
    for order in range(min(MAX_ORDER, len(tokens_T))):
        state = mixed(state, tokens_T[len(tokens_T) - 1 - order])
        if count_at(slots_S, tag_of(state)) <= (order < num_counted):
            return order
    return min(MAX_ORDER, len(tokens_T))


@compiled
def count_ngrams(
    slots_S: Any, last_S: Any, before_S: Any, tokens_T: Any, start: int, end: int
) -> int:
    """Count the n-grams that end at `start` .. `end - 1`; gives the slots newly used."""
    num_new = 0
    has_places = len(last_S) > 0
    for at in range(start, end):
        state = _SEED
        for order in range(min(MAX_ORDER, at + 1)):
            state = mixed(state, tokens_T[at - order])
            tag = tag_of(state)
            slot = slot_of(slots_S, tag)
            if slots_S[slot] == 0:
                slots_S[slot] = tag << _COUNT_BITS
                num_new += 1
            if (slots_S[slot] & _COUNT_MASK) < _COUNT_MASK:
                slots_S[slot] += _ONE
            if has_places:
                before_S[slot] = last_S[slot]
                last_S[slot] = at + 1
    return num_new


@compiled
def discount_ngrams(slots_S: Any, tokens_T: Any) -> None:
    """Undo `count_ngrams` of a whole text; emptied slots stay in the way of others."""
    for at in range(len(tokens_T)):
        state = _SEED
        for order in range(min(MAX_ORDER, at + 1)):
            state = mixed(state, tokens_T[at - order])
            slot = slot_of(slots_S, tag_of(state))
            if (slots_S[slot] & _COUNT_MASK) > 0:
                slots_S[slot] -= _ONE


@compiled
def move_slots(
    slots_S: Any, last_S: Any, before_S: Any, to_S: Any, to_last_S: Any, to_before_S: Any
) -> None:
    """Copy what is counted into a larger, empty table."""
    for slot in range(len(slots_S)):
        if (slots_S[slot] & _COUNT_MASK) > 0:
            to = slot_of(to_S, slots_S[slot] >> _COUNT_BITS)
            to_S[to] = slots_S[slot]
            if len(last_S) > 0:
                to_last_S[to] = last_S[slot]
                to_before_S[to] = before_S[slot]
