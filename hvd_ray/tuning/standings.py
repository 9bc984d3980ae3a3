"""Every system replayed on every workload: does `hvd_cost` lose to any of them anywhere?

The bars: at least `LEAST_OVER_BEST` of the best other system on each workload, and at least
`LEAST_OF_ORACLE` of the oracle over all. Where the labels say what an EAGLE-3 head would have
drafted, rules and `hvd` systems fall back to it, as they do live.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_ray.config import Config
from hvd_ray.drafting.continuing import ContinuingNgramDrafter
from hvd_ray.payoff.cost import CostTable
from hvd_ray.payoff.estimator import PredictorEstimator
from hvd_ray.payoff.policy import AlwaysModel
from hvd_ray.systems import Parts, build_policy
from hvd_ray.traces.oracle import replay_oracle
from hvd_ray.traces.replay import Replay, ReplaySummary, replay, summarize
from hvd_ray.tuning.contest import EVERYTHING, Gap, gap
from hvd_ray.tuning.objective import speed
from hvd_ray.tuning.recorded import RecordedDrafter, ReplaySet

OURS, ORACLE, HEAD_ALONE = "hvd_cost", "oracle", "eagle3"
RIVALS = ("greedy", "ngram", "suffix", HEAD_ALONE, "rule_score", "rule_match", "hvd_tau")
LEAST_OVER_BEST = 0.99
LEAST_OF_ORACLE = 0.9

Replays = Mapping[str, Sequence[Replay]]


@dataclass(frozen=True, slots=True)
class Standing:
    """One workload, or all of them as ratios of sums."""

    workload: str
    num_sessions: int
    num_tokens: int
    summaries: Mapping[str, ReplaySummary]
    """By system, `hvd_cost` and the oracle among them."""
    gap: Gap
    """`hvd_cost` over the best other system, which was chosen on these very traces."""

    @property
    def speeds(self) -> dict[str, float]:
        """Tokens in the unit of the costs."""
        return {name: speed(summary) for name, summary in self.summaries.items()}

    @property
    def best_rival(self) -> str:
        rivals = {k: v for k, v in self.speeds.items() if k not in (OURS, ORACLE)}
        return max(rivals, key=rivals.__getitem__)

    @property
    def over_best(self) -> float:
        return self.speeds[OURS] / self.speeds[self.best_rival]

    @property
    def of_oracle(self) -> float:
        return self.speeds[OURS] / self.speeds[ORACLE]

    def as_json(self) -> dict[str, Any]:
        return {
            "workload": self.workload,
            "sessions": self.num_sessions,
            "tokens": self.num_tokens,
            "speeds": self.speeds,
            "emitted_per_pass": {n: s.emitted_per_pass for n, s in self.summaries.items()},
            "source_share": {
                name: {str(source): share for source, share in summary.source_share.items()}
                for name, summary in self.summaries.items()
            },
            "best_rival": self.best_rival,
            "over_best": self.over_best,
            "gap": self.gap.as_json(),
            "of_oracle": self.of_oracle,
        }


def standings(
    judged: ReplaySet,
    estimator: PredictorEstimator,
    costs: CostTable,
    config: Config,
    *,
    on_system: Callable[[str], None] = lambda _name: None,
) -> list[Standing]:
    """Replay all systems; the row over all workloads comes first, then each by name.

    Args:
        judged: held-out traces with their look-ups.
        estimator: of a predictor with a survival curve.
        costs: of a cycle, the head's drafts among them where the labels have a head.
        config: thresholds and the cache's settings.
        on_system: hears of every system that is about to be replayed.
    """
    replays: dict[str, list[Replay]] = {}
    for name in (*RIVALS, OURS, ORACLE):
        if name != HEAD_ALONE or all(judged.models):
            on_system(name)
            replays[name] = _replays(name, judged, estimator, costs, config)
    rows = []
    for workload in (EVERYTHING, *sorted({trace.workload for trace in judged.traces})):
        at = [i for i, t in enumerate(judged.traces) if workload in (EVERYTHING, t.workload)]
        mine = {name: [runs[i] for i in at] for name, runs in replays.items()}
        rows.append(_standing(workload, judged, at, mine, seed=config.seed))
    return rows


def _replays(
    name: str, judged: ReplaySet, estimator: PredictorEstimator, costs: CostTable, config: Config
) -> list[Replay]:
    if name == ORACLE:
        return [
            replay_oracle(trace, drafter=RecordedDrafter(record), costs=costs, model=model)
            for trace, record, model in zip(
                judged.traces, judged.records, judged.models, strict=True
            )
        ]
    if name == HEAD_ALONE:
        return judged.replays(AlwaysModel(), costs)
    policy = build_policy(name, config, Parts(estimator, costs))
    if name == "ngram":
        drafter = ContinuingNgramDrafter(config.drafting.ngram)
        return [replay(trace, policy, drafter=drafter, costs=costs) for trace in judged.traces]
    return judged.replays(policy, costs)


def _standing(
    workload: str, judged: ReplaySet, at: Sequence[int], mine: Replays, *, seed: int
) -> Standing:
    summaries = {name: summarize(runs) for name, runs in mine.items()}
    best = max(
        (name for name in summaries if name not in (OURS, ORACLE)),
        key=lambda name: speed(summaries[name]),
    )
    traces = [judged.traces[i] for i in at]
    return Standing(
        workload,
        len({trace.session_id for trace in traces}),
        sum(len(trace.output_token_ids) for trace in traces),
        summaries,
        gap(mine[OURS], mine[best], traces, seed=seed),
    )
