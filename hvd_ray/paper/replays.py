"""What needs no timing: outputs replayed at every tau and cache size, and by the predictor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import numpy as np

from hvd_ray.advise.contestants import Contestant, Field
from hvd_ray.advise.filling import filling_of
from hvd_ray.advise.judging import ALL, judge
from hvd_ray.advise.lookups import JudgedTrace, Walked, walk
from hvd_ray.advise.material import Roles
from hvd_ray.advise.options import TAUS
from hvd_ray.advise.result import quality_json
from hvd_ray.bench.cells import Sample
from hvd_ray.config import Config
from hvd_ray.parts.payoff import PayoffSource
from hvd_ray.payoff.cost import RowCosts
from hvd_ray.payoff.cost_load import LoadedCosts
from hvd_ray.payoff.dataset import TEST, label_set
from hvd_ray.payoff.estimator import PredictorEstimator
from hvd_ray.payoff.features import HIGH_PAYOFF, FeatureExtractor
from hvd_ray.payoff.policy import AlwaysCache, ThresholdPolicy
from hvd_ray.payoff.quality import judged as judged_rows
from hvd_ray.payoff.token_classes import TokenClasses
from hvd_ray.pipelines.shards import RunProgress
from hvd_ray.pipelines.spread import IN_PROCESS, OnDone, Workers
from hvd_ray.traces.schema import Trace, cut_at_loop

NUM_BINS = 10
_START = datetime(2000, 1, 1, tzinfo=UTC)


def traces_of(samples: Sequence[Sample], *, context_length: int) -> list[Trace]:
    """Plain decoding's outputs as traces, loops cut, one cache a workload as the bench has it."""
    plain = [s for s in samples if s.arm.is_baseline and s.completion.token_ids]
    traces = [
        Trace(
            trace_id=sample.request.request_id,
            prompt_id=sample.prompt.id,
            workload=sample.prompt.workload,
            family=sample.prompt.family,
            scope=sample.prompt.workload,
            session_id=f"{sample.prompt.workload}/{sample.prompt.session_id or sample.prompt.id}",
            created_at=_START + timedelta(seconds=number),
            model="",
            tokenizer_sha="",
            prompt_token_ids=sample.request.prompt_token_ids,
            output_token_ids=sample.completion.token_ids,
            finish_reason=sample.completion.finish_reason,
            sampling=sample.request.sampling,
            context_length=context_length,
            split=TEST,
        )
        for number, sample in enumerate(plain)
    ]
    return [trace for trace in map(cut_at_loop, traces) if trace.output_token_ids]


def replays_json(
    traces: Sequence[Trace],
    *,
    classes: TokenClasses,
    payoff: PayoffSource | None,
    costs: RowCosts | None,
    config: Config,
    progress: RunProgress,
    workers: Workers = IN_PROCESS,
) -> dict[str, Any]:
    """Cache growth and, with a predictor, its quality, its reliability and speed against tau.

    How many workers there are does not change what is found.
    """
    progress.stage("replaying")
    extractor = FeatureExtractor(classes)
    roles = Roles(frozenset(), frozenset(trace.trace_id for trace in traces))
    walked = walk(
        traces,
        roles,
        suffix=config.drafting.suffix,
        extractor=extractor,
        on_trace=lambda trace: progress.stage(f"replaying {trace.workload}"),
    )
    loaded = LoadedCosts(costs if costs is not None else RowCosts((1,), (1.0,)))
    suffix = Contestant("suffix", AlwaysCache())
    with_all = Field(walked.judged, None, config).replays(suffix, loaded)
    filling = filling_of(
        traces,
        walked.judged,
        with_all=with_all,
        suffix=config.drafting.suffix,
        workers=workers,
        on_done=_told(progress, "replaying with caches of several sizes"),
    )
    found: dict[str, Any] = {"filling": filling.as_json(), "costs_are_measured": costs is not None}
    if payoff is not None:
        estimator = PredictorEstimator(payoff.predictor, extractor)
        shared = _Shared(walked.judged, estimator, loaded, config)
        told = _told(progress, "replaying hvd_tau")
        found |= _of_predictor(walked, payoff, shared, workers, told)
    return found


class _Shared(NamedTuple):
    """What the replays at every tau need."""

    judged: tuple[JudgedTrace, ...]
    estimator: PredictorEstimator
    costs: LoadedCosts
    config: Config


def _told(progress: RunProgress, text: str) -> OnDone:
    progress.stage(text)
    return lambda done, total: progress.stage(f"{text}: {done} of {total}")


def _of_predictor(
    walked: Walked,
    payoff: PayoffSource,
    shared: _Shared,
    workers: Workers,
    told: OnDone,
) -> dict[str, Any]:
    labels = label_set(walked.labels, split=TEST)
    if len(labels) == 0:
        return {}
    rows = judged_rows(payoff.predictor, labels, tau=shared.config.policy.tau)
    expected_N = payoff.predictor.predict(labels.features_NF).expected_B
    return {
        "predictor": quality_json(rows),
        "reliability": _reliability(expected_N, labels.accepted_N),
        "taus": workers.map(_at_tau, TAUS, shared=shared, on_done=told),
    }


def _reliability(expected_N: Any, accepted_N: Any) -> list[dict[str, float]]:
    """Mean expected and true payoff in classes of as many positions each."""
    order = np.argsort(expected_N, kind="stable")
    return [
        {
            "positions": len(part),
            "expected": float(expected_N[part].mean()),
            "accepted": float(accepted_N[part].mean()),
            "high_share": float((accepted_N[part] >= HIGH_PAYOFF).mean()),
        }
        for part in np.array_split(order, NUM_BINS)
        if len(part)
    ]


def _at_tau(shared: _Shared, tau: float) -> dict[str, Any]:
    judged, estimator, costs, config = shared
    contestant = Contestant("hvd_tau", ThresholdPolicy(estimator, tau))
    replays = Field(judged, None, config).replays(contestant, costs)
    traces = [item.trace for item in judged]
    rows = judge(contestant, replays, traces, costs=costs, is_assumed=False, seed=config.seed)
    whole = next(asdict(row) for row in rows if row.workload == ALL)
    kept = ("emitted_per_pass", "speedup", "precision", "recall", "source_share")
    return {
        "tau": tau,
        **{name: whole[name] for name in kept},
        "workloads": {row.workload: row.speedup for row in rows if row.workload != ALL},
    }
