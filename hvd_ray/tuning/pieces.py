"""Look-ups cut into pieces that workers can do apart, and that make the same whole."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hvd_ray.config import SuffixConfig
from hvd_ray.drafting.suffix import SuffixDrafter
from hvd_ray.payoff.dataset import TEST
from hvd_ray.pipelines.spread import OnDone, Workers, nobody
from hvd_ray.traces.schema import Trace
from hvd_ray.tuning.recorded import LookedUp, look_up


class Piece(NamedTuple):
    """Some traces of a shard, which those before them have filled the cache for."""

    shard: int
    trace_ids: frozenset[str]
    end: int
    """Of the shard's traces, one past the last of them: later ones change nothing."""


class _Shared(NamedTuple):
    shards: Sequence[Sequence[Trace]]
    suffix: SuffixConfig


def even_pieces(traces: Sequence[Trace], num: int) -> list[slice]:
    """At most `num` stretches of about as many output tokens each."""
    ends_N = np.cumsum([len(trace.output_token_ids) for trace in traces])
    if not len(ends_N):
        return []
    wanted = ends_N[-1] * np.arange(1, num + 1) / num
    bounds = sorted({0, *(np.searchsorted(ends_N, wanted) + 1).tolist()})
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def look_up_pieces(
    shards: Sequence[Sequence[Trace]],
    suffix: SuffixConfig,
    *,
    workers: Workers,
    on_done: OnDone = nobody,
) -> list[LookedUp]:
    """Look up the test traces, in their order, in caches that all traces of their shard fill.

    Args:
        shards: traces that share a cache, in time order.
        suffix: of the cache.
        workers: who looks up; how many they are does not change what is found.
        on_done: hears of every piece that is done.
    """
    pieces = [
        piece
        for number, shard in enumerate(shards)
        for piece in _pieces(number, shard, suffix, workers.num)
    ]
    found = workers.map(_look_up, pieces, shared=_Shared(shards, suffix), on_done=on_done)
    return [each for part in found for each in part]


def _pieces(number: int, shard: Sequence[Trace], suffix: SuffixConfig, num: int) -> list[Piece]:
    """A shard that the cache cannot hold is one piece.

    Where outputs leave the cache, its trees may order equal counts by how they were filled.
    """
    num_tokens = sum(len(trace.output_token_ids) for trace in shard)
    judged = [index for index, trace in enumerate(shard) if trace.split == TEST]
    parts = even_pieces(
        [shard[index] for index in judged], num if num_tokens <= suffix.max_cached_tokens else 1
    )
    return [
        Piece(number, frozenset(shard[i].trace_id for i in judged[part]), judged[part][-1] + 1)
        for part in parts
    ]


def _look_up(shared: _Shared, piece: Piece) -> list[LookedUp]:
    return look_up(
        shared.shards[piece.shard][: piece.end],
        lambda trace: trace.trace_id in piece.trace_ids,
        drafter=SuffixDrafter(shared.suffix),
    )
