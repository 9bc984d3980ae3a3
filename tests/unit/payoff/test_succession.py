"""Who follows the shipped predictor: one that is no worse on the same, and enough, positions."""

from dataclasses import replace

import numpy as np
import pytest

from hvd_ray.payoff.dataset import read_labels_table
from hvd_ray.payoff.features import FEATURE_NAMES, HIGH_PAYOFF
from hvd_ray.payoff.predictor import Payoff
from hvd_ray.payoff.succession import MIN_POSITIONS, Succession, succession
from tests.unit.payoff.label_tables import label_table


class ByFeature:
    """Foretells by one feature; the chances are its, the expected length says nothing."""

    def __init__(self, feature: str, *, num_survival: int = 64) -> None:
        self.column = FEATURE_NAMES.index(feature)
        self.num_survival = num_survival

    def predict(self, features_BF: np.ndarray) -> Payoff:
        value_B = features_BF[:, self.column] / 64
        if not self.num_survival:
            return Payoff(value_B)
        survival_BK = np.repeat(value_B[:, None], self.num_survival, axis=1)
        return Payoff(np.zeros(len(features_BF), np.float32), survival_BK)


GOOD, BAD = ByFeature("cache_score"), ByFeature("recent_accepted_1")
EVEN = Succession(MIN_POSITIONS, 0.7, 0.7, loses_curve=False)


def test_both_are_judged_on_the_same_positions_by_their_chances() -> None:
    held_out = read_labels_table(label_table(4500)).test
    better, worse = succession(GOOD, BAD, held_out), succession(BAD, GOOD, held_out)
    assert (better.is_due, worse.is_due) == (True, False)
    assert better.average_precision == worse.shipped_average_precision
    assert (worse.average_precision or 1) < (worse.shipped_average_precision or 0)
    assert better.num_positions == len(held_out) > MIN_POSITIONS
    few = succession(GOOD, BAD, held_out.select(np.arange(len(held_out)) < 300))
    assert not few.is_due
    assert "1,000 held-out positions" in few.obstacles[0]


def test_the_curve_of_the_shipped_one_is_not_lost() -> None:
    held_out = read_labels_table(label_table(4500)).test
    lost = succession(ByFeature("cache_score", num_survival=0), BAD, held_out)
    assert (lost.average_precision or 0) > (lost.shipped_average_precision or 1)
    assert not lost.is_due
    assert "no survival curve" in lost.obstacles[0]


def test_as_good_is_good_enough() -> None:
    assert EVEN.is_due
    assert EVEN.obstacles == ()
    assert EVEN.figures == (
        "average precision 0.700, the shipped one's 0.700, on 1,000 held-out positions"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"average_precision": 0.699},
        {"num_positions": MIN_POSITIONS - 1},
        {"average_precision": None, "shipped_average_precision": None},
    ],
)
def test_otherwise_it_is_not_due(changes: dict[str, float | None]) -> None:
    assert not replace(EVEN, **changes).is_due  # type: ignore[arg-type]


def test_without_one_high_payoff_there_is_no_figure() -> None:
    held_out = read_labels_table(label_table(4500)).test
    low = held_out.select(held_out.accepted_N < HIGH_PAYOFF)
    found = succession(GOOD, BAD, low)
    assert found.average_precision is None
    assert found.figures.startswith("no accepted length of 6 or more on ")
