"""A discrete model of a stage: workers start, take shards the largest first, share their cores.

The driver works alone before and after. Between, the event loop knows only when the next worker
is ready or done; a worker's pace falls when more are at work than there are cores, or when all
together write faster than the storage takes it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_ray.scaling.costs import StageCost
from hvd_ray.scaling.load import Load

MB = 1e6
US = 1e-6


@dataclass(frozen=True, slots=True)
class Machines:
    """What the workers run on."""

    num_workers: int
    num_cores: int | None = None
    """Cores (or GPUs) under all workers together; None: one each."""
    storage_mb_s: float = float("inf")
    """What the shared storage takes from all workers together."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """How one stage would go."""

    seconds: float
    driver_s: float
    """Of `seconds`, what only the driver works."""
    start_s: float
    """And what passes until workers are ready."""
    num_used: int
    """Workers that got anything to do."""
    busy_share: float
    """Of the workers' time between start and end."""
    largest_shard: float
    """Its share of all tokens."""
    worker_mb: float
    driver_mb: float
    disk_mb: float

    @property
    def worker_hours(self) -> float:
        return self.num_used * self.seconds / 3600


def plan_stage(
    cost: StageCost,
    load: Load,
    machines: Machines,
    *,
    shard_tokens: Sequence[float],
    num_trials: int = 1,
) -> StagePlan:
    """Simulate a stage.

    Args:
        cost: the stage's.
        load: what is to be done.
        machines: who does it.
        shard_tokens: tokens of each shard, the largest first.
        num_trials: of a sweep; each goes through all tokens.
    """
    items = _items(cost, load, shard_tokens, num_trials)
    held = max(shard_tokens) if cost.work == "shards" else load.num_tokens
    driver_s = cost.driver_s + load.num_traces * cost.driver_trace_us * US
    if cost.work == "whole":
        total = driver_s + cost.worker_start_s + sum(items)
        return _plan(cost, load, total, driver_s, 1, 1.0, held)
    num_used = min(machines.num_workers, len(items))
    paced = storage_pace(cost, machines)
    span = _span(items, num_used, cores=machines.num_cores or num_used, most_at_once=paced)
    total = driver_s + cost.worker_start_s + span
    busy = sum(items) / (num_used * span) if span else 1.0
    return _plan(cost, load, total, driver_s, num_used, busy, held)


def _items(
    cost: StageCost, load: Load, shard_tokens: Sequence[float], num_trials: int
) -> list[float]:
    """Seconds of each piece of work for a worker with a core to itself, the longest first."""
    traces_per_token = load.num_traces / load.num_tokens
    token_s = (cost.token_us + cost.trace_us * traces_per_token) * US
    if cost.work == "shards":
        return [cost.shard_s + tokens * token_s for tokens in shard_tokens]
    whole = cost.shard_s + load.num_tokens * token_s
    return [whole] * (num_trials if cost.work == "trials" else 1)


def storage_pace(cost: StageCost, machines: Machines) -> float:
    """How many workers' worth of rows the storage takes at once."""
    if not cost.disk_token_bytes or not cost.token_us:
        return float("inf")
    worker_mb_s = cost.disk_token_bytes / (cost.token_us * US) / MB
    return machines.storage_mb_s / worker_mb_s


def _span(items: Sequence[float], num_workers: int, *, cores: int, most_at_once: float) -> float:
    """When the last item is done, all workers having begun at 0.

    Each event is an item's end. Between events every active worker advances at the same pace,
    so one clock of work done serves all: an item that is begun at `work` ends at `work + size`.
    """
    waiting = iter(items)
    ends: list[float] = []
    for _ in range(num_workers):
        heapq.heappush(ends, next(waiting))
    now = work = 0.0
    while ends:
        pace = min(1.0, cores / len(ends), most_at_once / len(ends))
        end = heapq.heappop(ends)
        now += (end - work) / pace
        work = end
        following = next(waiting, None)
        if following is not None:
            heapq.heappush(ends, work + following)
    return now


def _plan(
    cost: StageCost,
    load: Load,
    seconds: float,
    driver_s: float,
    num_used: int,
    busy: float,
    held_tokens: float,
) -> StagePlan:
    return StagePlan(
        seconds=seconds,
        driver_s=driver_s,
        start_s=cost.worker_start_s,
        num_used=num_used,
        busy_share=busy,
        largest_shard=held_tokens / load.num_tokens,
        worker_mb=cost.worker_mb + held_tokens * cost.worker_token_bytes / MB,
        driver_mb=cost.driver_mb + load.num_traces * cost.driver_trace_bytes / MB,
        disk_mb=load.num_tokens * cost.disk_token_bytes / MB,
    )
