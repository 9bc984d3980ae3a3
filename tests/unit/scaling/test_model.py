"""The discrete model against cases that can be reckoned by hand, and its invariants."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_ray.scaling.costs import StageCost
from hvd_ray.scaling.load import Load
from hvd_ray.scaling.model import Machines, StagePlan, _span, plan_stage

COST = StageCost(
    work="shards",
    token_us=1000,
    worker_start_s=5,
    shard_s=1,
    driver_s=3,
    driver_trace_us=1000,
    worker_mb=500,
    worker_token_bytes=100,
    driver_mb=200,
    driver_trace_bytes=50,
    disk_token_bytes=10,
)
LOAD = Load(10_000, trace_tokens=100)

sizes = st.lists(st.floats(0.1, 100), min_size=1, max_size=40)


def planned(shards: list[float], workers: int, **machines: float) -> StagePlan:
    return plan_stage(COST, LOAD, Machines(workers, **machines), shard_tokens=shards)


def test_one_worker_does_all_one_after_the_other() -> None:
    plan = planned([4000, 3000, 2000, 1000], 1)
    assert plan.driver_s == pytest.approx(3 + 100 * 0.001)
    assert plan.seconds == pytest.approx(plan.driver_s + 5 + 10 + 4 * 1)
    assert (plan.num_used, plan.busy_share) == (1, pytest.approx(1.0))


def test_the_largest_shard_bounds_the_span() -> None:
    plan = planned([7000, 1000, 1000, 1000], 8)
    assert plan.seconds == pytest.approx(plan.driver_s + 5 + 8)
    assert plan.num_used == 4
    assert plan.largest_shard == pytest.approx(0.7)
    assert plan.busy_share == pytest.approx((8 + 2 + 2 + 2) / (4 * 8))


def test_workers_share_the_cores() -> None:
    alone, shared = planned([2500.0] * 4, 4), planned([2500.0] * 4, 4, num_cores=2)
    span = 1 + 2.5
    assert alone.seconds == pytest.approx(alone.driver_s + 5 + span)
    assert shared.seconds == pytest.approx(shared.driver_s + 5 + 2 * span)


def test_the_storage_bounds_them_all_together() -> None:
    """One worker writes 10 bytes a millisecond, 0.01 MB/s: the storage takes two of them."""
    slow = planned([2500.0] * 4, 4, storage_mb_s=0.02)
    assert slow.seconds == pytest.approx(slow.driver_s + 5 + 2 * 3.5)


def test_memory_and_disk_grow_with_what_is_held() -> None:
    plan = planned([4000, 6000], 2)
    assert plan.worker_mb == pytest.approx(500 + 6000 * 100 / 1e6)
    assert plan.driver_mb == pytest.approx(200 + 100 * 50 / 1e6)
    assert plan.disk_mb == pytest.approx(0.1)


def test_what_one_process_does_gains_nothing_from_workers() -> None:
    whole = COST.model_copy(update={"work": "whole"})
    one, many = (plan_stage(whole, LOAD, Machines(n), shard_tokens=[5000, 5000]) for n in (1, 64))
    assert one == many
    assert one.num_used == 1


def test_every_trial_goes_through_all_tokens() -> None:
    trials = COST.model_copy(update={"work": "trials"})
    plan = plan_stage(trials, LOAD, Machines(4), shard_tokens=[10_000], num_trials=8)
    assert plan.seconds == pytest.approx(plan.driver_s + 5 + 2 * (1 + 10))


@given(sizes, st.integers(1, 12), st.integers(1, 12))
def test_a_span_lies_between_its_bounds(items: list[float], workers: int, cores: int) -> None:
    """No schedule beats the longest item or the even share; a greedy one is not twice as long."""
    items = sorted(items, reverse=True)
    used = min(workers, len(items))
    span = _span(items, used, cores=cores, most_at_once=float("inf"))
    least = max(items[0], sum(items) / min(used, cores))
    assert span >= least * (1 - 1e-9)
    assert span <= sum(items) / min(used, cores) + items[0] * max(1, used / cores) + 1e-6


@given(sizes, st.integers(1, 6))
def test_with_cores_for_all_more_workers_are_never_slower_by_much(
    items: list[float], workers: int
) -> None:
    items = sorted(items, reverse=True)
    one, more = (
        _span(items, min(n, len(items)), cores=n, most_at_once=float("inf"))
        for n in (workers, 2 * workers)
    )
    assert more <= one * (1 + 1e-9)
