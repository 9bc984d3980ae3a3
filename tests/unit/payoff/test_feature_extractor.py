"""Features by hand, their names and their speed."""

import time

import numpy as np
import pytest

from hvd_ray.context import DecodeContext, DraftHistory
from hvd_ray.payoff.features import (
    DRAFT_LEN_INDEX,
    FEATURE_GROUPS,
    FEATURE_NAMES,
    NUM_FEATURES,
    SCORE_INDEX,
    FeatureExtractor,
)
from hvd_ray.payoff.token_classes import TokenClasses
from hvd_ray.traces.schema import labels_schema
from hvd_ray.types import Draft, Source, TokenBuffer

CLASSES = TokenClasses.from_texts(["a", " b", "(", ")", "\n", "7"])


def context(
    ids: list[int], *, prompt_len: int, history: DraftHistory | None = None
) -> DecodeContext:
    return DecodeContext(TokenBuffer(ids), prompt_len, 100, 64, history or DraftHistory())


def features(draft: Draft, where: DecodeContext) -> dict[str, float]:
    values = FeatureExtractor(CLASSES).extract(draft, where)
    return dict(zip(FEATURE_NAMES, values.tolist(), strict=True))


def test_names_are_unique_grouped_and_fit_beside_the_label_columns() -> None:
    assert len(set(FEATURE_NAMES)) == NUM_FEATURES
    assert set(FEATURE_GROUPS) == {
        "cache_match",
        "decode_state",
        "recent_history",
        "draft_structure",
        "support",
        "place",
    }
    columns = labels_schema(FEATURE_NAMES, 1).names
    assert len(set(columns)) == len(columns)
    assert FEATURE_NAMES[DRAFT_LEN_INDEX] == "cache_draft_len"
    assert FEATURE_NAMES[SCORE_INDEX] == "cache_score"


def test_a_draft_by_hand() -> None:
    draft = Draft(Source.SUFFIX, (2, 0, 4, 3), (1.0, 0.9, 0.6, 0.2), 2.7, 8, False)
    found = features(draft, context([1, 1, 1, 5, 2, 2], prompt_len=4))
    assert found["cache_score"] == pytest.approx(2.7)
    assert (found["cache_match_len"], found["cache_draft_len"]) == (8, 4)
    assert (found["cache_is_local"], found["cache_fills_match"]) == (0, 0)
    assert (found["cache_num_sure"], found["cache_num_likely"]) == (2, 3)
    assert found["cache_last_prob"] == pytest.approx(0.2)
    assert found["state_relative_position"] == pytest.approx(2 / 6)
    assert (found["draft_first_opening"], found["draft_newline_share"]) == (1, 0.25)
    assert (found["draft_bracket_balance"], found["tail_bracket_balance"]) == (0, 2)
    assert (found["last_opening"], found["last_digit"]) == (1, 0)


def test_history_by_hand() -> None:
    history = DraftHistory()
    for draft, then in (((1, 1, 1), [1, 1, 9]), ((5,) * 6, [5] * 6), ((3, 3), [2])):
        history.note(Draft(Source.SUFFIX, draft), is_selected=True)
        history.advance(then)
    found = features(Draft(Source.SUFFIX, (0,)), context([0], prompt_len=1, history=history))
    accepted = [found[f"recent_accepted_{n}"] for n in (1, 2, 4)]
    assert accepted == pytest.approx([0, 3, 8 / 3])
    assert found["recent_ratio_2"] == pytest.approx(6 / 8)
    assert found["recent_high_rate"] == pytest.approx(1 / 3)
    assert (found["recent_is_exhausted"], found["recent_num_outcomes"]) == (0, 3)


def test_drafts_longer_than_the_buffers() -> None:
    ids = tuple([1] * 500 + [4])
    found = features(Draft(Source.SUFFIX, ids, (0.5,) * 501, 250.5), context([0], prompt_len=1))
    assert found["draft_newline_share"] == pytest.approx(1 / 501)
    assert found["cache_mean_prob"] == pytest.approx(0.5)


def test_no_draft_and_no_prefix() -> None:
    found = features(Draft(Source.NONE), context([], prompt_len=0))
    assert np.isfinite(list(found.values())).all()
    assert found["cache_draft_len"] == 0


def test_writing_the_features_is_a_small_part_of_a_decision() -> None:
    """15 us are allowed and about 5 taken; five times that fails only if it went wrong."""
    extractor, out_F = FeatureExtractor(CLASSES), np.empty(NUM_FEATURES, dtype=np.float32)
    draft = Draft(Source.SUFFIX, (1,) * 64, (0.5,) * 64, 32.0, 64)
    where = context([0] * 200, prompt_len=100)
    extractor.write(draft, where, out_F)
    times_us = []
    for _ in range(500):
        started = time.perf_counter()
        extractor.write(draft, where, out_F)
        times_us.append((time.perf_counter() - started) * 1e6)
    assert np.median(times_us) < 75
