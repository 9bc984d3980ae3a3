"""Kinds of predictors against each other on the same held-out sessions, boosted trees among them.

scikit-learn's histogram boosting answers one question only, whether the accepted length is high;
it is the ceiling that the networks are held against, and takes longer to ask than they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from hvd_ray.payoff.dataset import Labels
from hvd_ray.payoff.features import HIGH_PAYOFF, SCORE_INDEX
from hvd_ray.payoff.quality import ALL_WORKLOADS, EVEN_CHANCE, Quality, calibration_error, quality
from hvd_ray.payoff.training import train_predictor
from hvd_ray.payoff.training_settings import TrainingSettings
from hvd_ray.types import Float32Array

NUM_ASKED = 60
TREES: dict[str, Any] = {
    "max_iter": 300,
    "learning_rate": 0.05,
    "max_leaf_nodes": 31,
    "min_samples_leaf": 100,
    "l2_regularization": 1.0,
    "early_stopping": False,
}


@dataclass(frozen=True, slots=True)
class Rival:
    """One kind of predictor; None: not known, or nothing to ask."""

    name: str
    precision: float | None
    recall: float | None
    precision_at_recall: float | None
    recall_at_precision: float | None
    average_precision: float | None
    calibration_error: float | None
    ask_us: float | None
    """Median microseconds of judging one draft from its features."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def rivals(
    labels: Labels,
    settings: TrainingSettings,
    *,
    on_row: Callable[[Rival], None] = lambda _row: None,
) -> list[Rival]:
    """Train each kind and judge it on the test sessions, all workloads together.

    Args:
        labels: split by session.
        settings: of the survival networks; the others share epochs, batch and seed.
        on_row: hears of every row as it is known.
    """
    rows = []
    for row in _rows(labels, settings):
        rows.append(row)
        on_row(row)
    return rows


def _rows(labels: Labels, settings: TrainingSettings) -> Iterator[Rival]:
    test = labels.test
    score_N = test.features_NF[:, SCORE_INDEX]
    yield _rival("the cache's score", quality(score_N, test.accepted_N, tau=settings.tau), None)
    paper = replace(settings, kind="mlp", hidden=(256, 256), members=1, dropout=None)
    yield _network(f"mlp, {_words(paper)}", labels, paper, "predictor")
    one = replace(settings, kind="survival", hidden=(256, 256), members=1)
    yield _network(f"survival, {_words(one)}", labels, one, "chance")
    if (settings.hidden, settings.members) != (one.hidden, one.members):
        yield _network(f"survival, {_words(settings)}", labels, settings, "chance")
    yield _trees(labels, settings)


def _words(settings: TrainingSettings) -> str:
    shape = "x".join(map(str, settings.hidden)) or "no hidden layer"
    return shape if settings.members == 1 else f"{settings.members} of {shape}"


def _network(name: str, labels: Labels, settings: TrainingSettings, judge: str) -> Rival:
    trained = train_predictor(labels, settings)
    row = next(r for r in trained.rows if (r.workload, r.judge) == (ALL_WORKLOADS, judge))
    features_1F = np.ascontiguousarray(labels.test.features_NF[:1])
    return _rival(name, row.quality, _ask_us(lambda: trained.predictor.predict(features_1F)))


def _trees(labels: Labels, settings: TrainingSettings) -> Rival:
    from sklearn.ensemble import HistGradientBoostingClassifier

    train, test = labels.train, labels.test
    model = HistGradientBoostingClassifier(random_state=settings.seed, **TREES)
    model.fit(train.features_NF, train.accepted_N >= HIGH_PAYOFF)
    chance_N: Float32Array = model.predict_proba(test.features_NF)[:, 1].astype(np.float32)
    could_be_N = test.draft_len_N >= HIGH_PAYOFF
    is_high_N = test.accepted_N >= HIGH_PAYOFF
    found = replace(
        quality(chance_N, test.accepted_N, tau=EVEN_CHANCE),
        calibration_error=calibration_error(chance_N[could_be_N], is_high_N[could_be_N]),
    )
    ask_us = _ask_us(lambda: model.predict_proba(test.features_NF[:1]))
    return _rival(f"boosted trees, {TREES['max_iter']}", found, ask_us)


def _ask_us(ask: Callable[[], object]) -> float:
    times_s = []
    for _ in range(NUM_ASKED):
        started = perf_counter()
        ask()
        times_s.append(perf_counter() - started)
    return round(1e6 * float(np.median(times_s)), 1)


def _rival(name: str, found: Quality, ask_us: float | None) -> Rival:
    return Rival(
        name,
        found.precision,
        found.recall,
        found.precision_at_recall,
        found.recall_at_precision,
        found.average_precision,
        found.calibration_error,
        ask_us,
    )
