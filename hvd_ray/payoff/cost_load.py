"""What a cycle costs when many requests share the target's passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvd_ray.payoff.cost import RowCosts
from hvd_ray.types import Source, Step

_SHARED = frozenset({Source.EAGLE3})
"""Drafters that draft for the whole batch in one pass; a cache is asked for each request."""


@dataclass(frozen=True, slots=True)
class LoadedCosts:
    """A `CostTable` for one of `num_requests` requests that all do in a cycle what it does.

    Throughput is tokens over time of the whole batch. If every request brings `rows` rows, a pass
    has `num_requests * rows`, and a row more of each costs what that many rows more cost; so
    deciding by this table is deciding for the batch.
    """

    costs: RowCosts
    num_requests: int = 1

    def cost_ms(self, source: Source, rows: int) -> float:
        return self.costs.verify_ms_of(self.num_requests * rows) + self._draft_ms(source, rows)

    def cycles_ms(self, steps: Sequence[Step], *, mean_rows: float) -> float:
        """Time of one request's cycles, each beside the other requests' mean number of rows.

        The requests are in different cycles at a time, so the others are met on average. With one
        request this is the sum of `cost_ms` over the cycles.
        """
        beside = (self.num_requests - 1) * mean_rows
        most = max((step.drafted for step in steps), default=0) + 1
        pass_ms = [self.costs.verify_ms_of(beside + rows) for rows in range(1, most + 1)]
        return sum(
            pass_ms[step.drafted] + self._draft_ms(step.source, step.drafted + 1) for step in steps
        )

    def _draft_ms(self, source: Source, rows: int) -> float:
        added = self.costs.draft_ms_of(source, rows)
        return added if source in _SHARED else self.num_requests * added
