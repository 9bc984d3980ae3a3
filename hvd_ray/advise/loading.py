"""What is left of the gain when many requests share the target's passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvd_ray.advise.contestants import Contestant, mean_rows
from hvd_ray.payoff.cost import RowCosts
from hvd_ray.payoff.cost_load import LoadedCosts
from hvd_ray.traces.replay import Replay
from hvd_ray.types import Source

CONCURRENCIES = (1, 4, 16, 64)


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """A system's speed-up over plain decoding at a number of requests at once."""

    concurrency: int
    system: str
    speedup: float
    rows_per_pass: float
    is_beyond_table: bool
    """Whether passes have more rows than the cost table does: it goes on linearly there."""
    is_assumed: bool

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def load_points(
    fixed: Sequence[tuple[Contestant, Sequence[Replay]]],
    costs: RowCosts,
    *,
    redecided: Callable[[LoadedCosts], Sequence[tuple[Contestant, Sequence[Replay]]]],
    is_assumed: Callable[[Contestant], bool],
) -> list[LoadPoint]:
    """Speed-ups at each concurrency.

    Args:
        fixed: systems that decide the same at any load, with their replays.
        costs: of the target's passes.
        redecided: replays of those whose decisions hang on the load, for a table at that load.
        is_assumed: whether a system's figures rest on something assumed.
    """
    points = []
    for concurrency in CONCURRENCIES:
        loaded = LoadedCosts(costs, concurrency)
        for contestant, replays in (*fixed, *redecided(loaded)):
            point = _point(contestant, replays, loaded, is_assumed=is_assumed(contestant))
            points.append(point)
    return points


def _point(
    contestant: Contestant, replays: Sequence[Replay], costs: LoadedCosts, *, is_assumed: bool
) -> LoadPoint:
    beside = mean_rows(replays)
    spent_ms = sum(costs.cycles_ms(run.steps, mean_rows=beside) for run in replays)
    tokens = sum(run.num_tokens for run in replays)
    rows = costs.num_requests * beside
    return LoadPoint(
        costs.num_requests,
        contestant.name,
        tokens * costs.cost_ms(Source.NONE, 1) / spent_ms,
        rows,
        rows > costs.costs.rows[-1] > 1,
        is_assumed,
    )
