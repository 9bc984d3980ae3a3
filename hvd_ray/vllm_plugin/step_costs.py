"""What steps cost here and what the head brings, learnt from the engine's own steps.

Two curves, each with a prior that a few dozen steps outweigh: the target's pass over its rows, the
head's work over its passes. Old steps fade, so they follow batch size, context and load.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hvd_ray.payoff.cost_policy import MODEL_ACCEPTANCE
from hvd_ray.payoff.joint_policy import Float64Array

FADE = 0.995
OUTLIER = 1.5
"""A step that took longer than this many times the expected counts as that long."""
_SUSPECT = 1.1
"""From here on a step counts less: what disturbs a step only ever makes it longer."""
_STALE = 0.7
"""A step that took less of the expected shows that what was learnt before does not hold."""
_READING_SHARE = 0.1
"""How much a new measurement of a prompt's reading counts against what is known."""
_JUMP_WEIGHT = 1.0
"""How many steps it takes to outweigh the belief that the second row costs like any other."""


@dataclass(slots=True)
class _Sums:
    """Faded sums over measurements; `j` stands for x > 1."""

    n: float = 0.0
    x: float = 0.0
    xx: float = 0.0
    j: float = 0.0
    jx: float = 0.0
    t: float = 0.0
    xt: float = 0.0
    jt: float = 0.0

    def fade(self, by: float) -> None:
        self.n *= by
        self.x *= by
        self.xx *= by
        self.j *= by
        self.jx *= by
        self.t *= by
        self.xt *= by
        self.jt *= by

    def add(self, x: float, ms: float, weight: float) -> None:
        self.n += weight
        self.x += weight * x
        self.xx += weight * x * x
        self.t += weight * ms
        self.xt += weight * x * ms
        if x > 1:
            self.j += weight
            self.jx += weight * x
            self.jt += weight * ms


@dataclass(slots=True)
class FadingLine:
    """`ms = base + jump * (x > 1) + slope * x` by least squares with fading memory.

    Jump and slope stay above zero. The jump is there because a pass over one row may take another
    way through the kernels than a pass over several: in float32 on a CPU the second row costs
    nearly a whole pass, and those after it next to nothing. It is asked at every step, so it is
    plain arithmetic.
    """

    prior_slope: float
    """Slope relative to the base, before anything was seen."""
    prior_weight: float = 8.0
    _sums: _Sums = field(default_factory=_Sums)
    _fit: tuple[float, float, float] | None = None
    """Base, jump, slope."""

    @property
    def is_known(self) -> bool:
        return self._fit is not None

    def observe(self, x: float, ms: float) -> None:
        """Take in one measurement; one that is out of line counts less."""
        weight = 1.0
        self._sums.fade(FADE)
        if self._fit is not None:
            excess = ms / self.at(x)
            if excess > _SUSPECT:
                weight = (_SUSPECT / excess) ** 2
                ms /= max(1.0, excess / OUTLIER)
            elif excess < _STALE:
                self._sums.fade(excess)
        self._sums.add(x, ms, weight)
        self._fit = self._solve()

    def at(self, x: float) -> float:
        """Expected milliseconds; in units of the base before the first measurement."""
        base, jump, slope = self._fit or (1.0, 0.0, self.prior_slope)
        return base + slope * x + (jump if x > 1 else 0.0)

    def _solve(self) -> tuple[float, float, float]:
        """The curve, with the priors standing in for rows that were not tried."""
        s = self._sums
        mean_x, mean_j, mean_ms = s.x / s.n, s.j / s.n, s.t / s.n
        prior = self.prior_slope * mean_ms / (1.0 + self.prior_slope * mean_x)
        xx = s.xx - s.x * mean_x + self.prior_weight
        jj = s.j - s.j * mean_j + _JUMP_WEIGHT
        xj = s.jx - s.x * mean_j
        xt = s.xt - s.x * mean_ms + self.prior_weight * prior
        jt = s.jt - s.j * mean_ms
        scale = xx * jj - xj * xj  # above zero, since the weights are
        jump, slope = (jt * xx - xt * xj) / scale, (xt * jj - jt * xj) / scale
        if jump < 0:
            jump, slope = 0.0, xt / xx
        slope = max(slope, 1e-4 * mean_ms)
        return max(mean_ms - slope * mean_x - jump * mean_j, 1e-3), jump, slope


@dataclass(slots=True)
class LearntCosts:
    """`joint_policy.BatchCosts` from the steps that were seen."""

    target: FadingLine = field(default_factory=lambda: FadingLine(prior_slope=1 / 64))
    """Over rows."""
    head: FadingLine = field(default_factory=lambda: FadingLine(prior_slope=4.0))
    """Over the head's passes: one reads the rows that wait and gives the chain's first token."""
    prior_head_share: float = 0.12
    """A chain of one token costs about this much of a target pass, before it was measured."""
    reading_ms: float = 0.0
    """What the head's reading of a prompt costs a row; 0 before it was measured."""

    def verify_ms(self, num_rows: int) -> Float64Array:
        times = [self.target.at(rows) for rows in range(min(num_rows, 2) + 1)]
        step = self.target.at(3) - self.target.at(2)
        later = times[-1] + step * np.arange(1, num_rows - 1)
        return np.concatenate((times, later))

    def observe_reading(self, num_rows: int, num_passes: int, ms: float) -> None:
        """The head read a prompt on its way to a chain of so many passes."""
        found = max(0.0, ms - self.model_ms(num_passes)) / num_rows
        known = self.reading_ms or found
        self.reading_ms = known + _READING_SHARE * (min(found, OUTLIER * known) - known)

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
