"""The features once more, slowly and in plain Python, to compare the compiled ones with."""

import math

import numpy as np

from hvd_ray.context import DecodeContext
from hvd_ray.drafting.evidence import EVIDENCE_NAMES, NO_EVIDENCE
from hvd_ray.payoff.features import HIGH_PAYOFF, TAIL_LENGTH
from hvd_ray.payoff.token_classes import TokenClass, TokenClasses
from hvd_ray.types import Draft

DECAY = 0.7
LISTED = (
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


def reference_features(
    draft: Draft, context: DecodeContext, classes: TokenClasses
) -> dict[str, float]:
    """Every feature by its name."""
    return {
        **_cache(draft),
        **_state(context),
        **_recent(context),
        **_structure(draft, context, classes),
        **_evidence(draft),
    }


def _evidence(draft: Draft) -> dict[str, float]:
    given = NO_EVIDENCE if draft.evidence_E is None else draft.evidence_E
    return dict(zip(EVIDENCE_NAMES, given.tolist(), strict=True))


def _cache(draft: Draft) -> dict[str, float]:
    probs, size = list(draft.probs), len(draft)
    sure = next((i for i, p in enumerate(probs) if p < 0.9), len(probs))
    likely = next((i for i, p in enumerate(probs) if p < 0.5), len(probs))
    return {
        "cache_score": draft.score,
        "cache_match_len": draft.match_len,
        "cache_draft_len": size,
        "cache_log_match_len": math.log1p(draft.match_len),
        "cache_log_draft_len": math.log1p(size),
        "cache_is_local": float(draft.is_local),
        "cache_fills_match": float(size >= draft.match_len),
        "cache_first_prob": probs[0] if probs else 0,
        "cache_mean_prob": float(np.mean(probs)) if probs else 0,
        "cache_min_prob": min(probs, default=0),
        "cache_last_prob": probs[-1] if probs else 0,
        "cache_num_sure": sure,
        "cache_num_likely": likely,
    }


def _state(context: DecodeContext) -> dict[str, float]:
    return {
        "state_log_prompt_len": math.log1p(context.prompt_len),
        "state_log_generated_len": math.log1p(context.num_generated),
        "state_relative_position": context.num_generated / max(1, len(context.token_ids)),
    }


def _recent(context: DecodeContext) -> dict[str, float]:
    history = context.history
    newest_first = list(history.outcomes)[::-1]
    accepted = [outcome.accepted_len for outcome in newest_first]
    drafted = [outcome.draft_len for outcome in newest_first]
    weights = [DECAY**i for i in range(len(accepted))]
    features: dict[str, float] = {}
    for window in (1, 2, 4):
        kept = accepted[:window]
        features[f"recent_accepted_{window}"] = sum(kept) / max(1, len(kept))
        features[f"recent_ratio_{window}"] = sum(kept) / max(1, sum(drafted[:window]))
    ratios = [a / max(1, d) for a, d in zip(accepted, drafted, strict=True)]
    features["recent_mean_accepted"] = _weighted(accepted, weights)
    features["recent_mean_ratio"] = _weighted(ratios, weights)
    features["recent_high_rate"] = _share(a >= HIGH_PAYOFF for a in accepted)
    features["recent_none_rate"] = _share(a == 0 for a in accepted)
    features["recent_num_outcomes"] = len(accepted)
    features["recent_is_exhausted"] = float(bool(newest_first) and newest_first[0].is_exhausted)
    features["recent_log_since_mismatch"] = math.log1p(history.num_since_mismatch)
    selections = list(history.selections)
    features["recent_selection_rate"] = _share(selections) if selections else 1.0
    return features


def _weighted(values: list[float], weights: list[float]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / max(1.0, sum(weights))


def _share(flags: object) -> float:
    listed = [bool(flag) for flag in flags]  # type: ignore[attr-defined]
    return sum(listed) / len(listed) if listed else 0.0


def _structure(draft: Draft, context: DecodeContext, classes: TokenClasses) -> dict[str, float]:
    def flags(token: int) -> TokenClass:
        known = 0 <= token < len(classes.flags_V)
        return TokenClass(int(classes.flags_V[token])) if known else TokenClass.EMPTY

    def balance(token: int) -> int:
        return int(classes.balance_V[token]) if 0 <= token < len(classes.balance_V) else 0

    tokens = list(draft.token_ids)
    tail = context.token_ids.tail(TAIL_LENGTH).tolist()
    features: dict[str, float] = {}
    for name in LISTED:
        bit = TokenClass[name.upper()]
        features[f"draft_{name}_share"] = _share(bit in flags(t) for t in tokens)
        features[f"draft_first_{name}"] = float(bool(tokens) and bit in flags(tokens[0]))
        features[f"last_{name}"] = float(bool(tail) and bit in flags(tail[-1]))
        if name in ("newline", "punctuation", "digit", "letter"):
            features[f"tail_{name}_share"] = _share(bit in flags(t) for t in tail)
    named = {"newline": TokenClass.NEWLINE, "punctuation": TokenClass.PUNCTUATION}
    for name, bit in {**named, "special": TokenClass.EMPTY}.items():
        first = next((i for i, t in enumerate(tokens) if bit in flags(t)), len(tokens))
        features[f"draft_log_{name}_at"] = math.log1p(first)
    running = np.cumsum([0, *(balance(t) for t in tokens)])
    features["draft_bracket_balance"] = float(running[-1])
    features["draft_bracket_low"] = float(running.min())
    features["tail_bracket_balance"] = float(sum(balance(t) for t in tail))
    features["draft_distinct_share"] = len(set(tokens)) / len(tokens) if tokens else 1.0
    features["tail_distinct_share"] = len(set(tail)) / len(tail) if tail else 1.0
    return features
