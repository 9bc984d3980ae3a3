"""What steps cost here and what the head brings, learnt from the engine's own steps.

Two straight lines, each with a prior that a few dozen steps outweigh: the target's pass over its
rows, the head's work over its chain. Old steps fade, so the lines follow batch size, context and
load.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hvd_ray.payoff.cost_policy import MODEL_ACCEPTANCE
from hvd_ray.payoff.joint_policy import Float64Array

FADE = 0.995
OUTLIER = 4.0
"""A step that took this many times as long as expected was disturbed, and teaches nothing."""


@dataclass(slots=True)
class FadingLine:
    """`ms = base + slope * x` by least squares with fading memory; slope and base stay positive."""

    prior_slope: float
    """Slope relative to the base, before anything was seen."""
    prior_weight: float = 8.0
    _sums: np.ndarray = field(default_factory=lambda: np.zeros(5))
    """Faded sums of 1, x, x*x, ms, x*ms."""
    _line: tuple[float, float] | None = None

    @property
    def is_known(self) -> bool:
        return self._line is not None

    def observe(self, x: float, ms: float) -> None:
        """Take in one measurement, unless it is far out of line."""
        if self._line is not None and ms > OUTLIER * self.at(x):
            ms = OUTLIER * self.at(x)
        self._sums *= FADE
        self._sums += (1.0, x, x * x, ms, x * ms)
        self._line = self._solve()

    def at(self, x: float) -> float:
        """Expected milliseconds; in units of the base before the first measurement."""
        base, slope = self._line or (1.0, self.prior_slope)
        return base + slope * x

    def _solve(self) -> tuple[float, float]:
        """The line, with the prior slope standing in for rows that were not tried."""
        n, sum_x, sum_xx, sum_ms, sum_xms = self._sums
        mean_x, mean_ms = sum_x / n, sum_ms / n
        slope = self.prior_slope * mean_ms / (1.0 + self.prior_slope * mean_x)
        spread = sum_xx - n * mean_x**2
        weight = self.prior_weight
        slope = (weight * slope + (sum_xms - n * mean_x * mean_ms)) / (weight + spread)
        slope = max(slope, 1e-4 * mean_ms)
        return max(mean_ms - slope * mean_x, 1e-3), slope


@dataclass(slots=True)
class LearntCosts:
    """`joint_policy.BatchCosts` from the steps that were seen."""

    target: FadingLine = field(default_factory=lambda: FadingLine(prior_slope=1 / 64))
    """Over rows."""
    head: FadingLine = field(default_factory=lambda: FadingLine(prior_slope=0.8))
    """Over chain tokens; at 0 it only reads the rows that wait for it."""
    prior_head_share: float = 0.12
    """A chain of one token costs about this much of a target pass, before it was measured."""

    def verify_ms(self, num_rows: int) -> Float64Array:
        rows = np.arange(num_rows + 1, dtype=np.float64)
        times: Float64Array = self.target.at(0) + (self.target.at(1) - self.target.at(0)) * rows
        return times

    def model_ms(self, num_tokens: int) -> float:
        if self.head.is_known:
            return self.head.at(num_tokens)
        return self.target.at(1) * self.prior_head_share * num_tokens


@dataclass(slots=True)
class LearntAcceptance:
    """How often the head's tokens are accepted by position, over all requests, old cycles fading.

    A request that has used the head seldom is judged by this; its own cycles soon outweigh it.
    """

    prior: tuple[float, ...] = MODEL_ACCEPTANCE
    prior_weight: float = 20.0
    _tried_K: np.ndarray = field(default_factory=lambda: np.zeros(64))
    _accepted_K: np.ndarray = field(default_factory=lambda: np.zeros(64))

    def observe(self, drafted: int, accepted: int) -> None:
        """Take in a chain: position k was tried if all before it were accepted."""
        num_tried = min(accepted + 1, drafted)
        self._tried_K *= FADE
        self._accepted_K *= FADE
        self._tried_K[:num_tried] += 1
        self._accepted_K[: min(accepted, num_tried)] += 1

    def by_position(self) -> tuple[float, ...]:
        """P(token k accepted | those before it were)."""
        prior_K = np.full(len(self._tried_K), self.prior[-1])
        prior_K[: len(self.prior)] = self.prior
        found_K = self._accepted_K + self.prior_weight * prior_K
        return tuple((found_K / (self._tried_K + self.prior_weight)).tolist())
