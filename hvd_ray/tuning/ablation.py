"""What each group of features adds: one predictor without each, on the same held-out sessions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from hvd_ray.payoff.cost import CostTable
from hvd_ray.payoff.cost_policy import CostPolicy
from hvd_ray.payoff.dataset import Labels
from hvd_ray.payoff.estimator import PredictorEstimator
from hvd_ray.payoff.features import (
    FEATURE_GROUPS,
    NOTHING,
    FeatureExtractor,
    hidden_features,
)
from hvd_ray.payoff.policy import Policy, ThresholdPolicy
from hvd_ray.payoff.predictor import MlpPredictor
from hvd_ray.payoff.quality import ALL_WORKLOADS
from hvd_ray.payoff.token_classes import TokenClasses
from hvd_ray.payoff.training import TrainedPredictor, train_predictor
from hvd_ray.payoff.training_settings import TrainingSettings
from hvd_ray.traces.replay import summarize
from hvd_ray.tuning.objective import speed
from hvd_ray.tuning.recorded import ReplaySet


@dataclass(frozen=True, slots=True)
class ReplayJudge:
    """Test sessions to decode in thought, and what a cycle costs."""

    test: ReplaySet
    classes: TokenClasses
    costs: CostTable

    def speed(self, predictor: MlpPredictor, tau: float) -> float:
        """Tokens per second under `hvd_cost`, or `hvd_tau` for a predictor without a curve."""
        estimator = PredictorEstimator(predictor, FeatureExtractor(self.classes))
        policy: Policy = ThresholdPolicy(estimator, tau)
        if estimator.has_survival:
            policy = CostPolicy(estimator, self.costs)
        return speed(summarize(self.test.replays(policy, self.costs)))


@dataclass(frozen=True, slots=True)
class AblationRow:
    """A predictor that did not see one group; None: not known."""

    without: str
    num_features: int
    precision: float | None
    recall: float | None
    precision_at_recall: float | None
    average_precision: float | None
    speed: float | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def ablate(
    labels: Labels,
    settings: TrainingSettings,
    *,
    judge: ReplayJudge | None = None,
    on_row: Callable[[AblationRow], None] = lambda _row: None,
) -> list[AblationRow]:
    """Train with all groups, then without each; the first row is the whole.

    Args:
        labels: split by session; quality is that of the test split, all workloads together.
        settings: the same for every row, the seed too.
        judge: replays the test sessions; without one the rows have no speed.
        on_row: hears of every row as it is known.
    """
    rows = []
    for group in (NOTHING, *FEATURE_GROUPS):
        trained = train_predictor(labels, replace(settings, without=group))
        row = _row(trained, group, len(hidden_features(group)))
        if judge is not None:
            row = replace(row, speed=judge.speed(trained.predictor, settings.tau))
        rows.append(row)
        on_row(row)
    return rows


def _row(trained: TrainedPredictor, group: str, num_masked: int) -> AblationRow:
    kind = trained.predictor.card.kind
    found = trained.quality_of(ALL_WORKLOADS, "chance" if kind == "survival" else "predictor")
    return AblationRow(
        group,
        len(trained.predictor.network.low_F) - num_masked,
        found["precision"],
        found["recall"],
        found["precision_at_recall"],
        found["average_precision"],
        None,
    )
