"""Rows that wait for the head."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hvd_ray.vllm_plugin.backlog import Backlog, Rows, in_batches, split_rows  # noqa: E402

HANDLE = object()


def rows(start: int, count: int) -> Rows:
    positions = torch.arange(start, start + count)
    return Rows(start, positions + 100, positions[:, None] * torch.ones(1, 3), positions + 7)


def test_rows_that_follow_on_are_read_together() -> None:
    backlog = Backlog(block_size=0)
    backlog.add("a", HANDLE, rows(5, 2))
    backlog.add("a", HANDLE, rows(7, 3))
    (taken,) = backlog.take(["a"])
    assert (taken.start, taken.end) == (5, 10)
    assert taken.token_ids_N.tolist() == [105, 106, 107, 108, 109]
    assert taken.hidden_NA[:, 0].tolist() == [5, 6, 7, 8, 9]
    assert taken.slots_N.tolist() == [12, 13, 14, 15, 16]
    assert backlog.num_rows == 0


def test_positions_that_are_computed_anew_replace_what_waited() -> None:
    backlog = Backlog(block_size=0)
    backlog.add("a", HANDLE, rows(5, 2))
    backlog.add("a", HANDLE, rows(0, 4))  # resumed after a preemption
    backlog.add("b", HANDLE, rows(5, 2))
    backlog.add("b", object(), rows(7, 1))  # another request under the same id
    taken = backlog.take(["a", "b"])
    assert [(part.start, part.end) for part in taken] == [(0, 4), (7, 8)]


def test_requests_that_left_leave_nothing() -> None:
    backlog = Backlog(block_size=0)
    backlog.add("a", HANDLE, rows(0, 2))
    backlog.add("b", HANDLE, rows(0, 3))
    backlog.forget_absent({"b": HANDLE})
    assert backlog.num_rows == 3


@pytest.mark.parametrize(
    ("block_size", "start", "count", "is_due"),
    [
        (16, 3, 5, False),
        (16, 14, 2, True),
        (16, 15, 3, True),
        (16, 16, 3, False),
        (0, 14, 9, False),
    ],
)
def test_a_block_is_read_in_the_step_that_fills_it(
    block_size: int, start: int, count: int, is_due: bool
) -> None:
    backlog = Backlog(block_size)
    backlog.add("a", HANDLE, rows(start, count))
    assert backlog.is_due("a") is is_due


def test_rows_do_not_wait_for_ever() -> None:
    backlog = Backlog(block_size=0, max_rows=4)
    backlog.add("a", HANDLE, rows(0, 3))
    assert not backlog.is_due("a")
    backlog.add("a", HANDLE, rows(3, 1))
    assert backlog.is_due("a")


def test_the_longest_are_read_when_too_many_wait() -> None:
    backlog = Backlog(block_size=0, max_rows=100)
    for name, count in (("prompt", 90), ("short", 3), ("other", 7)):
        assert not [known for known in ("prompt", "short") if known in backlog._waiting
                    and backlog.is_due(known)]  # fmt: skip
        backlog.add(name, HANDLE, rows(0, count))
    assert [name for name in ("prompt", "short", "other") if backlog.is_due(name)] == ["prompt"]
    backlog.take(["prompt"])
    assert backlog.num_rows == 10
    assert not backlog.is_due("other")


def test_rows_that_nobody_will_read_are_dropped() -> None:
    backlog = Backlog(block_size=0)
    backlog.add("a", HANDLE, rows(0, 9))
    backlog.drop("a")
    assert backlog.num_rows == 0
    backlog.add("a", HANDLE, rows(9, 2))
    (taken,) = backlog.take(["a"])
    assert taken.start == 9


def test_batches_keep_to_the_heads_buffers() -> None:
    assert in_batches([3, 3, 3, 9, 1, 1], 6) == [[0, 1], [2], [3], [4, 5]]
    assert in_batches([], 6) == []


def test_a_steps_rows_are_split_and_copied() -> None:
    whole = rows(10, 5)
    padded = torch.cat((whole.slots_N, torch.tensor([-1, -1])))
    parts = split_rows(
        [0, 2, 5],
        ends=[12, 33],
        token_ids_N=whole.token_ids_N,
        hidden_NA=whole.hidden_NA,
        slots_N=padded,
    )
    assert [(part.start, len(part)) for part in parts] == [(10, 2), (30, 3)]
    assert [part.slots_N.tolist() for part in parts] == [[17, 18], [19, 20, 21]]
    whole.hidden_NA.zero_()
    assert parts[1].hidden_NA[0, 0] == 12
    sizes = [part.hidden_NA.untyped_storage().nbytes() for part in parts]
    assert sizes == [2 * 3 * 4, 3 * 3 * 4], "what waits holds no memory of other requests"


def test_a_steps_rows_are_split_without_reading_a_tensor() -> None:
    """On a GPU each such reading waits for all that is queued; `meta` refuses them."""
    with torch.device("meta"):
        whole = Rows(0, torch.empty(5), torch.empty(5, 3), torch.empty(5))
    parts = split_rows(
        [0, 2, 5],
        ends=[12, 33],
        token_ids_N=whole.token_ids_N,
        hidden_NA=whole.hidden_NA,
        slots_N=whole.slots_N,
    )
    assert [(part.start, part.end) for part in parts] == [(10, 12), (30, 33)]
