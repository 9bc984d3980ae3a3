"""From single requests to the rows of the result: one for each workload, system and cache state.

The headline is tokens emitted / target passes. The mean acceptance over drafted cycles alone
stands beside it, never instead: a source that drafts seldom looks better by that figure than it
is (vllm#24344).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hvd_ray.bench.quality import SCORERS
from hvd_ray.bench.result import ALL_WORKLOADS, BASELINE, CacheState, Difference, Row, WithoutLoops
from hvd_ray.bench.stats import (
    RatioEstimate,
    Unit,
    Work,
    geometric_mean,
    paired_speedup,
    resampling_units,
)
from hvd_ray.bench.workloads import Prompt
from hvd_ray.traces.loops import is_degenerate_loop
from hvd_ray.types import Completion, Request, Step

Item = TypeVar("Item")
Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Arm:
    """One of the things compared: a system in a state of its cache."""

    system: str
    cache: CacheState

    @property
    def is_baseline(self) -> bool:
        return self.system == BASELINE


@dataclass(frozen=True, slots=True)
class Sample:
    """One request, served by one arm."""

    prompt: Prompt
    arm: Arm
    request: Request
    completion: Completion
    seconds: float
    """Wall time of the whole request; of requests served together, its share of theirs."""
    difference: Difference | None = None
    """From greedy's output; None where there is none."""
    is_identical_in_one_pass: bool | None = None
    """For greedy alone; None where the prompt is sampled."""
    agreement: float = 1.0
    """Share of the positions whose token is greedy's."""
    quality: float | None = None
    """Against greedy's answer; None where the workload has no score."""
    wave: int | None = None
    """Which of the workload's waves it was served in; None where each prompt ran alone."""


def workload_rows(samples: Sequence[Sample], *, engine: str, dtype: str, seed: int) -> list[Row]:
    """One row for each workload and arm, in the order in which they first appear."""
    return [
        cell.row(workload, engine=engine, dtype=dtype)
        for workload, cells in _by_workload(samples, seed=seed).items()
        for cell in cells
    ]


def aggregate_rows(samples: Sequence[Sample], *, engine: str, dtype: str, seed: int) -> list[Row]:
    """One row for each arm over all workloads.

    Counts are sums; the speed-up is the geometric mean of the workloads', each weighing the same.
    """
    cells = [cell for cells in _by_workload(samples, seed=seed).values() for cell in cells]
    return [
        _merged(parts).row(ALL_WORKLOADS, engine=engine, dtype=dtype)
        for parts in _grouped(cells, lambda cell: cell.arm).values()
    ]


def speed_ratio(
    samples: Sequence[Sample], baseline: Sequence[Sample], *, seed: int = 0
) -> RatioEstimate:
    """How much faster one arm is than another on the same prompts, given in the same order."""
    return _Speedup.of(samples, baseline, seed=seed).estimate


@dataclass(frozen=True, slots=True)
class _Speedup:
    estimate: RatioEstimate
    unit: Unit

    @classmethod
    def of(cls, samples: Sequence[Sample], baseline: Sequence[Sample], *, seed: int) -> _Speedup:
        prompts = [sample.prompt for sample in samples]
        assert prompts == [sample.prompt for sample in baseline], "arms saw different prompts"
        unit, clusters = _units(samples)
        estimate = paired_speedup(
            _work(samples), baseline=_work(baseline), clusters=clusters, seed=seed
        )
        return cls(estimate, unit)

    @classmethod
    def mean(cls, parts: Sequence[_Speedup]) -> _Speedup:
        units = {part.unit for part in parts}
        mean = geometric_mean([part.estimate for part in parts])
        return cls(mean, units.pop() if len(units) == 1 else "prompt")

    @property
    def ci(self) -> tuple[float, float]:
        return self.estimate.low, self.estimate.high


def _units(samples: Sequence[Sample]) -> tuple[Unit, list[str]]:
    """What is drawn: waves where requests shared their time, else sessions or prompts."""
    if all(sample.wave is not None for sample in samples):
        return "wave", [str(sample.wave) for sample in samples]
    prompts = [sample.prompt for sample in samples]
    return resampling_units([p.session_id for p in prompts], [p.id for p in prompts])


@dataclass(frozen=True, slots=True)
class _Cell:
    """The samples behind one row."""

    arm: Arm
    samples: Sequence[Sample]
    speedup: _Speedup
    without_loops: _Cell | None

    @property
    def tokens(self) -> int:
        return sum(len(sample.completion.token_ids) for sample in self.samples)

    @property
    def passes(self) -> int:
        return sum(sample.completion.num_target_passes for sample in self.samples)

    @property
    def emitted_per_pass(self) -> float:
        return self.tokens / max(1, self.passes)

    @property
    def _slim_passes(self) -> int:
        return sum(sample.completion.num_slim_passes for sample in self.samples)

    @property
    def _unchecked(self) -> int:
        """Tokens that were committed without a pass of the target."""
        steps = (step for sample in self.samples for step in sample.completion.steps)
        return sum(step.emitted for step in steps if step.full_passes == 0)

    def row(self, workload: str, *, engine: str, dtype: str) -> Row:
        steps = [step for sample in self.samples for step in sample.completion.steps]
        drafted_cycles = sum(step.drafted > 0 for step in steps)
        accepted = sum(step.accepted for step in steps)
        differences = tuple(s.difference for s in self.samples if s.difference)
        families = {sample.prompt.family for sample in self.samples}
        metric = _metric({sample.prompt.workload for sample in self.samples})
        return Row(
            workload=workload,
            family=families.pop() if len(families) == 1 else ALL_WORKLOADS,
            system=self.arm.system,
            engine=engine,
            cache=self.arm.cache,
            dtype=dtype,
            temperatures=tuple(sorted({s.request.sampling.temperature for s in self.samples})),
            prompts=len(self.samples),
            tokens=self.tokens,
            target_passes=self.passes,
            tokens_per_second=self.tokens / sum(sample.seconds for sample in self.samples),
            speedup_vs_greedy=self.speedup.estimate.ratio,
            speedup_ci=self.speedup.ci,
            ci_unit=self.speedup.unit,
            ci_is_degenerate=self.speedup.estimate.is_degenerate,
            emitted_per_pass=self.emitted_per_pass,
            mean_accepted_drafted_only=accepted / drafted_cycles if drafted_cycles else None,
            cycles_per_1k_tokens=1000 * self.passes / max(1, self.tokens),
            drafted_cycles=drafted_cycles,
            drafted=sum(step.drafted for step in steps),
            accepted=accepted,
            source_share=_source_share(steps),
            draft_ms_per_cycle=self._mean_ms(lambda step: step.draft_us),
            verify_ms_per_cycle=self._mean_ms(lambda step: step.verify_us),
            identical_to_greedy=1 - len(differences) / len(self.samples),
            differences=differences,
            identical_in_one_pass=_share(s.is_identical_in_one_pass for s in self.samples),
            loops=sum(map(_loops, self.samples)) / len(self.samples),
            without_loops=self.without_loops.summary() if self.without_loops else None,
            full_passes_per_token=self.passes / max(1, self.tokens),
            slim_passes_per_token=self._slim_passes / max(1, self.tokens),
            escalated_share=_share(step.full_passes > 0 for step in steps if step.slim_passes > 0),
            unchecked_share=self._unchecked / max(1, self.tokens),
            agreement_with_greedy=sum(s.agreement for s in self.samples) / len(self.samples),
            quality=_mean(s.quality for s in self.samples) if metric else None,
            quality_metric=metric,
            cut_share=_share(s.completion.finish_reason == "length" for s in self.samples),
        )

    def summary(self) -> WithoutLoops:
        return WithoutLoops(
            prompts=len(self.samples),
            speedup_vs_greedy=self.speedup.estimate.ratio,
            speedup_ci=self.speedup.ci,
            emitted_per_pass=self.emitted_per_pass,
        )

    def _mean_ms(self, time_us: Callable[[Step], float]) -> float | None:
        times = [time_us(step) for s in self.samples for step in s.completion.steps[1:]]
        return sum(times) / len(times) / 1000 if times else None


def _by_workload(samples: Sequence[Sample], *, seed: int) -> dict[str, list[_Cell]]:
    """The cells of each workload, arms in the order of the first prompt."""
    arms = list(dict.fromkeys(sample.arm for sample in samples))
    return {
        workload: _cells(of_workload, arms, seed=seed)
        for workload, of_workload in _grouped(samples, lambda s: s.prompt.workload).items()
    }


def _cells(samples: Sequence[Sample], arms: Sequence[Arm], *, seed: int) -> list[_Cell]:
    """The cells of one workload."""
    by_arm = _grouped(samples, lambda sample: sample.arm)
    baseline = next(by_arm[arm] for arm in arms if arm.is_baseline)
    looping = {sample.prompt.id for sample in baseline if _loops(sample)}

    def without_loops(of_arm: Sequence[Sample]) -> list[Sample]:
        return [sample for sample in of_arm if sample.prompt.id not in looping]

    kept_baseline = without_loops(baseline)
    cells = []
    for arm in arms:
        whole, kept = by_arm[arm], without_loops(by_arm[arm])
        rest = None
        if kept:
            rest = _Cell(arm, kept, _Speedup.of(kept, kept_baseline, seed=seed), None)
        cells.append(_Cell(arm, whole, _Speedup.of(whole, baseline, seed=seed), rest))
    return cells


def _merged(parts: Sequence[_Cell]) -> _Cell:
    """The cells of one arm over all workloads."""
    kept = [part.without_loops for part in parts if part.without_loops]
    return _Cell(
        parts[0].arm,
        [sample for part in parts for sample in part.samples],
        _Speedup.mean([part.speedup for part in parts]),
        _merged(kept) if kept else None,
    )


def _grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """The items by key, keys and items in their first order."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _work(samples: Sequence[Sample]) -> Work:
    # An output of no tokens still took a pass to say so: it counts as one token of work.
    tokens = [max(1, len(sample.completion.token_ids)) for sample in samples]
    return Work.of(tokens=tokens, seconds=[sample.seconds for sample in samples])


def _loops(sample: Sample) -> bool:
    return is_degenerate_loop(sample.completion.token_ids)


def _source_share(steps: Sequence[Step]) -> dict[str, float]:
    counts = Counter(step.source.value for step in steps)
    return {source: count / len(steps) for source, count in sorted(counts.items())}


def _share(answers: Iterable[bool | None]) -> float | None:
    known = [answer for answer in answers if answer is not None]
    return sum(known) / len(known) if known else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _metric(workloads: set[str]) -> str | None:
    """The name of the score, where all of the workloads have the same."""
    names = {SCORERS[workload][0] if workload in SCORERS else None for workload in workloads}
    return names.pop() if len(names) == 1 else None
