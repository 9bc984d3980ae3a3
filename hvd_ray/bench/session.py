"""One run of `hvd bench`, from what was asked for to the result."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal, Protocol

from hvd_ray.bench.cells import Arm, Sample, aggregate_rows, workload_rows
from hvd_ray.bench.measure import BuildDecoder, Measured, SampleStore, measure
from hvd_ray.bench.plan import (
    Plan,
    Sampling,
    ask,
    check_measurable,
    choose_arms,
    choose_filling,
)
from hvd_ray.bench.report import cut_notes, exactness_notes, slowdown_notes
from hvd_ray.bench.result import UNTIMED, BenchResult, CacheState
from hvd_ray.bench.rivals import RIVALS, RivalDecoder, rival_facts
from hvd_ray.bench.workloads import (
    Prompt,
    PromptSet,
    load_prompts,
    load_shipped,
    select,
    workload_hash,
)
from hvd_ray.config import Config
from hvd_ray.engines.base import Engine, EngineCapabilities
from hvd_ray.errors import NotSupportedError, UserError
from hvd_ray.fetch import model_fingerprint, resolve_model, tokenizer_sha
from hvd_ray.parts.find import FoundParts, Sources, find_parts, torch_engine
from hvd_ray.provenance import provenance
from hvd_ray.systems import Parts, build_decoder, load_engine
from hvd_ray.text import TextCodec

CacheChoice = Literal["cold", "warm", "both"]
ENGINES = ("torch", "vllm")
BUSY_LOAD = 1.25
"""Processes a core that wanted to run in the last minute, above which a result gets a warning."""
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
    on_bad_line: Literal["fail", "skip"] = "fail"
    split: Literal["train", "test", "all"] = "test"
    limit: int | None = None
    max_tokens: int | None = None
    max_tokens_of: Mapping[str, int] = field(default_factory=dict)
    """By workload, where neither `max_tokens` nor the prompt says."""
    temperature: float | None = None
    cache: CacheChoice = "cold"
    filling_limit: int | None = None
    """Train prompts of a workload that fill a warm cache; None: all."""
    engine: str = "torch"
    concurrency: int = 1
    """Requests served together; more than one in vLLM only."""
    is_timed: bool = True
    """False: others use the machine meanwhile, so that reports leave the times out."""

    def __post_init__(self) -> None:
        if self.prompt_files and self.workloads:
            raise UserError("give --prompts or --workloads, not both")
        counts = {
            "--limit": self.limit,
            "--max-tokens": self.max_tokens,
            "--concurrency": self.concurrency,
        }
        for flag, value in counts.items():
            if value is not None and value < 1:
                raise UserError(f"{flag} must be 1 or more, got {value}")
        if self.temperature is not None and not 0 <= self.temperature < float("inf"):
            raise UserError(f"--temperature must be 0 or more, got {self.temperature}")
        if self.cache not in CACHES:
            raise UserError(f"--cache must be one of {', '.join(CACHES)}, got {self.cache!r}")
        if self.engine not in ENGINES:
            raise NotSupportedError(f"engine {self.engine!r}; choose from {', '.join(ENGINES)}")
        if self.concurrency != 1 and self.engine != "vllm":
            raise NotSupportedError("--concurrency with the torch engine; choose --engine vllm")
        for system in self.systems or ():
            check_measurable(system)

    def sampling(self, seed: int) -> Sampling:
        return Sampling(self.max_tokens, self.temperature, seed, self.max_tokens_of)

    def load(self) -> PromptSet:
        """All prompts of the files or workloads, both splits, and the lines that were skipped.

        Raises:
            UserError: a file or workload cannot be read; a bad line is named.
        """
        if self.prompt_files:
            return load_prompts(self.prompt_files, on_bad_line=self.on_bad_line)
        return load_shipped(self.workloads or None)


class Progress(Protocol):
    """Hears how a run goes."""

    def stage(self, text: str) -> None:
        """Something that takes its time begins."""
        ...

    def expect(self, total: int, *, unit: str | None = None) -> None:
        """How many requests this run will ask, or how many of something else."""
        ...

    def advance(self, done: int, text: str) -> None:
        """`done` requests are answered in all."""
        ...


EngineLoader = Callable[[Config], tuple[Engine, TextCodec]]
SOURCES = Sources()


def run_bench(
    options: BenchOptions,
    config: Config,
    *,
    progress: Progress,
    load_engine: EngineLoader = load_engine,
    sources: Sources = SOURCES,
    store: SampleStore | None = None,
) -> BenchResult:
    """Measure and summarise.

    Args:
        options: what is measured.
        config: model, drafting, policies and seed.
        progress: hears the stages and requests.
        load_engine: of the target; called once everything else is known to be good.
        sources: of predictor, cost table and head; asked if a system needs them.
        store: where samples are kept as they are measured, and found again.

    Raises:
        UserError: something asked for cannot be had; nothing was measured then.
    """
    read = options.load()
    prompts = read.prompts
    chosen = select(prompts, split=options.split, limit=options.limit)
    if options.engine == "vllm":
        from hvd_ray.bench.vllm_session import Asked, run_in_vllm

        return run_in_vllm([Asked(options, chosen, store)], config, progress=progress)[0].result
    systems, found, notes = find_parts(options.systems, config, sources)
    load_average = os.getloadavg()[0]
    doubts = [*load_notes(load_average, options), *_costs_notes(found)]
    for doubt in doubts:
        progress.stage(doubt)
    notes = [*doubts, *(f"skipped {line}" for line in read.bad_lines), *notes]
    arms = choose_arms(systems, CACHES[options.cache])
    is_warm = any(arm.cache == "warm" for arm in arms)
    fillers = choose_filling(prompts, chosen, limit=options.filling_limit) if is_warm else {}
    progress.stage(f"loading {config.model} ({config.dtype})")
    engine, codec = load_engine(config)
    plan = _plan(arms, chosen, fillers, engine=engine, codec=codec, options=options, config=config)
    parts, engine = found.load(engine, codec, config)
    build = _builder(engine, codec, config, parts)
    progress.stage(f"warming up {len(arms)} systems")
    progress.expect(plan.num_requests)
    num_done = count(1)
    samples = measure(
        plan,
        build=build,
        on_request=lambda text: progress.advance(next(num_done), text),
        store=store,
    )
    about = provenance(
        config=config,
        workload_hash=workload_hash(chosen),
        options=plain_options(options),
        filling_prompts={workload: len(asked) for workload, asked in plan.filling.items()},
        warm_up="one short request a system, one pass of each number of rows; not counted",
        load_average=round(load_average, 2),
        **checkpoint(config),
        **found.facts,
        **({"rivals": rival_facts()} if set(systems) & set(RIVALS) else {}),
    )
    return summarise(samples, engine.capabilities, config, notes=notes, about=about)


def load_notes(load_average: float, options: BenchOptions) -> list[str]:
    """A warning where others use the machine that is to be measured."""
    num_cores = len(os.sched_getaffinity(0))
    if not options.is_timed or load_average <= BUSY_LOAD * num_cores:
        return []
    return [
        f"Careful: a load of {load_average:.1f} on {num_cores} cores when it began: something else "
        "was running, so times and speed-ups may be far off. Measure again on a quiet machine, or "
        "leave times out with --untimed."
    ]


def _costs_notes(found: FoundParts) -> list[str]:
    """A warning where decisions rest on a table that something disturbed."""
    costs = found.costs
    if costs is None or costs.disturbance is None:
        return []
    return [f"Careful: the cost table {costs.disturbance}; decisions rest on it: {costs.again}."]


def _plan(
    arms: tuple[Arm, ...],
    chosen: Sequence[Prompt],
    fillers: Mapping[str, Sequence[Prompt]],
    *,
    engine: Engine,
    codec: TextCodec,
    options: BenchOptions,
    config: Config,
) -> Plan:
    sampling = options.sampling(config.seed)
    filling = [prompt for of_workload in fillers.values() for prompt in of_workload]
    measured, known = (
        ask(prompts, codec=codec, capabilities=engine.capabilities, sampling=sampling)
        for prompts in (chosen, filling)
    )
    return Plan(arms, measured, known)


def _builder(engine: Engine, codec: TextCodec, config: Config, parts: Parts) -> BuildDecoder:
    def build(system: str) -> Measured:
        if system in RIVALS:
            return RivalDecoder(system, torch_engine(engine), codec)
        return build_decoder(system, engine=engine, codec=codec, config=config, parts=parts)

    return build


def checkpoint(config: Config) -> dict[str, str]:
    """Which weights and tokenizer were measured, whatever their folder is called."""
    model = resolve_model(config.model)
    if not model.is_local:
        return {}
    return {
        "model_fingerprint": model_fingerprint(model.path_or_id),
        "tokenizer_sha": tokenizer_sha(model.path_or_id),
    }


def plain_options(options: BenchOptions) -> dict[str, Any]:
    return asdict(options) | {"prompt_files": [str(path) for path in options.prompt_files]}


def summarise(
    samples: Sequence[Sample],
    target: EngineCapabilities,
    config: Config,
    *,
    notes: Sequence[str],
    about: Mapping[str, Any],
) -> BenchResult:
    """The rows of a run and the plain words on them; none on speed where it was not timed."""
    labels = {"engine": target.name, "dtype": target.dtype}
    rows = tuple(workload_rows(samples, **labels, seed=config.seed))
    aggregate = tuple(aggregate_rows(samples, **labels, seed=config.seed))
    result = BenchResult(about, tuple(notes), rows, aggregate)
    of_speed = slowdown_notes(rows) if result.is_timed else (UNTIMED,)
    faults = exactness_notes(rows, config=config)
    return replace(result, notes=(*notes, *cut_notes(rows), *faults, *of_speed))
