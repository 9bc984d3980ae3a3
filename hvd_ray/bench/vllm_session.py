"""One run of `hvd bench --engine vllm`, at one concurrency or at several with the same engines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_ray.bench.cells import Sample
from hvd_ray.bench.engine_process import EngineProcess
from hvd_ray.bench.measure import SampleStore
from hvd_ray.bench.plan import Plan, ask, choose_arms
from hvd_ray.bench.result import BenchResult
from hvd_ray.bench.session import (
    CACHES,
    BenchOptions,
    Progress,
    checkpoint,
    load_notes,
    plain_options,
    summarise,
)
from hvd_ray.bench.vllm_engines import SYSTEMS, OpenEngine, predictor_facts, target_limits
from hvd_ray.bench.vllm_run import Load, run_loads
from hvd_ray.bench.workloads import Prompt, workload_hash
from hvd_ray.config import Config
from hvd_ray.fetch import resolve_model
from hvd_ray.provenance import provenance
from hvd_ray.text import HFTextCodec


@dataclass(frozen=True, slots=True)
class Asked:
    """What is measured at one concurrency, that of the options."""

    options: BenchOptions
    chosen: Sequence[Prompt]
    store: SampleStore | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """What came of it."""

    result: BenchResult
    samples: Sequence[Sample]


def run_in_vllm(
    asked: Sequence[Asked],
    config: Config,
    *,
    progress: Progress,
    open_engine: OpenEngine = EngineProcess,
) -> list[Found]:
    """The comparison with every system in a vLLM engine of its own; one result for each of `asked`.

    Raises:
        UserError: a system has no place in vLLM, a prompt does not fit, or an engine cannot start.
    """
    limits = target_limits(config)
    codec = HFTextCodec(resolve_model(config.model).path_or_id)
    arms = choose_arms(asked[0].options.systems or SYSTEMS, CACHES[asked[0].options.cache])
    loads = []
    for one in asked:
        options = one.options
        sampling = options.sampling(config.seed)
        measured = ask(one.chosen, codec=codec, capabilities=limits, sampling=sampling)
        loads.append(Load(Plan(arms, measured, {}), options.concurrency, one.store))
    load_average = os.getloadavg()[0]
    doubts = load_notes(load_average, asked[0].options)
    for doubt in doubts:
        progress.stage(doubt)
    runs = run_loads(
        loads,
        config,
        max_model_len=limits.context_length,
        progress=progress,
        open_engine=open_engine,
    )
    found = []
    for one, samples in zip(asked, runs, strict=True):
        about = provenance(
            config=config,
            workload_hash=workload_hash(one.chosen),
            options=plain_options(one.options),
            warm_up="one short request a system; not counted",
            load_average=round(load_average, 2),
            **checkpoint(config),
            **predictor_facts({arm.system for arm in arms}, config),
        )
        result = summarise(samples, limits, config, notes=doubts, about=about)
        found.append(Found(result, samples))
    return found
