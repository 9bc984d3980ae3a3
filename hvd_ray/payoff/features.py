"""What is known of a cache draft before the target has seen it, as numbers for a predictor.

The paper's four groups (2606.01019: cache match, decode state, recent history, draft structure),
more of the same kind, and the cache's evidence (`drafting/evidence.py`). They depend on the
committed prefix, on how earlier drafts fared and on the draft itself, which is a function of that
prefix and the cache; so live decoding and labelling by replay compute the same values with the
same code. Shapes: F features.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from hvd_ray.context import DecodeContext, DraftHistory
from hvd_ray.drafting.evidence import NO_EVIDENCE, PLACE_NAMES, SUPPORT_NAMES
from hvd_ray.payoff.token_classes import TokenClasses
from hvd_ray.types import NO_DRAFT, Draft, Float32Array, TokenBuffer

FEATURE_VERSION = 2
"""Rises when a feature is added, dropped, moved or changes its meaning."""

HIGH_PAYOFF = 6
"""Accepted tokens from which a payoff counts as high (papers: 2606.01019)."""

TAIL_LENGTH = 16
"""Committed tokens before the draft whose classes are looked at."""

_CLASSES = (
    "space",
    "newline",
    "punctuation",
    "opening",
    "closing",
    "digit",
    "quote",
    "delimiter",
    "word_start",
    "letter",
)

FEATURE_GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "cache_match": (
            "cache_score",
            "cache_match_len",
            "cache_draft_len",
            "cache_log_match_len",
            "cache_log_draft_len",
            "cache_is_local",
            "cache_fills_match",  # as long as the match allows: not ended by a low probability
            "cache_first_prob",
            "cache_mean_prob",
            "cache_min_prob",
            "cache_last_prob",
            "cache_num_sure",  # leading tokens of probability >= 0.9
            "cache_num_likely",  # leading tokens of probability >= 0.5
        ),
        "decode_state": (
            "state_log_prompt_len",
            "state_log_generated_len",
            "state_relative_position",  # generated / all committed tokens
        ),
        "recent_history": (
            "recent_accepted_1",  # mean accepted length of the last 1, 2, 4 outcomes
            "recent_accepted_2",
            "recent_accepted_4",
            "recent_ratio_1",  # accepted / drafted tokens of the last 1, 2, 4 outcomes
            "recent_ratio_2",
            "recent_ratio_4",
            "recent_mean_accepted",  # exponentially weighted
            "recent_mean_ratio",
            "recent_high_rate",  # outcomes with a high payoff: what a perfect chooser selects
            "recent_none_rate",
            "recent_num_outcomes",
            "recent_is_exhausted",  # the last draft agreed as a whole
            "recent_log_since_mismatch",
            "recent_selection_rate",  # 1 in labels made by always verifying
        ),
        "draft_structure": (
            *(f"draft_{name}_share" for name in _CLASSES),
            *(f"draft_first_{name}" for name in _CLASSES),
            "draft_bracket_balance",
            "draft_bracket_low",
            "draft_log_newline_at",
            "draft_log_punctuation_at",
            "draft_log_special_at",  # first token without a text: the output's end, a role's mark
            "draft_distinct_share",
            *(f"last_{name}" for name in _CLASSES),
            *(f"tail_{name}_share" for name in ("newline", "punctuation", "digit", "letter")),
            "tail_bracket_balance",
            "tail_distinct_share",
        ),
        "support": SUPPORT_NAMES,
        "place": PLACE_NAMES,
    }
)
FEATURE_NAMES: tuple[str, ...] = tuple(name for group in FEATURE_GROUPS.values() for name in group)
NUM_FEATURES = len(FEATURE_NAMES)
DRAFT_LEN_INDEX = FEATURE_NAMES.index("cache_draft_len")
SCORE_INDEX = FEATURE_NAMES.index("cache_score")

NOTHING = "nothing"
"""In place of groups to leave out: every feature is used."""


def hidden_features(without: str) -> tuple[int, ...]:
    """Indices of the features in the groups joined by `+` in `without`; none for `nothing`.

    Raises:
        ValueError: an unknown group.
    """
    groups = () if without == NOTHING else tuple(without.split("+"))
    if unknown := sorted(set(groups) - set(FEATURE_GROUPS)):
        known = ", ".join(FEATURE_GROUPS)
        raise ValueError(f"{unknown[0]!r} is no feature group; there are {known}")
    names = {name for group in groups for name in FEATURE_GROUPS[group]}
    return tuple(i for i, name in enumerate(FEATURE_NAMES) if name in names)


class FeatureExtractor:
    """Turns a draft and its context into `FEATURE_NAMES`, one extractor for each thread.

    The buffers are reused between calls; the arithmetic is compiled (`feature_kernel`).
    """

    def __init__(self, token_classes: TokenClasses) -> None:
        from hvd_ray.payoff.feature_kernel import write_features

        self._kernel = write_features
        self._classes = token_classes
        self._flags_V = token_classes.flags_V
        self._balance_V = token_classes.balance_V
        self._draft_K = np.zeros(128, dtype=np.int32)
        self._probs_K = np.zeros(128, dtype=np.float64)
        self.extract(NO_DRAFT, DecodeContext(TokenBuffer(), 0, 0, 0))  # compile now, not in use

    def __reduce__(self) -> tuple[type[FeatureExtractor], tuple[TokenClasses]]:
        """Made anew where it arrives: compiled code stays with the process."""
        return FeatureExtractor, (self._classes,)

    def extract(self, draft: Draft, context: DecodeContext) -> Float32Array:
        """The features of `draft` at the context's position, float32 [F]."""
        out_F = np.empty(NUM_FEATURES, dtype=np.float32)
        self.write(draft, context, out_F)
        return out_F

    def write(self, draft: Draft, context: DecodeContext, out_F: Float32Array) -> None:
        """Write the features of `draft` into `out_F`, float32 [F], contiguous."""
        draft_len, num_probs = len(draft.token_ids), len(draft.probs)
        if max(draft_len, num_probs) > len(self._draft_K):
            self._grow(max(draft_len, num_probs))
        self._draft_K[:draft_len] = draft.token_ids
        self._probs_K[:num_probs] = draft.probs
        history = context.history
        self._kernel(
            self._draft_K,
            draft_len,
            self._probs_K,
            num_probs,
            float(draft.score),
            draft.match_len,
            draft.is_local,
            context.prompt_len,
            context.token_ids.tail(TAIL_LENGTH),
            len(context.token_ids),
            history.outcomes.figures,
            len(history.outcomes),
            history.num_since_mismatch,
            _selection_rate(history),
            self._flags_V,
            self._balance_V,
            NO_EVIDENCE if draft.evidence_E is None else draft.evidence_E,
            out_F,
        )

    def _grow(self, length: int) -> None:
        self._draft_K = np.zeros(2 * length, dtype=np.int32)
        self._probs_K = np.zeros(2 * length, dtype=np.float64)


def _selection_rate(history: DraftHistory) -> float:
    """Share of the recent cache drafts that the policy chose; 1 before the first."""
    selections = history.selections
    return sum(selections) / len(selections) if selections else 1.0
