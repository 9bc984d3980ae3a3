"""Features of any draft in any context: finite, repeatable, equal to the slow reference, and a
function of the committed prefix, the history and the draft alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_ray.context import DecodeContext, DraftHistory
from hvd_ray.payoff.features import FEATURE_NAMES, FeatureExtractor
from hvd_ray.payoff.token_classes import TokenClasses
from hvd_ray.types import Draft, Source, TokenBuffer
from tests.property.feature_reference import reference_features

TEXTS = ["", "a", " b", "(", ")", "{[", "\n", " ", "12", '"', ", ", "x=", "é"]
CLASSES = TokenClasses.from_texts(TEXTS)
EXTRACTOR = FeatureExtractor(CLASSES)

tokens = st.integers(0, len(TEXTS) + 1)  # two ids more than the table knows


@st.composite
def drafts(draw: st.DrawFn, *, max_size: int = 70) -> Draft:
    ids = draw(st.lists(tokens, max_size=max_size))
    has_probs = draw(st.booleans())
    prob = st.floats(0, 1, width=32)
    probs = draw(st.lists(prob, min_size=len(ids), max_size=len(ids))) if has_probs else []
    return Draft(
        draw(st.sampled_from([Source.SUFFIX, Source.NGRAM])),
        tuple(ids),
        tuple(probs),
        score=sum(probs),
        match_len=draw(st.integers(0, 80)),
        is_local=draw(st.booleans()),
    )


@st.composite
def histories(draw: st.DrawFn) -> DraftHistory:
    history = DraftHistory()
    for _ in range(draw(st.integers(0, 20))):
        draft = draw(drafts(max_size=9))
        history.note(draft, is_selected=draw(st.booleans()))
        agreed = draft.token_ids[: draw(st.integers(0, 9))]
        history.advance([*agreed, *draw(st.lists(tokens, max_size=2))])
    return history


@st.composite
def contexts(draw: st.DrawFn) -> DecodeContext:
    prompt = draw(st.lists(tokens, min_size=1, max_size=30))
    output = draw(st.lists(tokens, max_size=30))
    return DecodeContext(
        TokenBuffer([*prompt, *output]),
        len(prompt),
        max_tokens=draw(st.integers(len(output) + 1, 100)),
        room=draw(st.integers(0, 64)),
        history=draw(histories()),
    )


@given(drafts(), contexts())
def test_equal_to_the_slow_reference(draft: Draft, context: DecodeContext) -> None:
    found = dict(zip(FEATURE_NAMES, EXTRACTOR.extract(draft, context).tolist(), strict=True))
    expected = reference_features(draft, context, CLASSES)
    assert set(found) == set(expected)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


@given(drafts(), contexts(), drafts())
def test_finite_and_the_same_again_whatever_came_between(
    draft: Draft, context: DecodeContext, other: Draft
) -> None:
    first = EXTRACTOR.extract(draft, context)
    assert np.isfinite(first).all()
    EXTRACTOR.extract(other, context)
    out_F = np.full(len(FEATURE_NAMES), np.nan, dtype=np.float32)
    EXTRACTOR.write(draft, context, out_F)
    assert np.array_equal(first, out_F)
    assert np.array_equal(first, FeatureExtractor(CLASSES).extract(draft, context))


@given(drafts(), contexts(), st.lists(tokens, max_size=10), st.integers(1, 10_000))
def test_what_comes_later_and_what_is_left_do_not_matter(
    draft: Draft, context: DecodeContext, future: list[int], budget: int
) -> None:
    """A trace is labelled with its future at hand, live decoding has none."""
    live = EXTRACTOR.extract(draft, context)
    ahead = TokenBuffer(context.token_ids.view())
    size = len(ahead)
    ahead.extend(future)
    ahead._length = size  # the future lies in memory just behind the prefix
    replayed = DecodeContext(ahead, context.prompt_len, budget, 1, context.history)
    assert np.array_equal(live, EXTRACTOR.extract(draft, replayed))
