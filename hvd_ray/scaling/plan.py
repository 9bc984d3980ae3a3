"""The plan of all stages, the curve over numbers of workers, and where each stops scaling."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from hvd_ray.scaling.costs import STAGES, StageCosts, StageName
from hvd_ray.scaling.load import Dealing, Load
from hvd_ray.scaling.model import Machines, StagePlan, plan_stage, storage_pace

SHARDS_PER_WORKER = 4
"""So that the last shards are small against a worker's share."""
WORTH_DOUBLING = 1.25
"""Twice the workers should be this much faster; below, the stage has stopped scaling."""
MOST_WORKERS = 4096
"""Up to where it is looked for the end of scaling."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked, and every stage's answer."""

    costs: StageCosts
    load: Load
    machines: Machines
    num_shards: int | None = None
    """None: so many for each worker."""
    num_trials: int = 64
    dealt_by: Dealing = "session"

    def stage(self, name: StageName) -> StagePlan:
        """One stage on the machines."""
        workers = self.machines.num_workers
        shards = self.num_shards or SHARDS_PER_WORKER * workers
        return plan_stage(
            self.costs.of(name),
            self.load,
            self.machines,
            shard_tokens=_shard_tokens(self.load, shards, self.dealt_by),
            num_trials=self.num_trials,
        )

    def with_workers(self, num_workers: int) -> Plan:
        """The same on another number of workers, the cores growing with them if they did."""
        return replace(self, machines=replace(self.machines, num_workers=num_workers))

    def limit(self, name: StageName) -> Limit:
        """Where doubling the workers stops being worth it, from one worker up."""
        if self.costs.of(name).work == "whole":
            return Limit(1, "one process does all of it")
        workers, now = 1, self.with_workers(1).stage(name)
        while workers < MOST_WORKERS:
            doubled = self.with_workers(2 * workers).stage(name)
            if now.seconds <= WORTH_DOUBLING * doubled.seconds:
                return Limit(workers, self._reason(name, doubled, 2 * workers))
            workers, now = 2 * workers, doubled
        return Limit(workers, f"still scaling there; more than {MOST_WORKERS:,} are not tried")

    def _reason(self, name: StageName, doubled: StagePlan, workers: int) -> str:
        """What the doubled workers wait for, the most obvious first."""
        items = self.num_trials if self.costs.of(name).work == "trials" else self.num_shards
        what = "trials" if self.costs.of(name).work == "trials" else "shards"
        if items is not None and workers > items:
            return f"there are {items} {what} to share"
        parts = {
            "the driver works alone": doubled.driver_s,
            "workers start": doubled.start_s,
            "the largest shard is at work": doubled.seconds - doubled.driver_s - doubled.start_s,
        }
        longest = max(parts, key=lambda part: parts[part])
        cores = self.machines.num_cores
        if longest == "the largest shard is at work":
            if cores is not None and workers > cores:
                return f"they share {cores} cores"
            if storage_pace(self.costs.of(name), self.machines) < workers:
                return f"the storage takes {self.machines.storage_mb_s:g} MB/s"
        return f"{longest} for {parts[longest]:,.0f} of {doubled.seconds:,.0f} s"

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON values."""
        finite = asdict(self.machines)
        if self.machines.storage_mb_s == float("inf"):
            finite["storage_mb_s"] = None
        return {
            "load": {**asdict(self.load), "num_traces": self.load.num_traces},
            "machines": finite,
            "stages": {
                name: {**asdict(plan := self.stage(name)), "worker_hours": plan.worker_hours}
                for name in STAGES
            },
            "stops_scaling": {name: asdict(self.limit(name)) for name in STAGES},
            "provenance": self.costs.provenance,
        }


@lru_cache(maxsize=64)
def _shard_tokens(load: Load, num_shards: int, dealt_by: Dealing) -> list[float]:
    return [float(tokens) for tokens in load.shard_tokens(num_shards, dealt_by=dealt_by)]


@dataclass(frozen=True, slots=True)
class Limit:
    """How many workers are still worth it, and why no more."""

    num_workers: int
    reason: str
