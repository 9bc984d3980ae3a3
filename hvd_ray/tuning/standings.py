"""Every system replayed on every workload: does `hvd_cost` lose to any of them anywhere?

The bars: at least `LEAST_OVER_BEST` of the best other system on each workload, and at least
`LEAST_OF_ORACLE` of the oracle over all. Where the labels say what an EAGLE-3 head would have
drafted, rules and `hvd` systems fall back to it, as they do live.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hvd_ray.config import Config
from hvd_ray.drafting.continuing import ContinuingNgramDrafter
from hvd_ray.payoff.cost import CostTable
from hvd_ray.payoff.estimator import PredictorEstimator
from hvd_ray.payoff.policy import AlwaysModel
from hvd_ray.pipelines.spread import IN_PROCESS, OnDone, Workers, nobody
from hvd_ray.systems import Parts, build_policy
from hvd_ray.traces.oracle import replay_oracle
from hvd_ray.traces.replay import Replay, ReplaySummary, Tally, add_up, replay
from hvd_ray.tuning.contest import EVERYTHING, Gap, gap
from hvd_ray.tuning.objective import speed
from hvd_ray.tuning.pieces import even_pieces
from hvd_ray.tuning.recorded import RecordedDrafter, ReplaySet

OURS, ORACLE, HEAD_ALONE = "hvd_cost", "oracle", "eagle3"
RIVALS = ("greedy", "ngram", "suffix", HEAD_ALONE, "rule_score", "rule_match", "hvd_tau")
LEAST_OVER_BEST = 0.99
LEAST_OF_ORACLE = 0.9

Tallies = Mapping[str, Sequence[Tally]]


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
    workers: Workers = IN_PROCESS,
    on_done: OnDone = nobody,
) -> list[Standing]:
    """Replay all systems; the row over all workloads comes first, then each by name.

    Args:
        judged: held-out traces with their look-ups.
        estimator: of a predictor with a survival curve.
        costs: of a cycle, the head's drafts among them where the labels have a head.
        config: thresholds and the cache's settings.
        workers: who replays; how many they are does not change the rows.
        on_done: hears of every piece that has been replayed.
    """
    names = [n for n in (*RIVALS, OURS, ORACLE) if n != HEAD_ALONE or all(judged.models)]
    parts = even_pieces(judged.traces, workers.num)
    pieces = [(name, places) for name in names for places in parts]
    found = workers.map(
        _piece, pieces, shared=_Shared(judged, estimator, costs, config), on_done=on_done
    )
    tallies: dict[str, list[Tally]] = {name: [] for name in names}
    for (name, _), runs in zip(pieces, found, strict=True):
        tallies[name] += runs
    rows = []
    for workload in (EVERYTHING, *sorted({trace.workload for trace in judged.traces})):
        at = [i for i, t in enumerate(judged.traces) if workload in (EVERYTHING, t.workload)]
        mine = {name: [runs[i] for i in at] for name, runs in tallies.items()}
        rows.append(_standing(workload, judged, at, mine, seed=config.seed))
    return rows


class _Shared(NamedTuple):
    """What every replay needs."""

    judged: ReplaySet
    estimator: PredictorEstimator
    costs: CostTable
    config: Config


def _piece(shared: _Shared, piece: tuple[str, slice]) -> list[Tally]:
    """Some of the traces under one system: no policy keeps anything from trace to trace."""
    name, places = piece
    judged = shared.judged.part(places)
    runs = _replays(name, judged, shared.estimator, shared.costs, shared.config)
    return [Tally.of(run) for run in runs]


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
    workload: str, judged: ReplaySet, at: Sequence[int], mine: Tallies, *, seed: int
) -> Standing:
    summaries = {name: add_up(runs) for name, runs in mine.items()}
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
