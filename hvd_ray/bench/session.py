"""One run of `hvd bench`, from what was asked for to the result."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal, Protocol

from hvd_ray.bench.cells import Arm, Sample, aggregate_rows, workload_rows
from hvd_ray.bench.measure import measure
from hvd_ray.bench.plan import Plan, Sampling, ask, choose_arms, choose_filling
from hvd_ray.bench.report import exactness_notes, slowdown_notes
from hvd_ray.bench.result import BenchResult, CacheState
from hvd_ray.bench.workloads import Prompt, load_prompts, load_shipped, select, workload_hash
from hvd_ray.config import Config
from hvd_ray.decode import Decoder
from hvd_ray.engines.base import Engine
from hvd_ray.errors import NotSupportedError, UserError
from hvd_ray.payoff.policy import PayoffEstimator
from hvd_ray.provenance import provenance
from hvd_ray.systems import NEEDS_PREDICTOR, SYSTEMS, build_decoder, check_system
from hvd_ray.text import TextCodec

CacheChoice = Literal["cold", "warm", "both"]
CACHES: Mapping[str, tuple[CacheState, ...]] = {
    "cold": ("cold",),
    "warm": ("warm",),
    "both": ("cold", "warm"),
}


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What a run is asked for; each field is a flag of `hvd bench`.

    Raises:
        UserError: a value is out of range, unknown, or contradicts another.
    """

    systems: tuple[str, ...] | None = None
    """None: all, those without a predictor only where none is registered."""
    prompt_files: tuple[Path, ...] = ()
    workloads: tuple[str, ...] = ()
    """Shipped ones; all where neither files nor workloads are given."""
    split: Literal["train", "test", "all"] = "test"
    limit: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    cache: CacheChoice = "cold"
    engine: str = "torch"

    def __post_init__(self) -> None:
        if self.prompt_files and self.workloads:
            raise UserError("give --prompts or --workloads, not both")
        for flag, value in (("--limit", self.limit), ("--max-tokens", self.max_tokens)):
            if value is not None and value < 1:
                raise UserError(f"{flag} must be 1 or more, got {value}")
        if self.temperature is not None and not 0 <= self.temperature < float("inf"):
            raise UserError(f"--temperature must be 0 or more, got {self.temperature}")
        if self.cache not in CACHES:
            raise UserError(f"--cache must be one of {', '.join(CACHES)}, got {self.cache!r}")
        if self.engine != "torch":
            raise NotSupportedError(f"engine {self.engine!r}; choose --engine torch")
        for system in self.systems or ():
            check_system(system)

    def load(self) -> tuple[Prompt, ...]:
        """All prompts of the files or workloads, both splits.

        Raises:
            UserError: a file or workload cannot be read; a bad line is named.
        """
        if self.prompt_files:
            return load_prompts(self.prompt_files).prompts
        return load_shipped(self.workloads or None).prompts


class Progress(Protocol):
    """Hears how a run goes."""

    def stage(self, text: str) -> None:
        """Something that takes its time begins."""
        ...

    def expect(self, total: int) -> None:
        """How many requests this run will ask."""
        ...

    def advance(self, done: int, text: str) -> None:
        """`done` requests are answered in all."""
        ...


EngineLoader = Callable[[Config], tuple[Engine, TextCodec]]
EstimatorLoader = Callable[[Engine, TextCodec], PayoffEstimator]


def run_bench(
    options: BenchOptions,
    config: Config,
    *,
    progress: Progress,
    load_engine: EngineLoader,
    load_estimator: EstimatorLoader | None,
    facts: Mapping[str, Any] | None = None,
) -> BenchResult:
    """Measure and summarise.

    Args:
        options: what is measured.
        config: model, drafting, policies and seed.
        progress: hears the stages and requests.
        load_engine: of the target; called once the prompts are known to be good.
        load_estimator: of the payoff; None where no predictor is registered.
        facts: for the provenance, what the caller knows besides: checkpoint, predictor.

    Raises:
        UserError: something asked for cannot be had; nothing was measured then.
    """
    systems, notes = _affordable(options.systems, has_predictor=load_estimator is not None)
    arms = choose_arms(systems, CACHES[options.cache])
    chosen, fillers = _choose_prompts(options, arms)
    load_average = os.getloadavg()[0]
    progress.stage(f"loading {config.model} ({config.dtype})")
    engine, codec = load_engine(config)
    sampling = Sampling(options.max_tokens, options.temperature, config.seed)
    measured, filling = (
        ask(prompts, codec=codec, capabilities=engine.capabilities, sampling=sampling)
        for prompts in (chosen, fillers)
    )
    needs_estimator = not NEEDS_PREDICTOR.isdisjoint(systems)
    estimator = load_estimator(engine, codec) if load_estimator and needs_estimator else None

    def build(system: str) -> Decoder:
        return build_decoder(system, engine=engine, codec=codec, config=config, estimator=estimator)

    plan = Plan(arms, measured, filling)
    progress.stage("warming up")
    progress.expect(plan.num_requests)
    num_done = count(1)
    samples = measure(
        plan, build=build, on_request=lambda text: progress.advance(next(num_done), text)
    )
    about = provenance(
        config=config,
        workload_hash=workload_hash(chosen),
        options=_plain(options),
        filling_prompts={workload: len(asked) for workload, asked in filling.items()},
        warm_up="one short request a system, one pass of each number of rows; not counted",
        load_average=round(load_average, 2),
        **(facts or {}),
    )
    return summarise(samples, engine, config, notes=notes, about=about)


def _plain(options: BenchOptions) -> dict[str, Any]:
    return asdict(options) | {"prompt_files": [str(path) for path in options.prompt_files]}


def _choose_prompts(
    options: BenchOptions, arms: Sequence[Arm]
) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
    """What is measured, and what fills warm caches before."""
    prompts = options.load()
    chosen = select(prompts, split=options.split, limit=options.limit)
    if not any(arm.cache == "warm" for arm in arms):
        return chosen, ()
    filling = choose_filling(prompts, chosen)
    return chosen, [prompt for of_workload in filling.values() for prompt in of_workload]


def summarise(
    samples: Sequence[Sample],
    engine: Engine,
    config: Config,
    *,
    notes: Sequence[str],
    about: Mapping[str, Any],
) -> BenchResult:
    """The rows of a run and the plain words on them."""
    target = engine.capabilities
    labels = {"engine": target.name, "dtype": target.dtype}
    rows = tuple(workload_rows(samples, **labels, seed=config.seed))
    aggregate = tuple(aggregate_rows(samples, **labels, seed=config.seed))
    spoken = (*notes, *exactness_notes(rows), *slowdown_notes(rows))
    return BenchResult(about, spoken, rows, aggregate)


def _affordable(
    asked: tuple[str, ...] | None, *, has_predictor: bool
) -> tuple[tuple[str, ...], list[str]]:
    """The systems to measure; by default those that need a predictor only where there is one."""
    if asked is None and has_predictor:
        return SYSTEMS, []
    if asked is not None:
        if not has_predictor and not NEEDS_PREDICTOR.isdisjoint(asked):
            raise UserError(
                f"system {', '.join(NEEDS_PREDICTOR.intersection(asked))} needs a payoff "
                "predictor and none is registered: train one with `hvd train`, or name a folder "
                "with --predictor"
            )
        return asked, []
    left_out = [system for system in SYSTEMS if system in NEEDS_PREDICTOR]
    kept = tuple(system for system in SYSTEMS if system not in NEEDS_PREDICTOR)
    note = f"{', '.join(left_out)} left out: no payoff predictor is registered, see `hvd train`."
    return kept, [note]
