import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_ray.traces.loops import is_degenerate_loop, loop_start

# Two or three different tokens, so that stretches do come again.
LOOPY_IDS = st.lists(st.integers(0, 2), max_size=60)


def brute_force_start(token_ids: list[int], stretch: int, times: int) -> int | None:
    windows = [token_ids[i : i + stretch] for i in range(len(token_ids) - stretch + 1)]
    for place, window in enumerate(windows):
        if windows.count(window) >= times and windows[:place].count(window) == 1:
            return place
    return None


@given(LOOPY_IDS, st.integers(1, 8), st.integers(2, 5))
def test_agrees_with_brute_force(token_ids: list[int], stretch: int, times: int) -> None:
    expected = brute_force_start(token_ids, stretch, times)
    assert loop_start(token_ids, stretch=stretch, times=times) == expected
    found = is_degenerate_loop(token_ids, stretch=stretch, times=times)
    assert found == (expected is not None)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=20), st.integers(1, 12))
def test_a_period_repeated_long_enough_is_found_after_its_first_round(
    prefix: list[int], period: int
) -> None:
    # The prefix is too short to loop and holds no negative ids.
    loop = [-1 - i for i in range(period)]
    num_tokens = 20 + 3 * period
    repeated = (loop * num_tokens)[:num_tokens]
    assert loop_start([*prefix, *repeated]) == len(prefix) + period
    assert not is_degenerate_loop([*prefix, *repeated[:-1]])


@given(LOOPY_IDS, st.integers(1, 6), st.integers(2, 4))
def test_a_trace_cut_at_its_loop_holds_no_second_round(
    token_ids: list[int], stretch: int, times: int
) -> None:
    start = loop_start(token_ids, stretch=stretch, times=times)
    if start is None:
        return
    first_round = token_ids[start : start + stretch]
    kept = token_ids[: start + stretch - 1]
    windows = [kept[i : i + stretch] for i in range(len(kept) - stretch + 1)]
    assert windows.count(first_round) == 1


def test_twenty_tokens_four_times_is_the_rule() -> None:
    sentence = list(range(20))
    separated = [*sentence, 90, *sentence, 91, *sentence, 92, *sentence]
    assert loop_start(separated) == 21
    assert loop_start(separated[:-1]) is None
    assert loop_start([*sentence[:19], 90] * 3) is None


@pytest.mark.parametrize("token_ids", [[], [7], [7] * 22, list(range(500))])
def test_short_and_varied_outputs_hold_no_loop(token_ids: list[int]) -> None:
    assert not is_degenerate_loop(token_ids)


def test_an_int32_array_as_read_from_parquet_is_accepted() -> None:
    assert loop_start(np.array([5, 6] * 40, dtype=np.int32)) == 2


def test_time_is_linear_in_the_output() -> None:
    # A quadratic search takes minutes here.
    began = time.perf_counter()
    assert not is_degenerate_loop(np.arange(400_000, dtype=np.int32))
    assert time.perf_counter() - began < 10
