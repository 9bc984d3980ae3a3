"""One system against every other on the same prompts, workload by workload, with intervals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from hvd_ray.bench.cells import Arm, Sample, speed_ratio
from hvd_ray.bench.result import ALL_WORKLOADS
from hvd_ray.bench.stats import RatioEstimate, geometric_mean


@dataclass(frozen=True, slots=True)
class Against:
    """Tokens per second of the system over those of a rival."""

    workload: str
    rival: str
    ratio: float
    low: float
    high: float
    is_degenerate: bool
    """Too few prompts or waves for an interval."""


def against(samples: Sequence[Sample], system: str, *, seed: int = 0) -> list[Against]:
    """For each workload, then for all of them as a geometric mean; caches cold.

    Nothing where the system was not measured.
    """
    cold = [sample for sample in samples if sample.arm.cache != "warm"]
    by_cell: dict[tuple[str, Arm], list[Sample]] = {}
    for sample in cold:
        by_cell.setdefault((sample.prompt.workload, sample.arm), []).append(sample)
    workloads = list(dict.fromkeys(workload for workload, _ in by_cell))
    arms = list(dict.fromkeys(arm for _, arm in by_cell))
    ours = next((arm for arm in arms if arm.system == system), None)
    if ours is None:
        return []
    found = []
    for rival in arms:
        if rival != ours:
            estimates = [
                speed_ratio(by_cell[workload, ours], by_cell[workload, rival], seed=seed)
                for workload in workloads
            ]
            found += list(_rows(workloads, rival.system, estimates))
    return found


def _rows(
    workloads: Sequence[str], rival: str, estimates: Sequence[RatioEstimate]
) -> Iterator[Against]:
    named = [*zip(workloads, estimates, strict=True), (ALL_WORKLOADS, geometric_mean(estimates))]
    for workload, found in named:
        yield Against(workload, rival, found.ratio, found.low, found.high, found.is_degenerate)


def against_json(
    samples: Sequence[Sample], system: str, *, seed: int = 0
) -> list[dict[str, object]]:
    """The same as JSON values."""
    return [asdict(row) for row in against(samples, system, seed=seed)]
