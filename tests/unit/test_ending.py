"""Where outputs end; the cases are reports of users of other systems, by id."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_ray.ending import Ending
from hvd_ray.engines.toy import EOS, ToyCodec
from hvd_ray.text import TextStream
from hvd_ray.types import SamplingParams

CODEC = ToyCodec()


def ending(*, budget: int = 100, **sampling: object) -> Ending:
    params = SamplingParams(max_tokens=budget, **sampling)  # type: ignore[arg-type]
    return Ending(params, (EOS,), budget, CODEC)


def ids(text: str) -> tuple[int, ...]:
    return tuple(CODEC.encode(text))


def test_t01_stop_near_the_start_of_a_long_run() -> None:
    watcher = ending(stop=("cd",))
    trimmed = watcher.trim(ids("abcdefghijklmnopqrst"))
    assert trimmed.token_ids == ids("abcd")
    assert (watcher.text, trimmed.text) == ("ab", "ab")
    assert (trimmed.finish_reason, trimmed.stop_reason) == ("stop", "cd")


def test_t01_stop_across_two_runs() -> None:
    watcher = ending(stop=("cdef",))
    assert watcher.trim(ids("abcd")).text == "ab", "what may be the head of a stop is held back"
    trimmed = watcher.trim(ids("efgh"))
    assert trimmed.token_ids == ids("ef")
    assert watcher.text == "ab"


def test_held_back_text_is_shown_when_no_stop_comes() -> None:
    watcher = ending(stop=("cdx",))
    pieces = [watcher.trim(ids("abcd")).text, watcher.trim(ids("e")).text]
    assert pieces == ["ab", "cde"]


def test_t03_stop_inside_the_budget_wins() -> None:
    watcher = ending(budget=5, stop_token_ids=(12,))
    trimmed = watcher.trim((10, 11, 12, 20, 21, 22))
    assert (trimmed.token_ids, trimmed.finish_reason) == ((10, 11, 12), "stop")
    assert trimmed.stop_reason == 12


def test_t03_stop_beyond_the_budget_is_length() -> None:
    watcher = ending(budget=2, stop_token_ids=(12,))
    trimmed = watcher.trim((10, 11, 12))
    assert (trimmed.token_ids, trimmed.finish_reason) == ((10, 11), "length")


def test_stop_on_the_last_token_of_the_budget_is_stop() -> None:
    watcher = ending(budget=3, stop_token_ids=(12,))
    assert watcher.trim((10, 11, 12)).finish_reason == "stop"


def test_t05_eos_in_the_middle_of_a_run() -> None:
    watcher = ending()
    trimmed = watcher.trim((3, EOS, 4, EOS))
    assert (trimmed.token_ids, trimmed.finish_reason) == ((3, EOS), "stop")
    assert watcher.text == "c"


def test_ignore_eos_runs_on() -> None:
    assert ending(ignore_eos=True).trim((3, EOS, 4)).finish_reason is None


def test_stops_count_only_after_min_tokens() -> None:
    watcher = ending(stop=("ab",), min_tokens=3)
    assert watcher.trim(ids("abc")).finish_reason is None
    assert watcher.trim(ids("ab")).finish_reason == "stop"
    assert watcher.text == "abc"


@given(
    st.text("abc", min_size=1, max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=3), max_size=3).map(tuple),
    st.integers(1, 30),
    st.lists(st.integers(1, 6), min_size=30, max_size=30),
)
def test_runs_of_any_length_end_where_single_tokens_end(
    text: str, stops: tuple[str, ...], budget: int, run_lengths: list[int]
) -> None:
    tokens = ids(text)
    single = _feed(ending(budget=budget, stop=stops), tokens, [1] * len(tokens))
    runs = _feed(ending(budget=budget, stop=stops), tokens, run_lengths)
    assert runs == single
    kept, shown, whole, reason = single
    if reason is not None:
        assert shown == whole, "the stream joined is the text"
    assert not any(stop in whole for stop in stops)
    assert len(kept) <= budget


def _feed(
    watcher: Ending, tokens: tuple[int, ...], run_lengths: list[int]
) -> tuple[tuple[int, ...], str, str, str | None]:
    kept: list[int] = []
    shown = ""
    start = 0
    for length in run_lengths:
        trimmed = watcher.trim(tokens[start : start + length])
        start += length
        kept.extend(trimmed.token_ids)
        shown += trimmed.text
        if trimmed.finish_reason is not None or start >= len(tokens):
            return tuple(kept), shown, watcher.text, trimmed.finish_reason
    raise AssertionError("the runs cover the text")


@pytest.mark.parametrize("stop", ["aa", "aba"])
def test_a_stop_that_overlaps_itself(stop: str) -> None:
    watcher = ending(stop=(stop,))
    watcher.trim(ids("c" + stop[:-1]))
    trimmed = watcher.trim(ids(stop[-1] + "zz"))
    assert trimmed.finish_reason == "stop"
    assert watcher.text == "c"


class HalfCharacters(ToyCodec):
    """Shows nothing before the end.

    So does a byte-level tokenizer whose every token ends in half a character.
    """

    def stream(self) -> TextStream:
        return _HoldsAll()


class _HoldsAll:
    def __init__(self) -> None:
        self.held: list[int] = []

    def push(self, token_id: int) -> str:
        self.held.append(token_id)
        return ""

    def flush(self) -> str:
        text, self.held = CODEC.decode(self.held), []
        return text


@pytest.mark.parametrize("last", [ids("d"), (EOS,)])
def test_a_stop_string_that_shows_only_at_the_end_is_found(last: tuple[int, ...]) -> None:
    sampling = SamplingParams(max_tokens=4, stop=("bc",))
    watcher = Ending(sampling, (EOS,), 4, HalfCharacters())
    trimmed = watcher.trim((*ids("abc"), *last))
    assert (trimmed.finish_reason, trimmed.stop_reason) == ("stop", "bc")
    assert (watcher.text, trimmed.text) == ("a", "a")
