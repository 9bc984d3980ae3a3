"""Pieces make the same whole, however many there are."""

import pickle
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_ray.config import Config, SuffixConfig
from hvd_ray.payoff.dataset import TEST
from hvd_ray.pipelines.spread import IN_PROCESS, InProcess
from hvd_ray.traces.schema import Trace
from hvd_ray.tuning.data import open_material
from hvd_ray.tuning.pieces import even_pieces, look_up_pieces
from hvd_ray.tuning.recorded import LookedUp
from tests.unit.tuning.conftest import Data, phrase_trace


@dataclass
class Many(InProcess):
    """As many workers as asked, one after the other, given what has been sent to them."""

    num: int

    def map(self, work: Any, items: Any, *, shared: Any, **told: Any) -> list[Any]:
        work, items, shared = sent((work, items, shared))
        found: list[Any] = sent(super().map(work, items, shared=shared, **told))
        return found


def sent(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301 - as Ray would, and our own


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 9))
def test_pieces_are_the_traces_in_order_and_none_is_empty(lengths: list[int], num: int) -> None:
    whole = phrase_trace(0, workload="chat", split=TEST)
    traces = [replace(whole, output_token_ids=(1,) * length) for length in lengths]
    pieces = [traces[part] for part in even_pieces(traces, num)]
    assert [trace for piece in pieces for trace in piece] == traces
    assert len(pieces) <= num
    assert all(pieces)
    most = max((sum(len(t.output_token_ids) for t in piece) for piece in pieces), default=0)
    assert most <= sum(lengths) / num + 50


@pytest.mark.parametrize("num", [2, 3, 50])
@pytest.mark.parametrize("cap", [500_000, 100])
def test_look_ups_in_pieces_are_those_of_the_whole(data: Data, num: int, cap: int) -> None:
    shards = open_material(data.labels, data.traces, Config()).shards()
    suffix = SuffixConfig(max_cached_tokens=cap)
    told: list[int] = []
    whole = look_up_pieces(shards, suffix, workers=IN_PROCESS)
    found = look_up_pieces(
        shards, suffix, workers=Many(num), on_done=lambda done, _total: told.append(done)
    )
    assert told == list(range(1, len(told) + 1))
    assert len(told) > len(shards) if cap > 100 else len(told) == len(shards)
    assert [each.trace for each in found] == [t for s in shards for t in s if t.split == TEST]
    assert_same(found, whole)


def assert_same(found: list[LookedUp], expected: list[LookedUp]) -> None:
    for (trace, *records), (wanted, *theirs) in zip(found, expected, strict=True):
        assert trace == wanted
        for record, other in zip(records, theirs, strict=True):
            for name in record.__slots__:
                np.testing.assert_array_equal(getattr(record, name), getattr(other, name))


def test_a_shard_without_test_traces_gives_none(phrases: list[Trace]) -> None:
    train = [trace for trace in phrases if trace.split != TEST]
    assert look_up_pieces([train, []], SuffixConfig(), workers=Many(2)) == []
