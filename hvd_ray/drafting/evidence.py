"""What the text in the cache says of a draft, beside the suffix tree's own probabilities.

A tree that saw one continuation once gives it the same probability as one that saw it a hundred
times, and a long match hides what shorter ones would have said. Three things tell them apart: how
often the n-grams of context and draft were seen (in the request's own text and in its scope's
outputs), what an interpolation over all their orders makes of each draft token, and where they
were seen last. All of it depends on committed tokens alone.
"""

from __future__ import annotations

import numpy as np

from hvd_ray.drafting.ngram_table import NgramTable
from hvd_ray.types import Float32Array, Int32Array

NUM_AHEAD = 8
"""Draft tokens that are looked at."""
NUM_COMPARED = 16
"""Draft tokens that are compared with what stood at the match's last place."""

_TEXTS = ("all", "own", "scope")
"""The request's prompt and output, the outputs of its scope, and both together."""
_SEEN_ORDERS = (1, 2, 4, 8)
_SEEN_AHEAD = (0, 1, 6)
_NEW_ORDERS = (2, 3, 4)
_PLACES = (1, 3, 6)

SUPPORT_NAMES: tuple[str, ...] = (
    *(
        f"support_{text}_{figure}"
        for text in _TEXTS
        for figure in (
            *(f"prob_{k}" for k in (1, 2, 3, 4)),  # of the k-th draft token, interpolated
            *(f"run_{k}" for k in (2, 4, 6, 8)),  # of all of the first k
            "run_sum",  # expected accepted length among the first 8
            "low_prob",  # the least of the first 8
            "low_at",  # and where it stands
        )
    ),
    *(
        f"support_{text}_log_seen_{order}_{ahead}"  # n-grams ending `ahead` tokens into the draft
        for order in _SEEN_ORDERS
        for ahead in _SEEN_AHEAD
        for text in ("own", "scope")
    ),
    *(
        f"support_{text}_new_{order}_at"  # first draft token that ends an n-gram never seen
        for order in _NEW_ORDERS
        for text in ("own", "scope")
    ),
)
PLACE_NAMES: tuple[str, ...] = (
    "place_log_distance",  # back to where the last six tokens stood before
    "place_is_in_output",
    "place_agreement",  # draft tokens that stood there too
    "place_num_repeated",  # draft 3-grams that the output holds already
    "place_log_farthest",  # back to the oldest of the draft's 3-grams
    *(f"place_log_distance_{k}" for k in _PLACES),  # back to the 3-gram ending at draft token k
)
EVIDENCE_NAMES: tuple[str, ...] = (*SUPPORT_NAMES, *PLACE_NAMES)
NUM_EVIDENCE = len(EVIDENCE_NAMES)
NO_EVIDENCE: Float32Array = np.zeros(NUM_EVIDENCE, dtype=np.float32)
NO_EVIDENCE.flags.writeable = False


def evidence_of(
    draft_ids: tuple[int, ...],
    *,
    token_ids: Int32Array,
    prompt_len: int,
    own: NgramTable,
    scope: NgramTable,
) -> Float32Array:
    """The figures of `EVIDENCE_NAMES`, float32 [E].

    Args:
        draft_ids: what the cache drafts behind `token_ids`.
        token_ids: prompt and committed output.
        prompt_len: tokens of the prompt.
        own: counts `token_ids`, with places.
        scope: counts the outputs of the request's scope.
    """
    from hvd_ray.drafting.evidence_kernel import write_evidence

    out_E = np.zeros(NUM_EVIDENCE, dtype=np.float32)
    ahead_K = np.array(draft_ids[:NUM_COMPARED], dtype=np.int32)
    write_evidence(
        ahead_K, token_ids, prompt_len, own.slots_S, own.last_S, own.before_S, scope.slots_S, out_E
    )
    return out_E
