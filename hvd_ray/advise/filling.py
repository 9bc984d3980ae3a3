"""How much history the cache needs, and how fast it fills.

Two curves under `suffix`. By the cache's cap, over all judged requests after all traffic before
them. And from a cold start: the judged requests alone, by how many of them the cache had seen,
beside the same requests with an empty cache, which still drafts from the request itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from hvd_ray.advise.lookups import JudgedTrace
from hvd_ray.config import SuffixConfig
from hvd_ray.drafting.suffix import SuffixDrafter
from hvd_ray.payoff.policy import AlwaysCache
from hvd_ray.pipelines.spread import IN_PROCESS, OnDone, Workers, nobody
from hvd_ray.traces.replay import Replay, Tally, add_up, replay
from hvd_ray.traces.schema import Trace
from hvd_ray.tuning.recorded import remember

CAPS = (1, 2_000, 8_000, 32_000, 128_000)
"""Output tokens that the cache may hold; 1 holds none."""
EMPTY, LEAST_CACHE = CAPS[:2]
"""No cache, and the smallest that is advised where a cache is: running requests fill it too."""
_BIN_EDGES = (0, 1, 4, 16, 64, 256, 1024, 4096, 16_384, 65_536)


@dataclass(frozen=True, slots=True)
class CapPoint:
    """Emitted per pass with a cache of at most `max_cached_tokens`."""

    max_cached_tokens: int
    emitted_per_pass: float
    is_all: bool
    """Whether the cap was never reached."""


@dataclass(frozen=True, slots=True)
class FillPoint:
    """The requests that met a cache with so many earlier outputs."""

    outputs_from: int
    outputs_to: int
    requests: int
    tokens: int
    emitted_per_pass: float
    emitted_with_empty_cache: float


@dataclass(frozen=True, slots=True)
class Filling:
    """Both curves."""

    caps: tuple[CapPoint, ...]
    fills: tuple[FillPoint, ...]

    @property
    def enough_tokens(self) -> int:
        """The smallest cap that keeps 98 % of what the whole history brings over none."""
        none, whole = self.caps[0].emitted_per_pass, self.caps[-1].emitted_per_pass
        wanted = none + 0.98 * (whole - none)
        return next(p.max_cached_tokens for p in self.caps if p.emitted_per_pass >= wanted)

    @property
    def history_gain(self) -> float:
        """Emitted per pass with all history over that with none."""
        return self.caps[-1].emitted_per_pass / self.caps[0].emitted_per_pass

    @property
    def in_words(self) -> str:
        """How much of the history is worth keeping."""
        gain = f"{100 * (self.history_gain - 1):+.0f} %"
        if self.enough_tokens == EMPTY:
            return f"earlier outputs bring nothing here ({gain}): a request drafts from itself"
        return f"{self.enough_tokens:,} tokens keep 98 % of what history brings ({gain})"

    def as_json(self) -> dict[str, Any]:
        return {
            "caps": [asdict(point) for point in self.caps],
            "fills": [asdict(point) for point in self.fills],
            "enough_tokens": self.enough_tokens,
            "history_gain": self.history_gain,
        }


def filling_of(
    traffic: Sequence[Trace],
    judged: Sequence[JudgedTrace],
    *,
    with_all: Sequence[Replay],
    suffix: SuffixConfig,
    workers: Workers = IN_PROCESS,
    on_done: OnDone = nobody,
) -> Filling:
    """Replay the judged traces with caches of several sizes.

    Args:
        traffic: all traces in time order; those not judged fill the cache.
        judged: some of them, in the same order.
        with_all: `suffix` on the judged ones with the whole history.
        suffix: of the cache; its cap is that of the whole.
        workers: who replays, a cap each; how many they are does not change the curves.
        on_done: hears of each cap that has been replayed, and of the cold start.
    """
    total = sum(len(trace.output_token_ids) for trace in traffic)
    whole = min(total, suffix.max_cached_tokens)
    traces = [item.trace for item in judged]
    caps = [cap for cap in CAPS if cap < whole]
    shared = _Shared(traffic, traces, suffix)
    *capped, from_cold = workers.map(_tallied, [*caps, None], shared=shared, on_done=on_done)
    filled = [Tally.of(run) for run in with_all]
    points = [
        CapPoint(cap, add_up(tallies).emitted_per_pass, is_all=False)
        for cap, tallies in zip(caps, capped, strict=True)
    ]
    points.append(CapPoint(whole, add_up(filled).emitted_per_pass, is_all=whole == total))
    empty = capped[0] if caps else filled
    return Filling(tuple(points), tuple(_fills(traces, from_cold, empty)))


class _Shared(NamedTuple):
    """What every replay needs."""

    traffic: Sequence[Trace]
    judged: Sequence[Trace]
    suffix: SuffixConfig


def _tallied(shared: _Shared, cap: int | None) -> list[Tally]:
    """The judged traces with a cap; None: from a cold start."""
    is_alone, suffix = cap in (EMPTY, None), shared.suffix
    if cap is not None:
        suffix = suffix.model_copy(update={"max_cached_tokens": cap})
    traffic = shared.judged if is_alone else shared.traffic
    return [Tally.of(run) for run in _replays(traffic, shared.judged, suffix)]


def _replays(
    traffic: Sequence[Trace], judged: Sequence[Trace], config: SuffixConfig
) -> list[Replay]:
    """The judged ones in a cache that the traffic fills; both in time order."""
    judged_ids = frozenset(trace.trace_id for trace in judged)
    drafter, policy, found = SuffixDrafter(config.for_rules()), AlwaysCache(), []
    for trace in traffic:
        if trace.trace_id in judged_ids:
            found.append(replay(trace, policy, drafter=drafter))
        else:
            remember(trace, drafter)
    return found


def _fills(
    traces: Sequence[Trace], from_cold: Sequence[Tally], empty: Sequence[Tally]
) -> list[FillPoint]:
    seen: Counter[str] = Counter()
    num_before = []
    for trace in traces:
        num_before.append(seen[trace.scope])
        seen[trace.scope] += 1
    points = []
    for low, high in zip(_BIN_EDGES, (*_BIN_EDGES[1:], 2**31), strict=True):
        places = [i for i, count in enumerate(num_before) if low <= count < high]
        if places:
            full, none = ([runs[i] for i in places] for runs in (from_cold, empty))
            points.append(
                FillPoint(
                    low,
                    high - 1,
                    len(places),
                    sum(run.num_tokens for run in full),
                    add_up(full).emitted_per_pass,
                    add_up(none).emitted_per_pass,
                )
            )
    return points
