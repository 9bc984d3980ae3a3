"""A drafter that reads a conversation once drafts as one that reads it in every turn."""

from hypothesis import given
from hypothesis import strategies as st

from hvd_ray.drafting.continuing import NUM_KEPT, ContinuingNgramDrafter
from hvd_ray.drafting.ngram import NgramDrafter
from hvd_ray.types import Request

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=12).map(tuple)
TURN = st.tuples(st.integers(0, 2), TOKENS, TOKENS, st.booleans())
"""Conversation, what is said to it, what it answers, and whether it forgets what was said."""


def drafts(drafter, turns):
    said = {}
    found = []
    for number, (conversation, asked, output, forgets) in enumerate(turns):
        prompt = (() if forgets else said.get(conversation, ())) + asked
        request_id = str(number)
        drafter.start(Request(request_id, prompt))
        for token in output:
            found.append(drafter.propose(request_id, 8))
            drafter.observe(request_id, (token,), None)
        drafter.stop(request_id)
        said[conversation] = prompt + output
    return found


@given(st.lists(TURN, max_size=8))
def test_drafts_are_those_of_the_plain_drafter(turns):
    assert drafts(ContinuingNgramDrafter(), turns) == drafts(NgramDrafter(), turns)


def test_one_turn_takes_over_the_index_of_the_one_before():
    drafter = ContinuingNgramDrafter()
    drafter.start(Request("a", (1, 2, 3)))
    drafter.observe("a", (4, 5), None)
    index = drafter._active["a"]
    drafter.stop("a")
    drafter.start(Request("b", (1, 2, 3, 4, 5, 6)))
    drafter.start(Request("c", (1, 2, 3, 4, 5, 6)))
    assert drafter._active["b"] is index
    assert drafter._active["c"] is not index


def test_only_so_many_conversations_are_kept():
    drafter = ContinuingNgramDrafter()
    for number in range(NUM_KEPT + 5):
        drafter.start(Request(str(number), (number, 1)))
        drafter.stop(str(number))
    assert len(drafter._ended) == NUM_KEPT
