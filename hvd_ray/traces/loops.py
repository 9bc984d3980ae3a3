"""Degenerate loops: a small model under greedy decoding ends up saying the same thing for ever.

A cache drafts a loop perfectly, so figures that hold loops praise the drafter for the target's
failure. Reports count such outputs and show results with and without them; a trace can be cut
where its loop begins.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LOOP_STRETCH = 20
"""Tokens that have to come again for an output to count as a loop."""
LOOP_TIMES = 4
"""How often they have to occur."""

TokenIds = Sequence[int] | NDArray[np.int32]


def is_degenerate_loop(
    token_ids: TokenIds, *, stretch: int = LOOP_STRETCH, times: int = LOOP_TIMES
) -> bool:
    """Whether the same `stretch` tokens occur at `times` or more places of an output.

    Places may overlap: a loop of period p is seen after `stretch + (times - 1) * p` tokens. They
    need not follow each other either: a long table of equal rows counts as well.
    """
    return loop_start(token_ids, stretch=stretch, times=times) is not None


def loop_start(
    token_ids: TokenIds, *, stretch: int = LOOP_STRETCH, times: int = LOOP_TIMES
) -> int | None:
    """Where an output's loop begins, as a position in tokens, or None where it holds no loop.

    The position is the earliest at which a stretch that occurs `times` or more often occurs for
    the second time: `token_ids[:position]` holds the first round and nothing of the second. Time
    is linear in the number of tokens (one look-up in a hash table for each).
    """
    assert stretch >= 1, "a stretch has at least one token"
    assert times >= 2, "what occurs once is no loop"
    width = np.dtype(np.int64).itemsize
    data = np.asarray(token_ids, dtype=np.int64).tobytes()
    counts: Counter[bytes] = Counter()
    second_places: dict[bytes, int] = {}
    for place in range(len(token_ids) - stretch + 1):
        # Bytes hash and compare in C; two stretches are equal exactly if their bytes are.
        key = data[place * width : (place + stretch) * width]
        counts[key] += 1
        if counts[key] == 2:
            second_places[key] = place
    loops = (place for key, place in second_places.items() if counts[key] >= times)
    return min(loops, default=None)
