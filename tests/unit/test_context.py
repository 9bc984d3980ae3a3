"""What is kept of a request's past, as items and as their figures."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hvd_ray.context import DraftHistory, DraftOutcome, Recent
from hvd_ray.types import Draft, Source


@given(st.integers(1, 5), st.lists(st.integers(1, 99), max_size=40))
def test_figures_are_those_of_the_latest_items(length: int, items: list[int]) -> None:
    recent: Recent[int] = Recent(length, lambda item: (item, -item), 2)
    for number, item in enumerate(items):
        recent.append(item)
        kept = items[max(0, number + 1 - length) : number + 1]
        assert list(recent) == kept
        assert len(recent) == len(kept)
        expected = [[i, -i] for i in reversed(kept)] + [[0, 0]] * (length - len(kept))
        assert recent.figures.tolist() == expected
        assert recent.figures.flags.c_contiguous


def test_advance_gives_what_was_settled_in_order() -> None:
    history = DraftHistory()
    history.note(Draft(Source.SUFFIX, (1, 2)), is_selected=True, predicted=1.5)
    history.note(Draft(Source.SUFFIX, (1, 3, 4)), is_selected=False)
    history.note(Draft(Source.SUFFIX, (1, 2, 3, 4)), is_selected=False)
    settled = history.advance((1, 2, 3))
    assert settled == [DraftOutcome(2, 2, 1.5), DraftOutcome(3, 1)]
    assert list(history.outcomes) == settled
    assert history.outcomes.figures[:2].tolist() == [[1, 3, 0, 0], [2, 2, 1, 1.5]]
