"""How often every short n-gram stands in a text that grows, and where it stood last.

Counts are exact up to hash collisions of 40 bits, so they are a function of the text alone and not
of the table's size or age. Shapes: S slots, T tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hvd_ray.types import Int32Array

MAX_ORDER = 8
"""Tokens of the longest n-gram that is counted."""
_FIRST_SLOTS = 1 << 11
_MAX_LOAD = 0.6
_CHUNK = 512
"""Tokens added between two looks at the load."""


class NgramTable:
    """The n-grams of 1 to `MAX_ORDER` tokens of one or several texts.

    Args:
        has_places: remember the last two places of every n-gram; for a single text.
    """

    def __init__(self, *, has_places: bool = False) -> None:
        self.slots_S: NDArray[np.uint64] = np.zeros(_FIRST_SLOTS, dtype=np.uint64)
        """40 bits of hash and 24 of count; 0: empty."""
        num_places = _FIRST_SLOTS if has_places else 0
        self.last_S: Int32Array = np.zeros(num_places, dtype=np.int32)
        """Position behind the last token of the n-gram's latest place."""
        self.before_S: Int32Array = np.zeros(num_places, dtype=np.int32)
        """The same of the place before that; 0: none."""
        self._num_used = 0

    def extend(self, token_ids_T: Int32Array, start: int) -> None:
        """Count the n-grams that end at `start` or behind it in a text, which holds all of it."""
        from hvd_ray.drafting.ngram_kernel import count_ngrams

        for first in range(start, len(token_ids_T), _CHUNK):
            end = min(first + _CHUNK, len(token_ids_T))
            self._make_room(MAX_ORDER * (end - first))
            self._num_used += count_ngrams(
                self.slots_S, self.last_S, self.before_S, token_ids_T, first, end
            )

    def longest_repeated(self, token_ids_T: Int32Array, num_counted: int) -> int:
        """Tokens of the longest n-gram at a text's end that was counted elsewhere, too.

        At most `MAX_ORDER`; never too few. The last `num_counted` tokens are counted here.
        """
        from hvd_ray.drafting.ngram_kernel import longest_repeated

        length: int = longest_repeated(self.slots_S, token_ids_T, num_counted)
        return length

    def remove(self, token_ids_T: Int32Array) -> None:
        """Take back a text that was counted whole."""
        from hvd_ray.drafting.ngram_kernel import discount_ngrams

        discount_ngrams(self.slots_S, token_ids_T)

    def _make_room(self, num_new: int) -> None:
        if self._num_used + num_new <= _MAX_LOAD * len(self.slots_S):
            return
        from hvd_ray.drafting.ngram_kernel import move_slots

        old = self.slots_S, self.last_S, self.before_S
        num_live = int(np.count_nonzero(self.slots_S & np.uint64(0xFFFFFF)))
        size = _FIRST_SLOTS
        while num_live + num_new > _MAX_LOAD / 2 * size:
            size *= 2
        num_places = size if len(self.last_S) else 0
        self.slots_S = np.zeros(size, dtype=np.uint64)
        self.last_S = np.zeros(num_places, dtype=np.int32)
        self.before_S = np.zeros(num_places, dtype=np.int32)
        move_slots(*old, self.slots_S, self.last_S, self.before_S)
        self._num_used = num_live
