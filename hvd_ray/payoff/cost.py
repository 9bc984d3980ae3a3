"""What a cycle costs: milliseconds by draft source and rows of the target pass.

The figures are measured on the machine they are used for; nothing here measures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from hvd_ray.errors import UserError
from hvd_ray.types import Source


class CostTable(Protocol):
    """The cost of one cycle."""

    def cost_ms(self, source: Source, rows: int) -> float:
        """Milliseconds of a cycle that verifies `rows` >= 1 rows drafted by `source`.

        The rows are the last committed token and the draft's, so a cycle without a draft has one.
        Finite, above zero, and never falling as rows are added.
        """
        ...


@dataclass(frozen=True, slots=True)
class PassCost:
    """Every cycle costs the same: the throughput is tokens per target pass."""

    ms: float = 1.0

    def cost_ms(self, source: Source, rows: int) -> float:  # noqa: ARG002
        return self.ms


@dataclass(frozen=True, slots=True)
class RowCosts:
    """Measured target passes, linear between the measured row counts and beyond the last.

    Raises:
        UserError: no or unequal numbers of rows and times, rows that do not rise, a time that is
            not above zero or that falls as rows are added.
    """

    rows: tuple[int, ...]
    verify_ms: tuple[float, ...]
    """One time of a target pass for each entry of `rows`."""
    draft_ms: Mapping[Source, float] = field(default_factory=dict)
    """What drafting adds to a cycle, by source; absent: nothing."""
    draft_token_ms: Mapping[Source, float] = field(default_factory=dict)
    """What each drafted token adds beside that, for a drafter that makes them one by one."""

    def __post_init__(self) -> None:
        rows, times = np.asarray(self.rows), np.asarray(self.verify_ms, dtype=float)
        if len(rows) == 0 or len(rows) != len(times):
            raise UserError(
                f"cost table: needs as many times as row counts, got {len(times)} and {len(rows)}"
            )
        if rows[0] < 1 or np.any(np.diff(rows) <= 0):
            raise UserError(f"cost table: row counts must rise from 1 or more, got {self.rows}")
        if not np.all(np.isfinite(times)) or times[0] <= 0 or np.any(np.diff(times) < 0):
            raise UserError(
                f"cost table: times must be above 0 and never fall, got {self.verify_ms}"
            )

        for source, added_ms in [*self.draft_ms.items(), *self.draft_token_ms.items()]:
            if not (np.isfinite(added_ms) and added_ms >= 0):
                raise UserError(f"cost table: drafting by {source} costs {added_ms}, expected >= 0")

    def cost_ms(self, source: Source, rows: int) -> float:
        return self.verify_ms_of(rows) + self.draft_ms_of(source, rows)

    def draft_ms_of(self, source: Source, rows: int) -> float:
        """What drafting `rows - 1` tokens adds."""
        fixed_ms, token_ms = self.draft_ms.get(source, 0.0), self.draft_token_ms.get(source, 0.0)
        return fixed_ms + token_ms * (rows - 1)

    def verify_ms_of(self, rows: float) -> float:
        """The target pass alone."""
        if rows <= self.rows[-1] or len(self.rows) == 1:
            return float(np.interp(rows, self.rows, self.verify_ms))
        slope = (self.verify_ms[-1] - self.verify_ms[-2]) / (self.rows[-1] - self.rows[-2])
        return self.verify_ms[-1] + slope * (rows - self.rows[-1])
