"""The load that a plan is for: how many tokens in how many sessions, and how unevenly they lie.

Sessions are dealt to shards by a hash of scope and session, as the pipelines do: a tenant with
half the traffic is spread like any other, a single session is never split. Dealing by tenant alone
is modelled beside it, to show what that would cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hvd_ray.errors import UserError

Dealing = Literal["session", "tenant"]
SESSION_SPREAD = 1.0
"""Sigma of the log-normal session sizes: the largest twentieth holds a quarter of the tokens."""
MOST_DRAWN = 1000
"""Sessions of a shard that are drawn one by one."""


@dataclass(frozen=True, slots=True)
class Load:
    """Traces to be made or labelled.

    Raises:
        UserError: a size is out of range.
    """

    num_tokens: int
    """Output tokens in all."""
    trace_tokens: int = 128
    """Output tokens of a trace."""
    session_traces: int = 4
    """Traces of a session, on average."""
    num_tenants: int = 50
    largest_tenant: float = 0.0
    """The share of the traffic that one tenant has; 0: all alike."""
    seed: int = 0

    def __post_init__(self) -> None:
        for flag, value in (
            ("--tokens", self.num_tokens),
            ("--trace-tokens", self.trace_tokens),
            ("--session-traces", self.session_traces),
        ):
            if value < 1:
                raise UserError(f"{flag} must be 1 or more, got {value}")
        if self.trace_tokens > self.num_tokens:
            raise UserError(
                f"--trace-tokens must be from 1 to --tokens ({self.num_tokens:,}), "
                f"got {self.trace_tokens:,}"
            )
        if not 0 <= self.largest_tenant < 1:
            raise UserError(
                f"--largest-tenant must be from 0 to below 1, got {self.largest_tenant}"
            )

    @property
    def num_traces(self) -> int:
        return max(1, round(self.num_tokens / self.trace_tokens))

    @property
    def num_sessions(self) -> int:
        return max(1, round(self.num_traces / self.session_traces))

    def shard_tokens(
        self, num_shards: int, *, dealt_by: Dealing = "session"
    ) -> NDArray[np.float64]:
        """Tokens of every shard, the largest first; shards that got nothing are left out."""
        rng = np.random.default_rng(self.seed)
        if dealt_by == "session":
            counts = rng.multinomial(self.num_sessions, [1 / num_shards] * num_shards)
        else:
            by_tenant = rng.multinomial(self.num_sessions, self._tenant_shares())
            shard_of_tenant = rng.integers(num_shards, size=self.num_tenants)
            counts = np.bincount(shard_of_tenant, weights=by_tenant, minlength=num_shards)
        tokens = np.array([_sum_of_sizes(rng, int(count)) for count in counts if count])
        tokens *= self.num_tokens / tokens.sum()
        return np.sort(tokens)[::-1]

    def _tenant_shares(self) -> list[float]:
        """The first tenant has its share, the others the rest alike."""
        first = self.largest_tenant or 1 / self.num_tenants
        rest = (1 - first) / max(1, self.num_tenants - 1)
        return [first, *[rest] * (self.num_tenants - 1)]


def _sum_of_sizes(rng: np.random.Generator, count: int) -> float:
    """The sum of so many log-normal sizes; of many, by the central limit theorem."""
    if count <= MOST_DRAWN:
        return float(rng.lognormal(sigma=SESSION_SPREAD, size=count).sum())
    variance = SESSION_SPREAD**2
    mean = np.exp(variance / 2)
    deviation = mean * np.sqrt(np.expm1(variance))
    return float(rng.normal(count * mean, np.sqrt(count) * deviation))
