"""From replays to rows: emitted per pass and speed-up by workload, with intervals by session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvd_ray.advise.contestants import Contestant, mean_rows
from hvd_ray.bench.stats import RatioEstimate, Work, paired_speedup, resampling_units
from hvd_ray.payoff.cost_load import LoadedCosts
from hvd_ray.traces.replay import Replay, summarize
from hvd_ray.traces.schema import Trace
from hvd_ray.types import Source

ALL = "all"


@dataclass(frozen=True, slots=True)
class Row:
    """One system on one workload; columns as in the result's `definitions`."""

    workload: str
    system: str
    uses_head: bool
    is_assumed: bool
    sessions: int
    traces: int
    tokens: int
    target_passes: int
    emitted_per_pass: float
    emitted_per_pass_ci: tuple[float, float] | None
    speedup: float
    speedup_ci: tuple[float, float] | None
    ci_unit: str
    drafted: int
    accepted: int
    source_share: Mapping[str, float]
    precision: float | None
    recall: float | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def judge(
    contestant: Contestant,
    replays: Sequence[Replay],
    traces: Sequence[Trace],
    *,
    costs: LoadedCosts,
    is_assumed: bool,
    seed: int,
) -> list[Row]:
    """The row over all workloads, then each workload's.

    Args:
        contestant: the system that was replayed.
        replays: one for each of `traces`, in their order.
        traces: the judged ones.
        costs: what the cycles take.
        is_assumed: whether something that the figures rest on is assumed.
        seed: of the bootstrap.
    """
    beside = mean_rows(replays)
    workloads = list(dict.fromkeys(trace.workload for trace in traces))
    rows = []
    for workload in (ALL, *sorted(workloads)):
        places = [i for i, t in enumerate(traces) if workload in (ALL, t.workload)]
        rows.append(
            _row(
                workload,
                contestant,
                [replays[i] for i in places],
                [traces[i] for i in places],
                costs=costs,
                beside=beside,
                is_assumed=is_assumed,
                seed=seed,
            )
        )
    return rows


def _row(
    workload: str,
    contestant: Contestant,
    replays: Sequence[Replay],
    traces: Sequence[Trace],
    *,
    costs: LoadedCosts,
    beside: float,
    is_assumed: bool,
    seed: int,
) -> Row:
    summary = summarize(replays)
    unit, clusters = resampling_units([t.session_id for t in traces], [t.trace_id for t in traces])
    passes = _ratio(replays, traces, clusters, seed=seed)
    speed = _speedup(replays, traces, clusters, costs=costs, beside=beside, seed=seed)
    shares = {str(source): share for source, share in sorted(summary.source_share.items())}
    return Row(
        workload=workload,
        system=contestant.name,
        uses_head=contestant.uses_head,
        is_assumed=is_assumed,
        sessions=len({trace.session_id for trace in traces}),
        traces=len(traces),
        tokens=summary.num_tokens,
        target_passes=summary.num_cycles,
        emitted_per_pass=summary.emitted_per_pass,
        emitted_per_pass_ci=_interval(passes),
        speedup=speed.ratio,
        speedup_ci=_interval(speed),
        ci_unit=unit,
        drafted=summary.drafted,
        accepted=summary.accepted,
        source_share={source: round(share, 6) for source, share in shares.items()},
        precision=summary.precision,
        recall=summary.recall,
    )


def _tokens(traces: Sequence[Trace]) -> list[int]:
    return [len(trace.output_token_ids) for trace in traces]


def _ratio(
    replays: Sequence[Replay], traces: Sequence[Trace], clusters: Sequence[str], *, seed: int
) -> RatioEstimate:
    """Emitted per pass as a ratio to plain decoding, which emits one."""
    tokens = _tokens(traces)
    passes = [len(run.steps) for run in replays]
    return paired_speedup(
        Work.of(tokens=tokens, seconds=passes),
        baseline=Work.of(tokens=tokens, seconds=tokens),
        clusters=clusters,
        seed=seed,
    )


def _speedup(
    replays: Sequence[Replay],
    traces: Sequence[Trace],
    clusters: Sequence[str],
    *,
    costs: LoadedCosts,
    beside: float,
    seed: int,
) -> RatioEstimate:
    tokens = _tokens(traces)
    plain_ms = costs.cost_ms(Source.NONE, 1)
    return paired_speedup(
        Work.of(
            tokens=tokens, seconds=[costs.cycles_ms(r.steps, mean_rows=beside) for r in replays]
        ),
        baseline=Work.of(tokens=tokens, seconds=[plain_ms * count for count in tokens]),
        clusters=clusters,
        seed=seed,
    )


def _interval(estimate: RatioEstimate) -> tuple[float, float] | None:
    return None if estimate.is_degenerate else (estimate.low, estimate.high)
