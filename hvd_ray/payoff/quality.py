"""How well a payoff is foretold, on positions that were held out.

"High" means that at least `HIGH_PAYOFF` draft tokens would be accepted. Three judges call it: the
predictor's expected length where it exceeds tau, as `hvd_tau` decides; a survival curve's own
P(accepted >= `HIGH_PAYOFF`) where it exceeds a half; and the cache's score where it exceeds tau.
The denominator is every position with a draft. Shapes: N positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hvd_ray.payoff.dataset import LabelSet
from hvd_ray.payoff.features import HIGH_PAYOFF, SCORE_INDEX
from hvd_ray.payoff.predictor import PayoffPredictor
from hvd_ray.types import Float32Array

Judge = Literal["predictor", "chance", "score"]
ALL_WORKLOADS = "all"
AIMED_RECALL = 0.8
AIMED_PRECISION = 0.88
"""Of high payoffs, together: the best of each that the paper reports."""
EVEN_CHANCE = 0.5
NUM_BINS = 10
"""Equally wide bins of the calibration error."""


@dataclass(frozen=True, slots=True)
class Quality:
    """One judge's estimates against the truth; None where there is nothing to divide by."""

    num_positions: int
    base_rate: float
    """Share of positions with a high payoff."""
    tau: float
    precision: float | None
    """Of the positions whose estimate exceeds tau, the share with a high payoff."""
    recall: float | None
    """Of the positions with a high payoff, the share whose estimate exceeds tau."""
    average_precision: float | None
    """Area under the precision-recall curve."""
    mean_abs_error: float | None
    """In tokens; None for a judge that gives no length."""
    best_f1: float | None
    """Greatest F1 of any threshold, chosen on these very positions."""
    best_f1_tau: float | None
    best_f1_precision: float | None
    best_f1_recall: float | None
    precision_at_recall: float | None
    """Greatest precision of any threshold whose recall is at least `AIMED_RECALL`."""
    recall_at_precision: float | None
    """Greatest recall of any threshold whose precision is at least `AIMED_PRECISION`; 0: none."""
    calibration_error: float | None = None
    """Expected calibration error of P(accepted >= HIGH_PAYOFF), over drafts that long."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class QualityRow:
    """One line of the table."""

    workload: str
    judge: Judge
    quality: Quality


def quality(estimate_N: Float32Array, accepted_N: NDArray[np.int32], *, tau: float) -> Quality:
    """Compare estimated with true accepted lengths of N >= 1 positions."""
    is_high_N = accepted_N >= HIGH_PAYOFF
    is_chosen_N = estimate_N > tau
    num_hits = int((is_high_N & is_chosen_N).sum())
    best = _best_f1(estimate_N, is_high_N)
    aimed = _at_the_aims(estimate_N, is_high_N)
    return Quality(
        num_positions=len(accepted_N),
        base_rate=float(is_high_N.mean()),
        tau=tau,
        precision=_ratio(num_hits, int(is_chosen_N.sum())),
        recall=_ratio(num_hits, int(is_high_N.sum())),
        average_precision=_average_precision(estimate_N, is_high_N),
        mean_abs_error=float(np.abs(estimate_N - accepted_N).mean()),
        best_f1=best[0],
        best_f1_tau=best[1],
        best_f1_precision=best[2],
        best_f1_recall=best[3],
        precision_at_recall=aimed[0],
        recall_at_precision=aimed[1],
    )


def judged(predictor: PayoffPredictor, labels: LabelSet, *, tau: float) -> tuple[QualityRow, ...]:
    """The predictor's judges beside the cache's own score, on all positions and by workload."""
    payoff = predictor.predict(labels.features_NF)
    rows = []
    for workload, mask_N in by_workload(labels):
        part = labels.select(mask_N)
        ours = quality(payoff.expected_B[mask_N], part.accepted_N, tau=tau)
        score_N = part.features_NF[:, SCORE_INDEX]
        rows.append(QualityRow(workload, "predictor", ours))
        if payoff.survival_BK is not None and payoff.survival_BK.shape[1] >= HIGH_PAYOFF:
            chance = _chance_quality(payoff.survival_BK[mask_N], part)
            rows.append(QualityRow(workload, "chance", chance))
        rows.append(QualityRow(workload, "score", quality(score_N, part.accepted_N, tau=tau)))
    return tuple(rows)


def average_precision(predictor: PayoffPredictor, labels: LabelSet) -> float | None:
    """How well it tells high payoffs from others: by their chance where it gives one, else by the
    expected length. None where no payoff is high."""
    payoff = predictor.predict(labels.features_NF)
    estimate_N = payoff.expected_B
    if payoff.survival_BK is not None and payoff.survival_BK.shape[1] >= HIGH_PAYOFF:
        estimate_N = payoff.survival_BK[:, HIGH_PAYOFF - 1]
    return _average_precision(estimate_N, labels.accepted_N >= HIGH_PAYOFF)


def calibration_error(prob_N: Float32Array, is_true_N: NDArray[np.bool_]) -> float | None:
    """Expected calibration error: mean |share true - mean probability| over bins, by their size."""
    if len(prob_N) == 0:
        return None
    bins = reliability_bins(prob_N, is_true_N)
    return sum(abs(b.share - b.predicted) * b.num_positions for b in bins) / len(prob_N)


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """Positions that were given about the same chance; one mark of a reliability diagram."""

    num_positions: int
    predicted: float
    """Their mean chance."""
    share: float
    """For how many it came true."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def reliability_bins(
    prob_N: Float32Array, is_true_N: NDArray[np.bool_]
) -> tuple[ReliabilityBin, ...]:
    """`NUM_BINS` equally wide bins of N >= 1 chances, those that are not empty."""
    bin_N = np.minimum((prob_N * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    counts = np.bincount(bin_N, minlength=NUM_BINS)
    chances = np.bincount(bin_N, weights=prob_N.astype(np.float64), minlength=NUM_BINS)
    hits = np.bincount(bin_N, weights=is_true_N, minlength=NUM_BINS)
    return tuple(
        ReliabilityBin(int(counts[i]), float(chances[i] / counts[i]), float(hits[i] / counts[i]))
        for i in np.flatnonzero(counts)
    )


def reliability(predictor: PayoffPredictor, labels: LabelSet) -> tuple[ReliabilityBin, ...]:
    """How far P(accepted >= `HIGH_PAYOFF`) can be believed, over the drafts that are long enough.

    Empty where there are none, or the predictor has no such chance.
    """
    long = labels.select(labels.draft_len_N >= HIGH_PAYOFF)
    if len(long) == 0 or predictor.num_survival < HIGH_PAYOFF:
        return ()
    survival_NK = predictor.predict(long.features_NF).survival_BK
    assert survival_NK is not None
    return reliability_bins(survival_NK[:, HIGH_PAYOFF - 1], long.accepted_N >= HIGH_PAYOFF)


def by_workload(labels: LabelSet) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """All positions, then those of each workload by name, as masks."""
    yield ALL_WORKLOADS, np.ones(len(labels), dtype=np.bool_)
    for name in np.unique(labels.workload_N):
        yield str(name), labels.workload_N == name


def _chance_quality(survival_NK: Float32Array, labels: LabelSet) -> Quality:
    """The curve's own word for a high payoff; calibration over the drafts that are long enough,
    since for the others the answer is known."""
    chance_N = survival_NK[:, HIGH_PAYOFF - 1]
    could_be_N = labels.draft_len_N >= HIGH_PAYOFF
    is_high_N = labels.accepted_N >= HIGH_PAYOFF
    return replace(
        quality(chance_N, labels.accepted_N, tau=EVEN_CHANCE),
        mean_abs_error=None,
        calibration_error=calibration_error(chance_N[could_be_N], is_high_N[could_be_N]),
    )


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _average_precision(estimate_N: Float32Array, is_high_N: NDArray[np.bool_]) -> float | None:
    from sklearn.metrics import average_precision_score

    return float(average_precision_score(is_high_N, estimate_N)) if is_high_N.any() else None


def _at_the_aims(
    estimate_N: Float32Array, is_high_N: NDArray[np.bool_]
) -> tuple[float | None, float | None]:
    """Best precision at the aimed recall, best recall at the aimed precision."""
    if not is_high_N.any():
        return None, None
    _, num_chosen, hits = _thresholds(estimate_N, is_high_N)
    precision, recall = hits / num_chosen, hits / hits[-1]
    is_precise = precision >= AIMED_PRECISION
    best_recall = float(recall[is_precise].max()) if is_precise.any() else 0.0
    return float(precision[recall >= AIMED_RECALL].max()), best_recall


def _thresholds(
    estimate_N: Float32Array, is_high_N: NDArray[np.bool_]
) -> tuple[Float32Array, NDArray[np.int64], NDArray[np.int64]]:
    """Estimates in falling order; positions above each threshold, and the hits among them."""
    order = np.argsort(-estimate_N, kind="stable")
    sorted_N, hits_N = estimate_N[order], np.cumsum(is_high_N[order])
    ends_tie_N = np.append(sorted_N[:-1] != sorted_N[1:], True)
    return sorted_N, np.flatnonzero(ends_tie_N) + 1, hits_N[ends_tie_N]


def _best_f1(
    estimate_N: Float32Array, is_high_N: NDArray[np.bool_]
) -> tuple[float | None, float | None, float | None, float | None]:
    """F1, tau, precision and recall at the best threshold `estimate > tau`."""
    if not is_high_N.any():
        return None, None, None, None
    sorted_N, num_chosen, hits = _thresholds(estimate_N, is_high_N)
    f1 = 2 * hits / (num_chosen + hits[-1])
    best = int(np.argmax(f1))
    size = int(num_chosen[best])
    lowest = float(sorted_N[size - 1])
    below = float(sorted_N[size]) if size < len(sorted_N) else lowest - 1.0
    precision, recall = float(hits[best] / size), float(hits[best] / hits[-1])
    return float(f1[best]), (lowest + below) / 2, precision, recall
