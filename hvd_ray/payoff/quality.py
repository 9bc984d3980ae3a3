"""How well a payoff is foretold, on positions that were held out.

"High" means that at least `HIGH_PAYOFF` draft tokens would be accepted; the estimate is called
high when it exceeds tau, as `hvd_tau` decides. The denominator is every position with a draft.
Shapes: N positions.
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

Judge = Literal["predictor", "score"]
ALL_WORKLOADS = "all"
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
    mean_abs_error: float
    """In tokens."""
    best_f1: float | None
    """Greatest F1 of any threshold, chosen on these very positions."""
    best_f1_tau: float | None
    best_f1_precision: float | None
    best_f1_recall: float | None
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
    )


def judged(predictor: PayoffPredictor, labels: LabelSet, *, tau: float) -> tuple[QualityRow, ...]:
    """The predictor beside the cache's own score, on all positions and by workload."""
    payoff = predictor.predict(labels.features_NF)
    rows = []
    for workload, mask_N in by_workload(labels):
        part = labels.select(mask_N)
        ours = quality(payoff.expected_B[mask_N], part.accepted_N, tau=tau)
        if payoff.survival_BK is not None:
            error = _high_payoff_calibration(payoff.survival_BK[mask_N], part)
            ours = replace(ours, calibration_error=error)
        score_N = part.features_NF[:, SCORE_INDEX]
        rows.append(QualityRow(workload, "predictor", ours))
        rows.append(QualityRow(workload, "score", quality(score_N, part.accepted_N, tau=tau)))
    return tuple(rows)


def calibration_error(prob_N: Float32Array, is_true_N: NDArray[np.bool_]) -> float | None:
    """Expected calibration error: mean |share true - mean probability| over bins, by their size."""
    if len(prob_N) == 0:
        return None
    bin_N = np.minimum((prob_N * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    gaps = np.bincount(bin_N, weights=is_true_N - prob_N.astype(np.float64), minlength=NUM_BINS)
    return float(np.abs(gaps).sum() / len(prob_N))


def by_workload(labels: LabelSet) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """All positions, then those of each workload by name, as masks."""
    yield ALL_WORKLOADS, np.ones(len(labels), dtype=np.bool_)
    for name in np.unique(labels.workload_N):
        yield str(name), labels.workload_N == name


def _high_payoff_calibration(survival_NK: Float32Array, labels: LabelSet) -> float | None:
    """Over the drafts that are long enough: for the others the answer is known."""
    if survival_NK.shape[1] < HIGH_PAYOFF:
        return None
    could_be_N = labels.draft_len_N >= HIGH_PAYOFF
    prob_N = survival_NK[could_be_N, HIGH_PAYOFF - 1]
    return calibration_error(prob_N, labels.accepted_N[could_be_N] >= HIGH_PAYOFF)


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _average_precision(estimate_N: Float32Array, is_high_N: NDArray[np.bool_]) -> float | None:
    from sklearn.metrics import average_precision_score

    return float(average_precision_score(is_high_N, estimate_N)) if is_high_N.any() else None


def _best_f1(
    estimate_N: Float32Array, is_high_N: NDArray[np.bool_]
) -> tuple[float | None, float | None, float | None, float | None]:
    """F1, tau, precision and recall at the best threshold `estimate > tau`."""
    if not is_high_N.any():
        return None, None, None, None
    order = np.argsort(-estimate_N, kind="stable")
    sorted_N, hits_N = estimate_N[order], np.cumsum(is_high_N[order])
    ends_tie_N = np.append(sorted_N[:-1] != sorted_N[1:], True)
    num_chosen = np.flatnonzero(ends_tie_N) + 1
    hits = hits_N[ends_tie_N]
    f1 = 2 * hits / (num_chosen + hits_N[-1])
    best = int(np.argmax(f1))
    size = int(num_chosen[best])
    lowest = float(sorted_N[size - 1])
    below = float(sorted_N[size]) if size < len(sorted_N) else lowest - 1.0
    precision, recall = float(hits[best] / size), float(hits[best] / hits_N[-1])
    return float(f1[best]), (lowest + below) / 2, precision, recall
