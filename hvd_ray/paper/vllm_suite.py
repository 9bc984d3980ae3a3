"""`hvd bench --suite paper --engine vllm`: the papers' workloads inside vLLM, at several loads.

The engines are loaded once for all workloads and loads. The folder holds one of `at-N` for each
concurrency N, with what a suite's folder holds: its manifest, `cells/` and `paper.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvd_ray.bench.engine_process import EngineProcess
from hvd_ray.bench.result import BenchResult
from hvd_ray.bench.session import BenchOptions, Progress
from hvd_ray.bench.vllm_engines import OpenEngine
from hvd_ray.bench.vllm_session import Asked, run_in_vllm
from hvd_ray.bench.workloads import Prompt, select
from hvd_ray.config import Config
from hvd_ray.paper.against import against_json
from hvd_ray.paper.beside import OURS
from hvd_ray.paper.cycles import cycles_json
from hvd_ray.paper.samples import SampleFolder
from hvd_ray.paper.suite import RESULT, SuiteOptions, settings_of, write_suite
from hvd_ray.pipelines.output import claimed


@dataclass(frozen=True, slots=True)
class Loaded:
    """The suite at one concurrency."""

    folder: Path
    result: BenchResult
    own: dict[str, Any]


def run_vllm_suite(
    options: SuiteOptions,
    config: Config,
    *,
    progress: Progress,
    open_engine: OpenEngine = EngineProcess,
) -> list[Loaded]:
    """Measure what is not measured yet, at each concurrency, and write the results.

    Raises:
        UserError: something asked for cannot be had; another run or other settings in a folder.
    """
    loads = [replace(options.bench, concurrency=number) for number in options.concurrencies]
    folders = [options.out / f"at-{load.concurrency}" for load in loads]
    prompts = options.bench.load().prompts
    asked = [
        Asked(load, _chosen(prompts, load), SampleFolder(folder))
        for load, folder in zip(loads, folders, strict=True)
    ]
    with ExitStack() as held:
        outputs = [
            held.enter_context(claimed(folder, settings_of("paper", load, config)))
            for load, folder in zip(loads, folders, strict=True)
        ]
        found = run_in_vllm(asked, config, progress=progress, open_engine=open_engine)
        results = []
        for folder, output, one in zip(folders, outputs, found, strict=True):
            rivals = against_json(one.samples, OURS, seed=config.seed)
            own = {**cycles_json(one.samples), "cycle_costs": [], "against": rivals}
            write_suite(folder / RESULT, one.result, own)
            output.finish({"prompts": SampleFolder(folder).num_kept()}, about=one.result.provenance)
            results.append(Loaded(folder, one.result, own))
    return results


def _chosen(prompts: Sequence[Prompt], options: BenchOptions) -> tuple[Prompt, ...]:
    """At most `limit` waves of each workload: as many prompts as are served together, so often."""
    limit = None if options.limit is None else options.limit * options.concurrency
    return select(prompts, split=options.split, limit=limit)
