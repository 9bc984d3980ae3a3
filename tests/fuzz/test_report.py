"""What `make fuzz` tells: a fault stops no other kind, and stands in the report."""

from __future__ import annotations

from tests.fuzz.__main__ import ask_all, page


def held() -> None: ...


def fails() -> None:
    raise AssertionError("POST /tokenize: 500 fault\nwith this body")


def test_a_kind_that_fails_stops_no_other_and_is_shown() -> None:
    kinds = list(ask_all([("one", held), ("two", fails), ("three", held)], held))
    assert [(kind.name, bool(kind.found)) for kind in kinds] == [
        ("one", False), ("two", True), ("three", False),
    ]  # fmt: skip
    text = page(kinds, examples=150, seed=7)
    assert "**1 failures in 450 requests, 150 of each of 3 kinds.**" in text
    assert "`--examples 150 --seed 7` repeats it" in text
    assert "    POST /tokenize: 500 fault" in text


def test_a_request_that_is_left_running_is_a_failure() -> None:
    (kind,) = ask_all([("one", held)], fails)
    assert kind.found


def test_all_that_holds_is_said_in_one_line() -> None:
    kinds = list(ask_all([("one", held)], held))
    assert "**No failures in 150 requests" in page(kinds, examples=150, seed=7)
