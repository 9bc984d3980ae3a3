"""The verdict of `make soak` on clients that leave: it can fail."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from scripts import soak

PLACE = soak.Place("http://127.0.0.1:1", {"eve": "k"}, 0)


def seen(*, left: int) -> soak.Seen:
    return soak.Seen(tokens=1000, left=left)


def test_a_few_tokens_for_each_that_left_are_right() -> None:
    assert not soak.too_much_made(1000, seen(left=10))
    assert not soak.too_much_made(1000 + 10 * 8 + 200, seen(left=10))


def test_one_answer_that_goes_on_to_its_end_is_found() -> None:
    made = 1000 + 9 * 2 + soak.LEAVER_ASKS
    assert soak.too_much_made(made, seen(left=200))
    assert soak.too_much_made(made, seen(left=10)) == [
        "5018 tokens made, 1000 returned, 10 clients left that asked for 4000 each: 1000 to 1280 "
        "are right"
    ]


def test_tokens_that_were_returned_and_not_counted_are_found() -> None:
    assert soak.too_much_made(999, seen(left=10))


@pytest.mark.parametrize(("running", "wrong"), [(0, 0), (1, 1)])
def test_an_answer_that_goes_on_for_nobody_is_found(
    monkeypatch: pytest.MonkeyPatch, running: int, wrong: int
) -> None:
    async def leave(*given: Any) -> None:
        await asyncio.sleep(0)
        given[-1].answers["left 200"] += 1

    monkeypatch.setattr(soak, "leave_after", leave)
    monkeypatch.setattr(soak, "LEAVING_S", 0.3)
    state = {"num_running": running, "num_waiting": 0}
    monkeypatch.setattr(soak, "state_of", lambda _place: state)
    assert len(soak.leaving(PLACE)) == wrong


def test_leavers_that_were_refused_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*given: Any) -> None:
        await asyncio.sleep(0)
        given[-1].answers["left 429"] += 1

    monkeypatch.setattr(soak, "leave_after", refused)
    assert soak.leaving(PLACE) == ["0 of 4 answers began that were to be left"]


def test_an_answer_to_be_left_is_longer_than_it_can_be_decoded_until_the_check() -> None:
    assert soak.LEAVER_ASKS * soak.MAX_RUNNING / soak.LEAVING_S > 1000, "tokens a second"
