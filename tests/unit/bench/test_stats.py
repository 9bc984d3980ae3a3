"""Speed-up intervals: known answers, pairing, clusters and coverage by simulation."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_ray.bench.stats import (
    RatioEstimate,
    Work,
    geometric_mean,
    paired_speedup,
    resampling_units,
)


def _speedup(system_s, baseline_s, clusters=None, tokens=None, baseline_tokens=None, **options):
    tokens = [100] * len(system_s) if tokens is None else tokens
    return paired_speedup(
        Work.of(tokens=tokens, seconds=system_s),
        baseline=Work.of(tokens=baseline_tokens or tokens, seconds=baseline_s),
        clusters=clusters or [str(i) for i in range(len(system_s))],
        **options,
    )


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20))
def test_identical_runs_give_exactly_one(seconds):
    estimate = _speedup(seconds, seconds, num_draws=200)
    assert (estimate.ratio, estimate.low, estimate.high) == (1.0, 1.0, 1.0)


@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=20), st.floats(0.1, 10))
def test_a_constant_factor_has_no_spread(seconds, factor):
    estimate = _speedup([s / factor for s in seconds], seconds, num_draws=200)
    assert estimate.ratio == pytest.approx(factor)
    assert estimate.high - estimate.low == pytest.approx(0, abs=1e-9)


def test_the_point_is_the_ratio_of_total_times_not_the_mean_of_ratios():
    estimate = _speedup([1.0, 30.0], [2.0, 30.0])
    assert estimate.ratio == pytest.approx(32 / 31)


def test_fewer_tokens_are_not_a_speed_up():
    """In bf16 an output may end earlier: half the time for half the tokens is the same speed."""
    estimate = _speedup([1.0, 1.0], [2.0, 2.0], tokens=[50, 50], baseline_tokens=[100, 100])
    assert estimate.ratio == pytest.approx(1.0)


@pytest.mark.parametrize("num_prompts", [1, 2])
def test_too_few_prompts_are_flagged_and_their_interval_is_a_point(num_prompts):
    estimate = _speedup([1.0, 2.0][:num_prompts], [2.0, 4.0][:num_prompts])
    assert estimate.is_degenerate
    assert estimate.low == estimate.ratio == estimate.high == pytest.approx(2.0)


def test_one_session_of_many_prompts_is_one_cluster():
    estimate = _speedup([1.0, 3.0, 2.0], [2.0, 2.0, 2.0], clusters=["s", "s", "s"])
    assert estimate.is_degenerate
    assert estimate.num_clusters == 1


def test_pairing_takes_out_what_both_systems_share():
    """Prompts differ tenfold in length, the ratio hardly: the interval must be narrow."""
    rng = np.random.default_rng(1)
    greedy = np.geomspace(1, 10, 12)
    estimate = _speedup(greedy / (2 * rng.normal(1, 0.02, 12)), greedy)
    assert 1.9 < estimate.low < 2.0 < estimate.high < 2.1


def test_prompts_of_a_session_count_once():
    """Copies of the same evidence must not narrow the interval."""
    system, greedy = [1.0, 1.5, 2.0], [2.0, 2.0, 2.0]
    clusters = ["a", "b", "c"]
    once = _speedup(system, greedy, clusters)
    thrice = _speedup(system * 3, greedy * 3, clusters * 3)
    assert thrice.low == pytest.approx(once.low)
    assert thrice.num_clusters == 3


def test_the_seed_fixes_the_interval():
    times = ([1.0, 1.5, 2.0], [2.0, 2.5, 2.0])
    assert _speedup(*times, seed=3) == _speedup(*times, seed=3)
    assert _speedup(*times, seed=3).low != _speedup(*times, seed=4).low


@pytest.mark.parametrize("num_sessions", [3, 4, 8, 24])
def test_the_interval_covers_the_truth_about_95_times_in_100(num_sessions):
    """Lognormal speed-ups: the truth of the ratio of sums is 1 / E[1 / speed-up]."""
    rng = np.random.default_rng(num_sessions)
    truth = math.exp(math.log(1.8) - 0.3**2 / 2)
    num_trials, hits = 600, 0
    for _ in range(num_trials):
        greedy = rng.lognormal(0, 0.4, num_sessions)
        system = greedy / rng.lognormal(math.log(1.8), 0.3, num_sessions)
        estimate = _speedup(list(system), list(greedy), num_draws=500)
        hits += estimate.low <= truth <= estimate.high
    assert 0.91 <= hits / num_trials <= 0.98


def test_geometric_mean_of_known_parts():
    parts = [RatioEstimate(math.log(2), 0.1, 5, 6), RatioEstimate(math.log(8), 0.1, 5, 6)]
    mean = geometric_mean(parts)
    assert mean.ratio == pytest.approx(4)
    assert mean.log_error == pytest.approx(0.1 / math.sqrt(2))
    assert mean.degrees_of_freedom == pytest.approx(10)
    assert mean.low < 4 < mean.high


def test_geometric_mean_of_one_workload_is_that_workload():
    part = _speedup([1.0, 1.5, 2.0], [2.0, 2.5, 2.0])
    mean = geometric_mean([part])
    assert (mean.ratio, mean.low, mean.high) == pytest.approx((part.ratio, part.low, part.high))


def test_geometric_mean_is_degenerate_when_a_part_is():
    parts = [RatioEstimate(0.0, 0.0, 0, 1), RatioEstimate(0.5, 0.1, 5, 6)]
    assert geometric_mean(parts).is_degenerate


def test_geometric_mean_covers_the_truth():
    rng = np.random.default_rng(7)
    truth = math.exp(math.log(1.8) - 0.3**2 / 2)
    hits, num_trials = 0, 300
    for _ in range(num_trials):
        parts = []
        for _ in range(4):
            greedy = rng.lognormal(0, 0.4, 4)
            system = greedy / rng.lognormal(math.log(1.8), 0.3, 4)
            parts.append(_speedup(list(system), list(greedy), num_draws=300))
        mean = geometric_mean(parts)
        hits += mean.low <= truth <= mean.high
    assert 0.90 <= hits / num_trials <= 0.99


def test_sessions_are_the_unit_where_there_are_enough_of_them():
    ids = ["1", "2", "3", "4", "5"]
    unit, clusters = resampling_units(["a", "a", "b", "c", None], ids)
    assert unit == "session"
    assert len(set(clusters)) == 4
    assert clusters[0] == clusters[1]


def test_few_sessions_are_drawn_by_prompt_and_say_so():
    ids = ["1", "2", "3", "4"]
    assert resampling_units(["a", "a", "b", "b"], ids) == ("prompt", ids)


def test_a_session_named_like_a_prompt_stays_apart():
    _, clusters = resampling_units(["1", None, "b", "c"], ["x", "1", "y", "z"])
    assert len(set(clusters)) == 4
