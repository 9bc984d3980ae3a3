"""What a trial does, without Ray: train on the fit sessions, replay the validation sessions.

The objective is the replayed speed over all validation sessions, a ratio of sums: tokens emitted
over what the cost table says their cycles take.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from time import perf_counter

from hvd_ray.payoff.cost import CostTable
from hvd_ray.payoff.dataset import Labels
from hvd_ray.payoff.estimator import PredictorEstimator
from hvd_ray.payoff.features import FeatureExtractor
from hvd_ray.payoff.predictor import MlpPredictor
from hvd_ray.payoff.token_classes import TokenClasses
from hvd_ray.payoff.training import train_predictor
from hvd_ray.traces.replay import Replay, ReplaySummary, summarize
from hvd_ray.traces.schema import Trace
from hvd_ray.tuning.recorded import ReplaySet
from hvd_ray.tuning.space import Asha, TrialSettings

SPEED = "speed"
"""The objective's name among a trial's metrics; by workload it is `speed/WORKLOAD`."""
EPOCH = "epoch"

Metrics = Mapping[str, float | None]
Report = Callable[[MlpPredictor, Metrics], None]


@dataclass(frozen=True, slots=True, eq=False)
class TrialInputs:
    """What every trial of a sweep has in common."""

    labels: Labels
    """`train` to learn from; `test` holds the validation sessions' labels."""
    validation: ReplaySet
    classes: TokenClasses
    costs: CostTable
    asha: Asha
    seed: int
    model: str
    tokenizer_sha: str


def run_trial(settings: TrialSettings, inputs: TrialInputs, report: Report) -> None:
    """Train, and report the predictor and its figures after each rung and the last epoch."""
    rungs = inputs.asha.rungs(settings.epochs)
    losses: list[float] = []
    started = perf_counter()

    def on_epoch(epoch: int, make: Callable[[], MlpPredictor]) -> None:
        if epoch not in rungs:
            return
        trained_s = perf_counter() - started
        predictor = make()
        figures = judge(predictor, settings, inputs)
        seconds = {"train_s": trained_s, "replay_s": perf_counter() - started - trained_s}
        report(predictor, {EPOCH: epoch, "train_loss": losses[-1], **figures, **seconds})

    train_predictor(
        inputs.labels,
        settings.training(inputs.seed),
        model=inputs.model,
        tokenizer_sha=inputs.tokenizer_sha or None,
        log_metrics=lambda figures, _epoch: losses.append(figures["train_loss"]),
        on_epoch=on_epoch,
    )


def judge(
    predictor: MlpPredictor, settings: TrialSettings, inputs: TrialInputs
) -> dict[str, float | None]:
    """The figures of a predictor under a trial's policy, on the validation sessions."""
    policy = settings.decider(
        PredictorEstimator(predictor, FeatureExtractor(inputs.classes)), inputs.costs
    )
    replays = inputs.validation.replays(policy, inputs.costs)
    whole = summarize(replays)
    by_workload = summaries(inputs.validation.traces, replays)
    return {
        SPEED: speed(whole),
        "emitted_per_pass": whole.emitted_per_pass,
        "accepted_share": whole.accepted / whole.drafted if whole.drafted else None,
        "precision": whole.precision,
        "recall": whole.recall,
        "num_params": float(len(predictor.network.params)),
        **{f"{SPEED}/{name}": speed(summary) for name, summary in by_workload.items()},
    }


def summaries(traces: Iterable[Trace], replays: Iterable[Replay]) -> dict[str, ReplaySummary]:
    """Sums and ratios for each workload by name; `replays[i]` belongs to `traces[i]`."""
    groups: dict[str, list[Replay]] = defaultdict(list)
    for trace, run in zip(traces, replays, strict=True):
        groups[trace.workload].append(run)
    return {name: summarize(groups[name]) for name in sorted(groups)}


def speed(summary: ReplaySummary) -> float:
    """In the unit of the pricing."""
    tokens_per_second = summary.tokens_per_second
    assert tokens_per_second is not None, "a replay without costs has no speed"
    return tokens_per_second
