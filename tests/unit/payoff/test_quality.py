"""The figures of quality, by hand and against exhaustive search."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_ray.payoff.quality import calibration_error, quality

few = st.lists(
    st.tuples(st.integers(0, 12), st.sampled_from([0.0, 1.0, 2.5, 6.0, 6.5, 9.0])),
    min_size=1,
    max_size=12,
)


def test_by_hand() -> None:
    accepted_N = np.array([0, 6, 7, 2, 9], dtype=np.int32)
    estimate_N = np.array([1, 6.5, 4, 8, 6], dtype=np.float32)
    found = quality(estimate_N, accepted_N, tau=6.0)
    assert found.base_rate == pytest.approx(3 / 5)
    assert found.precision == 1 / 2  # 6.5 hits, 8 misses; 6 does not exceed 6
    assert found.recall == 1 / 3
    assert found.mean_abs_error == pytest.approx((1 + 0.5 + 3 + 6 + 3) / 5)
    assert found.best_f1 == pytest.approx(2 * 3 / (4 + 3))  # everything above 1
    assert found.best_f1_tau == pytest.approx(2.5)
    assert (found.best_f1_precision, found.best_f1_recall) == (3 / 4, 1)
    assert found.precision_at_recall == 3 / 4  # recall 2/3 does not reach 0.80
    assert found.recall_at_precision == 0  # the highest estimate is a miss


def test_the_aims_are_read_off_the_whole_curve() -> None:
    accepted_N = np.array([9] * 8 + [0, 0] + [9] * 2 + [0] * 4, dtype=np.int32)
    estimate_N = np.linspace(1, 0, len(accepted_N), dtype=np.float32)
    found = quality(estimate_N, accepted_N, tau=6.0)
    assert found.precision_at_recall == 1  # the first eight are 8 of 10
    assert found.recall_at_precision == 0.8


@given(few)
def test_best_f1_is_what_its_threshold_gives_and_no_other_gives_more(
    rows: list[tuple[int, float]],
) -> None:
    accepted_N = np.array([a for a, _ in rows], dtype=np.int32)
    estimate_N = np.array([e for _, e in rows], dtype=np.float32)
    found = quality(estimate_N, accepted_N, tau=6.0)
    is_high_N = accepted_N >= 6
    if not is_high_N.any():
        assert found.best_f1 is None
        assert found.average_precision is None
        assert found.recall is None
        return

    def f1(tau: float) -> float:
        chosen = estimate_N > tau
        return 2 * (chosen & is_high_N).sum() / (chosen.sum() + is_high_N.sum())

    assert found.best_f1_tau is not None
    assert found.best_f1 == pytest.approx(f1(found.best_f1_tau))
    assert found.best_f1 >= max(f1(tau) for tau in np.arange(-1, 10, 0.25)) - 1e-12


def test_nothing_chosen_has_no_precision() -> None:
    found = quality(np.zeros(3, np.float32), np.array([9, 0, 0], np.int32), tau=6.0)
    assert (found.precision, found.recall) == (None, 0)


def test_calibration_error_by_hand() -> None:
    prob_N = np.array([0.05, 0.05, 0.95, 0.95], dtype=np.float32)
    is_true_N = np.array([False, True, True, True])
    assert calibration_error(prob_N, is_true_N) == pytest.approx((0.45 + 0.05) / 2)
    assert calibration_error(np.array([1.0], np.float32), np.array([True])) == 0
    assert calibration_error(prob_N[:0], is_true_N[:0]) is None
