"""What the recorded cycles of a run say: their cost, its parts, lengths, payoffs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvd_ray.bench.cells import Sample
from hvd_ray.bench.result import ALL_WORKLOADS
from hvd_ray.payoff.features import HIGH_PAYOFF
from hvd_ray.types import Source, Step

LENGTH_EDGES = (1, 2, 3, 5, 9, 17, 33)
"""Where the classes of draft and accepted lengths begin."""


@dataclass(frozen=True, slots=True)
class CycleCost:
    """The mean cycle of one arm, in milliseconds, without the first of each request, which also
    reads the prompt."""

    system: str
    cache: str
    cycles: int
    draft_ms: float
    verify_ms: float

    @property
    def total_ms(self) -> float:
        return self.draft_ms + self.verify_ms


@dataclass(frozen=True, slots=True)
class PayoffShare:
    """How long the verified cache drafts of one arm were accepted, on one workload."""

    workload: str
    system: str
    cache: str
    drafts: int
    high_share: float
    """Share with an accepted length of 6 or more."""
    counts: tuple[int, ...]
    """By accepted length: none, then the classes of `LENGTH_EDGES`."""


def cycle_costs(samples: Sequence[Sample]) -> list[CycleCost]:
    """One for each arm, over all workloads."""
    costs = []
    for arm in dict.fromkeys(sample.arm for sample in samples):
        steps = [step for s in samples if s.arm == arm for step in s.completion.steps[1:]]
        if steps:
            costs.append(
                CycleCost(
                    arm.system,
                    arm.cache,
                    len(steps),
                    sum(step.draft_us for step in steps) / len(steps) / 1e3,
                    sum(step.verify_us for step in steps) / len(steps) / 1e3,
                )
            )
    return costs


def payoff_shares(samples: Sequence[Sample], *, systems: Iterable[str]) -> list[PayoffShare]:
    """For each arm of the systems, over all workloads and for each."""
    found = []
    arms = [a for a in dict.fromkeys(s.arm for s in samples) if a.system in set(systems)]
    workloads = dict.fromkeys(sample.prompt.workload for sample in samples)
    for arm in arms:
        for workload in (ALL_WORKLOADS, *workloads):
            drafts = [
                step.accepted
                for s in samples
                if s.arm == arm and workload in (ALL_WORKLOADS, s.prompt.workload)
                for step in s.completion.steps
                if step.drafted and step.source in (Source.SUFFIX, Source.NGRAM)
            ]
            if drafts:
                high = sum(accepted >= HIGH_PAYOFF for accepted in drafts) / len(drafts)
                counts = _histogram(drafts)
                found.append(
                    PayoffShare(workload, arm.system, arm.cache, len(drafts), high, counts)
                )
    return found


def draft_lengths(samples: Sequence[Sample]) -> dict[str, dict[str, list[int]]]:
    """By arm and source, how many drafts had which length (classes as in `PayoffShare`)."""
    lengths: dict[str, dict[str, list[int]]] = {}
    for arm in dict.fromkeys(sample.arm for sample in samples):
        steps: list[Step] = [t for s in samples if s.arm == arm for t in s.completion.steps]
        by_source = {
            str(source): list(_histogram([t.drafted for t in steps if t.source == source]))
            for source in sorted({step.source for step in steps if step.drafted})
        }
        if by_source:
            lengths[f"{arm.system} {arm.cache}"] = by_source
    return lengths


def class_names() -> list[str]:
    """What the classes are called: `0`, `1`, `3-4`, `33+`."""
    pairs = itertools.pairwise(LENGTH_EDGES)
    inner = [str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in pairs]
    return ["0", *inner, f"{LENGTH_EDGES[-1]}+"]


def _histogram(lengths: Sequence[int]) -> tuple[int, ...]:
    places = Counter(sum(length >= edge for edge in LENGTH_EDGES) for length in lengths)
    return tuple(places[index] for index in range(len(LENGTH_EDGES) + 1))


def cycles_json(samples: Sequence[Sample]) -> dict[str, Any]:
    """All of the above as JSON values."""
    return {
        "cycle_costs": [
            {**asdict(cost), "total_ms": cost.total_ms} for cost in cycle_costs(samples)
        ],
        "payoffs": [asdict(share) for share in payoff_shares(samples, systems=("ngram", "suffix"))],
        "draft_lengths": draft_lengths(samples),
        "length_classes": class_names(),
    }
