"""Policies against each other on the same traces: speeds by workload, and how sure the gap is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_ray.bench.stats import RatioEstimate, Unit, Work, paired_speedup, resampling_units
from hvd_ray.payoff.cost import CostTable
from hvd_ray.payoff.policy import Policy
from hvd_ray.traces.replay import Replay, Tally, summarize
from hvd_ray.traces.schema import Trace
from hvd_ray.tuning.objective import speed
from hvd_ray.tuning.recorded import ReplaySet

Priced = Replay | Tally

EVERYTHING = "all"
"""The row over all workloads: a ratio of sums."""


@dataclass(frozen=True, slots=True)
class Gap:
    """How much faster one policy is than another, with a 95 % interval from a paired bootstrap."""

    estimate: RatioEstimate
    unit: Unit
    """What was drawn: sessions, or single prompts where there are fewer than four sessions."""

    @property
    def is_better(self) -> bool:
        """The whole interval lies above 1."""
        return not self.estimate.is_degenerate and self.estimate.low > 1

    @property
    def is_worse(self) -> bool:
        """The whole interval lies below 1; without an interval, the ratio."""
        estimate = self.estimate
        return (estimate.ratio if estimate.is_degenerate else estimate.high) < 1

    def as_json(self) -> dict[str, Any]:
        estimate = self.estimate
        interval = None if estimate.is_degenerate else [estimate.low, estimate.high]
        return {
            "ratio": estimate.ratio,
            "interval": interval,
            "units": estimate.num_clusters,
            "unit": self.unit,
        }


@dataclass(frozen=True, slots=True)
class Row:
    """One workload: the speed of every policy, and the first's gap to the second."""

    workload: str
    num_sessions: int
    num_tokens: int
    speeds: Mapping[str, float]
    gap: Gap

    def as_json(self) -> dict[str, Any]:
        return {
            "workload": self.workload,
            "sessions": self.num_sessions,
            "tokens": self.num_tokens,
            "speeds": dict(self.speeds),
            "gap": self.gap.as_json(),
        }


def contest(
    policies: Mapping[str, Policy], judged: ReplaySet, costs: CostTable, *, seed: int
) -> list[Row]:
    """Replay every policy; the first one's gap is to the second.

    The row of all workloads comes first, then each by name.
    """
    first, second, *_ = policies
    replays = {name: judged.replays(policy, costs) for name, policy in policies.items()}
    rows = []
    for workload in (EVERYTHING, *sorted({trace.workload for trace in judged.traces})):
        places = [i for i, t in enumerate(judged.traces) if workload in (EVERYTHING, t.workload)]
        traces = [judged.traces[i] for i in places]
        mine = {name: [runs[i] for i in places] for name, runs in replays.items()}
        rows.append(_row(workload, traces, mine, gap(mine[first], mine[second], traces, seed=seed)))
    return rows


def gap(
    system: Sequence[Priced], baseline: Sequence[Priced], traces: Sequence[Trace], *, seed: int
) -> Gap:
    """The gap between two policies' replays of the same traces."""
    unit, clusters = resampling_units(
        [trace.session_id for trace in traces], [trace.trace_id for trace in traces]
    )
    estimate = paired_speedup(_work(system), baseline=_work(baseline), clusters=clusters, seed=seed)
    return Gap(estimate, unit)


def _row(
    workload: str, traces: Sequence[Trace], replays: Mapping[str, Sequence[Replay]], gap: Gap
) -> Row:
    return Row(
        workload,
        len({trace.session_id for trace in traces}),
        sum(len(trace.output_token_ids) for trace in traces),
        {name: speed(summarize(runs)) for name, runs in replays.items()},
        gap,
    )


def _work(replays: Sequence[Priced]) -> Work:
    costs_ms = [run.cost_ms for run in replays]
    assert None not in costs_ms, "a replay without costs has no speed"
    seconds = np.array(costs_ms, np.float64) / 1e3
    return Work.of(tokens=[run.num_tokens for run in replays], seconds=seconds)
