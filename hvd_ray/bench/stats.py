"""Intervals for speed-ups: a paired bootstrap over prompts, with sessions as clusters.

The speed-up is a ratio of sums (tokens per second of a system over tokens per second of the
baseline), so it is resampled as a whole: a draw picks sessions with replacement and takes both
systems' tokens and times of the same sessions. The spread of the draws on the logarithmic scale
gives the standard error; Student's t with (sessions - 1) degrees of freedom and the factor
n / (n - 1) of the bootstrap's variance correct for few sessions (Hesterberg 2015, "What Teachers
Should Know About the Bootstrap", sections 4.3 and 5). The plain percentile interval covers 80 %
instead of 95 % at four sessions; this one covers 94 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

NUM_DRAWS = 10_000
CONFIDENCE = 0.95
MIN_SESSIONS = 4
"""Fewer sessions say too little of other sessions for an interval of any use."""

MIN_UNITS = 3
"""With two, Student's t would give an interval of 18 standard errors: none is more honest."""

Unit = Literal["session", "prompt", "wave"]

# Shapes: P prompts, C clusters (sessions), R draws of the bootstrap.


@dataclass(frozen=True, slots=True)
class Work:
    """What one system did with each prompt, in the order of the prompts."""

    tokens_P: NDArray[np.float64]
    seconds_P: NDArray[np.float64]

    @classmethod
    def of(cls, *, tokens: ArrayLike, seconds: ArrayLike) -> Work:
        return cls(np.asarray(tokens, np.float64), np.asarray(seconds, np.float64))


@dataclass(frozen=True, slots=True)
class RatioEstimate:
    """A speed-up and its uncertainty on the logarithmic scale."""

    log_ratio: float
    log_error: float
    """Standard error of `log_ratio`; 0 where it cannot be told (`is_degenerate`)."""
    degrees_of_freedom: float
    num_clusters: int

    @property
    def is_degenerate(self) -> bool:
        """Too few units for any interval: `low` and `high` merely repeat the ratio."""
        return self.degrees_of_freedom < 1

    @property
    def ratio(self) -> float:
        return math.exp(self.log_ratio)

    @property
    def low(self) -> float:
        return math.exp(self.log_ratio - self._half_width())

    @property
    def high(self) -> float:
        return math.exp(self.log_ratio + self._half_width())

    def _half_width(self) -> float:
        if self.is_degenerate or self.log_error == 0:
            return 0.0
        from scipy.special import stdtrit

        return float(stdtrit(self.degrees_of_freedom, (1 + CONFIDENCE) / 2)) * self.log_error


def resampling_units(
    sessions: Sequence[str | None], prompt_ids: Sequence[str]
) -> tuple[Unit, list[str]]:
    """What is drawn: sessions, or single prompts where there are fewer than `MIN_SESSIONS`.

    A prompt without a session is one of its own. Drawn by prompts, the interval speaks of these
    sessions only, not of others like them; reports name the unit.
    """
    clusters = [
        f"session {session}" if session else f"prompt {prompt_id}"
        for session, prompt_id in zip(sessions, prompt_ids, strict=True)
    ]
    if len(set(clusters)) >= MIN_SESSIONS:
        return "session", clusters
    return "prompt", list(prompt_ids)


def paired_speedup(
    system: Work,
    *,
    baseline: Work,
    clusters: Sequence[str],
    seed: int = 0,
    num_draws: int = NUM_DRAWS,
) -> RatioEstimate:
    """Speed-up of `system` over `baseline` in tokens per second, on the same prompts.

    Where both emit the same tokens this is the ratio of their total times. Element i of the
    arrays and of `clusters` belongs to prompt i; prompts of one session are drawn together.
    """
    work_4C = _sum_by_cluster(system, baseline, clusters)
    num_clusters = work_4C.shape[1]
    log_ratio = float(_log_ratio(work_4C.sum(axis=1)))
    if num_clusters < MIN_UNITS:
        return RatioEstimate(log_ratio, 0.0, 0, num_clusters)
    counts_RC = _draw_counts(num_clusters, num_draws, seed)
    draws_R = _log_ratio(work_4C @ counts_RC.T)
    correction = math.sqrt(num_clusters / (num_clusters - 1))
    # Sums in another order differ in the last bit: below a part in 1e12 it is no spread at all.
    error = float(draws_R.std()) * correction
    return RatioEstimate(log_ratio, error if error > 1e-12 else 0.0, num_clusters - 1, num_clusters)


def geometric_mean(estimates: Sequence[RatioEstimate]) -> RatioEstimate:
    """Geometric mean over workloads, each weighing the same; the workloads are fixed, not drawn.

    Degrees of freedom after Satterthwaite (1946). Degenerate if any part is, since the
    uncertainty of that part is unknown.
    """
    assert estimates, "a mean needs at least one workload"
    variances = np.array([estimate.log_error**2 for estimate in estimates])
    freedoms = np.array([estimate.degrees_of_freedom for estimate in estimates])
    num_clusters = sum(estimate.num_clusters for estimate in estimates)
    log_ratio = math.fsum(estimate.log_ratio for estimate in estimates) / len(estimates)
    if any(estimate.is_degenerate for estimate in estimates):
        return RatioEstimate(log_ratio, 0.0, 0, num_clusters)
    total = float(variances.sum())
    freedom = total**2 / float((variances**2 / freedoms).sum()) if total else float(freedoms.sum())
    return RatioEstimate(log_ratio, math.sqrt(total) / len(estimates), freedom, num_clusters)


def _sum_by_cluster(system: Work, baseline: Work, clusters: Sequence[str]) -> NDArray[np.float64]:
    """Rows: system's tokens and seconds, baseline's tokens and seconds; one column a cluster."""
    work_4P = np.stack([system.tokens_P, system.seconds_P, baseline.tokens_P, baseline.seconds_P])
    assert work_4P.shape == (4, len(clusters)), "one value for each prompt and system"
    _, cluster_P = np.unique(np.asarray(clusters), return_inverse=True)
    membership_PC = np.eye(int(cluster_P.max()) + 1)[cluster_P]
    summed: NDArray[np.float64] = work_4P @ membership_PC
    return summed


def _draw_counts(num_clusters: int, num_draws: int, seed: int) -> NDArray[np.float64]:
    """How often each cluster is picked in each draw; shape [R, C]."""
    generator = np.random.default_rng(seed)
    shares = np.full(num_clusters, 1 / num_clusters)
    return generator.multinomial(num_clusters, shares, size=num_draws).astype(np.float64)


def _log_ratio(work_4R: NDArray[np.float64]) -> NDArray[np.float64]:
    tokens, seconds, base_tokens, base_seconds = work_4R
    ratio: NDArray[np.float64] = np.log(tokens / base_tokens) - np.log(seconds / base_seconds)
    return ratio
