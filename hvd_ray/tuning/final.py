"""The end of a sweep: the best trial on held-out test sessions, and tau against speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hvd_ray.payoff.cost import CostTable
from hvd_ray.payoff.estimator import PredictorEstimator
from hvd_ray.payoff.policy import AlwaysCache, NeverDraft, Policy, ScoreRule, ThresholdPolicy
from hvd_ray.payoff.predictor import MlpPredictor
from hvd_ray.payoff.quality import judged
from hvd_ray.traces.replay import summarize
from hvd_ray.tuning.contest import EVERYTHING, contest
from hvd_ray.tuning.objective import TrialInputs, speed, summaries
from hvd_ray.tuning.recorded import ReplaySet
from hvd_ray.tuning.space import TrialSettings

PAPER_TAU = 6.0
BEST, FIXED = "best", "tau_6"
"""The best trial, and its predictor under the paper's fixed threshold."""


def test_rows(
    settings: TrialSettings,
    estimator: PredictorEstimator,
    test: ReplaySet,
    costs: CostTable,
    *,
    seed: int,
) -> list[dict[str, Any]]:
    """The best trial against fixed tau and the plain policies, on test sessions."""
    policies: dict[str, Policy] = {
        BEST: settings.decider(estimator, costs),
        FIXED: ThresholdPolicy(estimator, PAPER_TAU),
        "suffix": AlwaysCache(),
        "rule_score": ScoreRule(),
        "greedy": NeverDraft(),
    }
    return [row.as_json() for row in contest(policies, test, costs, seed=seed)]


def tau_curves(
    settings: TrialSettings,
    estimator: PredictorEstimator,
    inputs: TrialInputs,
    *,
    taus: Sequence[float],
    on_tau: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Replayed speed of the best predictor at every tau, by workload, on validation sessions."""

    def speeds(policy: Policy) -> dict[str, float]:
        replays = inputs.validation.replays(policy, inputs.costs)
        by_workload = summaries(inputs.validation.traces, replays)
        return {
            name: speed(summary)
            for name, summary in {EVERYTHING: summarize(replays), **by_workload}.items()
        }

    at_tau = []
    for tau in taus:
        at_tau.append(speeds(ThresholdPolicy(estimator, tau)))
        on_tau()
    level = {
        "greedy": speeds(NeverDraft()),
        "suffix": speeds(AlwaysCache()),
        BEST: speeds(settings.decider(estimator, inputs.costs)),
    }
    return {
        "taus": list(taus),
        "workloads": {
            name: {
                "speeds": [found[name] for found in at_tau],
                **{policy: found[name] for policy, found in level.items()},
            }
            for name in at_tau[0]
        },
    }


def with_card(
    predictor: MlpPredictor,
    settings: TrialSettings,
    inputs: TrialInputs,
    *,
    test_labels: Any,
    about: Mapping[str, Any],
) -> MlpPredictor:
    """The predictor with a card that says how it was trained and how well it foretells.

    Args:
        test_labels: a `payoff.dataset.LabelSet` of the test sessions.
        about: provenance of the sweep.
    """
    training = {
        **asdict(settings.training(inputs.seed)),
        "hidden": [settings.width] * settings.depth,
        "without": settings.without,
        "policy": settings.flat(),
        "num_train_positions": len(inputs.labels.train),
        "num_test_positions": len(test_labels),
        "provenance": dict(about),
    }
    rows = judged(predictor, test_labels, tau=settings.tau)
    metrics = {f"{row.judge}/{row.workload}": row.quality.as_dict() for row in rows}
    card = predictor.card.model_copy(update={"training": training, "metrics": metrics})
    return MlpPredictor(predictor.network, card)
