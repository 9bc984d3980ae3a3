"""May a new predictor take the place of the one that ships? Both judge the same held-out positions.

Figures of runs on different positions say nothing about each other; these are the new predictor's
own test positions, with the chance of a high payoff as the judge where there is a survival curve.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hvd_ray.payoff.dataset import LabelSet
from hvd_ray.payoff.predictor import PayoffPredictor
from hvd_ray.payoff.quality import average_precision

MIN_POSITIONS = 1000
"""Held-out positions with a draft below which a comparison says too little."""


@dataclass(frozen=True, slots=True)
class Succession:
    """A new predictor beside the shipped one."""

    num_positions: int
    """Held-out positions that both judged."""
    average_precision: float | None
    """Of accepted lengths of 6 or more; None where none was that long."""
    shipped_average_precision: float | None
    loses_curve: bool
    """The shipped one gives the survival curve that `hvd_cost` needs, and the new one does not."""

    @property
    def is_due(self) -> bool:
        """Whether the new one is no worse, judged on enough."""
        ours, theirs = self.average_precision, self.shipped_average_precision
        is_known = ours is not None and theirs is not None
        is_enough = self.num_positions >= MIN_POSITIONS
        return is_known and is_enough and not self.loses_curve and (ours or 0) >= (theirs or 0)

    @property
    def figures(self) -> str:
        """`average precision 0.166, the shipped one's 0.701, on 27 held-out positions`."""
        ours, theirs = self.average_precision, self.shipped_average_precision
        where = f"{self.num_positions:,} held-out positions"
        if ours is None or theirs is None:
            return f"no accepted length of 6 or more on {where}"
        return f"average precision {ours:.3f}, the shipped one's {theirs:.3f}, on {where}"

    @property
    def obstacles(self) -> tuple[str, ...]:
        """Why it is not due, apart from the figures."""
        found = ["it gives no survival curve, which hvd_cost needs"] if self.loses_curve else []
        if self.num_positions < MIN_POSITIONS:
            found.append(f"a verdict takes {MIN_POSITIONS:,} held-out positions")
        return tuple(found)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "is_due": self.is_due}


def succession(new: PayoffPredictor, shipped: PayoffPredictor, held_out: LabelSet) -> Succession:
    """Compare the two on the positions (one or more) that the new one was not trained on."""
    return Succession(
        len(held_out),
        average_precision(new, held_out),
        average_precision(shipped, held_out),
        loses_curve=shipped.num_survival > 0 and new.num_survival == 0,
    )
