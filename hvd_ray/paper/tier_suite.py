"""`hvd bench --suite tiers`: every use of a slim model, on four tasks whose quality has a score.

Nothing bounds the loss here: break-even guard, loss budget and fall-back are off, so that the table
shows what a gate by itself costs, saves and loses. The folder holds `cells/`, every prompt's
samples, and `tiers.json`, a result of `hvd bench`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from hvd_ray.bench.result import BenchResult
from hvd_ray.bench.session import SOURCES, BenchOptions, EngineLoader, Progress, run_bench
from hvd_ray.config import Config
from hvd_ray.errors import UserError
from hvd_ray.paper.samples import SampleFolder
from hvd_ray.paper.suite import settings_of
from hvd_ray.parts.find import Sources
from hvd_ray.pipelines.output import claimed
from hvd_ray.systems import load_engine

TASKS = ("gsm8k", "wmt14_de_en", "cnn_dailymail", "json_schema")
"""Prompt files; `bench/quality.py` scores them."""
MAX_TOKENS = MappingProxyType(
    {"gsm8k": 320, "wmt14_de_en": 128, "cnn_dailymail": 128, "json_schema": 256}
)
"""Room for most answers to end by themselves: half a JSON object is none."""
TIER_SYSTEMS = (
    *("suffix", "hvd_cost", "self_spec", "nested", "hvd_cost+nested"),
    *("tiered", "tiered_learned", "hvd_cost+tiered", "hvd_cost+tiered_learned"),
    *("cascade_chow", "cascade_diff", "cascade_opt", "cascade_token_v3", "hvd_cost+cascade_opt"),
)
RESULT = "tiers.json"


def tier_options(bench: BenchOptions, *, prompts_dir: Path) -> BenchOptions:
    """The suite's prompts, and its systems and lengths of answers where none were named.

    Raises:
        UserError: a task's file is absent.
    """
    files = tuple(prompts_dir / f"{task}.jsonl" for task in TASKS)
    if absent := [file for file in files if not file.exists()]:
        raise UserError(
            f"{absent[0]}: absent; prompts of suites are not shipped, name a folder that has "
            "them with --prompts-dir"
        )
    return replace(
        bench,
        prompt_files=files,
        systems=bench.systems or TIER_SYSTEMS,
        max_tokens_of=dict(MAX_TOKENS) if bench.max_tokens is None else {},
    )


def unbounded(config: Config) -> Config:
    """With nothing that keeps a lossy system from being run and from losing."""
    free = {"is_forced": True, "max_miss_rate": 1.0, "loss_budget": 1e6}
    return config.model_copy(update={"tiers": config.tiers.model_copy(update=free)})


def run_tiers(
    options: BenchOptions,
    config: Config,
    *,
    out: Path,
    progress: Progress,
    load_engine: EngineLoader = load_engine,
    sources: Sources = SOURCES,
) -> BenchResult:
    """Measure what is not measured yet and write the result.

    Raises:
        UserError: something asked for cannot be had; other settings in the folder.
    """
    free, store = unbounded(config), SampleFolder(out)
    with claimed(out, settings_of("tiers", options, free)) as folder:
        result = run_bench(
            options,
            free,
            progress=progress,
            load_engine=load_engine,
            sources=sources,
            store=store,
        )
        result.write(out / RESULT)
        folder.finish({"prompts": store.num_kept()}, about=result.provenance)
    return result
