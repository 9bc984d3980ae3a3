"""`hvd traces collect`: prompts to traces and steps, one engine an actor, on Ray Data."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from hvd_ray.bench.plan import Sampling
from hvd_ray.bench.workloads import (
    Prompt,
    PromptSet,
    load_prompts,
    load_shipped,
    select,
    workload_hash,
)
from hvd_ray.config import Config
from hvd_ray.engines.base import EngineCapabilities
from hvd_ray.errors import UserError
from hvd_ray.fetch import model_fingerprint, resolve_model, tokenizer_sha
from hvd_ray.parts.find import FoundParts, Sources, find_parts
from hvd_ray.pipelines.collection import (
    NUM_SHARDS,
    CollectShard,
    TargetFacts,
    collect_shard,
    plan_shards,
    plan_traces,
    summarise,
)
from hvd_ray.pipelines.output import claimed
from hvd_ray.pipelines.shards import Counts, Report, RunProgress, run_shards
from hvd_ray.pipelines.suspects import FOLDER as SUSPECTS
from hvd_ray.provenance import provenance
from hvd_ray.systems import build_decoder, check_system, load_engine
from hvd_ray.text import HFTextCodec, TextCodec
from hvd_ray.traces.schema import SCHEMA_VERSION

MAX_NAMED = 5
"""Skipped prompt lines that are named; all are counted."""
BYTES_BESIDE_WEIGHTS = 1_500_000_000
"""What a process with torch and a cache of keys and values takes besides."""


@dataclass(frozen=True, slots=True)
class CollectOptions:
    """What a collection is asked for; each field is a flag of `hvd traces collect`.

    Raises:
        UserError: a value is out of range, unknown, or contradicts another.
    """

    out: Path
    prompt_files: tuple[Path, ...] = ()
    workloads: tuple[str, ...] = ()
    """Shipped ones; all where neither files nor workloads are given."""
    on_bad_line: Literal["fail", "skip"] = "fail"
    split: Literal["train", "test", "all"] = "all"
    limit: int | None = None
    """Prompts of each workload."""
    policy: str = "greedy"
    max_tokens: int | None = None
    temperature: float | None = None
    num_workers: int | None = None
    """Engines side by side; None: `default_num_workers`."""
    gpus_per_worker: float = 0
    """GPUs that each engine claims of Ray; parts of one let engines share it."""
    num_shards: int = NUM_SHARDS
    """Units of work, each with a cache of its own; no more workers than these are of use."""

    def __post_init__(self) -> None:
        if self.prompt_files and self.workloads:
            raise UserError("give --prompts or --workloads, not both")
        numbers = {
            "--limit": self.limit,
            "--max-tokens": self.max_tokens,
            "--workers": self.num_workers,
            "--shards": self.num_shards,
        }
        for flag, value in numbers.items():
            if value is not None and value < 1:
                raise UserError(f"{flag} must be 1 or more, got {value}")
        if not 0 <= self.gpus_per_worker < float("inf"):
            raise UserError(f"--gpus-per-worker must be 0 or more, got {self.gpus_per_worker}")
        if self.gpus_per_worker and self.num_workers is None:
            raise UserError("--gpus-per-worker needs --workers: say how many engines to start")
        if self.temperature is not None and not 0 <= self.temperature < float("inf"):
            raise UserError(f"--temperature must be 0 or more, got {self.temperature}")
        check_system(self.policy)

    def load(self) -> PromptSet:
        """The prompts of the files or workloads, both splits.

        Raises:
            UserError: a file or workload cannot be read; a bad line is named.
        """
        if self.prompt_files:
            return load_prompts(self.prompt_files, on_bad_line=self.on_bad_line)
        return load_shipped(self.workloads or None)


def collect(options: CollectOptions, config: Config, *, progress: RunProgress) -> dict[str, Any]:
    """Decode the prompts and write `traces/` and `steps/` under `options.out`.

    A run that was killed is taken up again by the same call and ends with the same rows.

    Returns:
        What the folder holds now, as JSON values.

    Raises:
        UserError: a bad prompt line, no prompt that can work, another run or other settings in
            the folder; nothing has been written then.
    """
    _, found, _ = find_parts((options.policy,), config, Sources())
    read = options.load()
    prompts = select(read.prompts, split=options.split, limit=options.limit)
    progress.stage(f"reading {len(prompts)} prompts with the tokenizer of {config.model}")
    codec, target = open_target(config)
    sampling = Sampling(options.max_tokens, options.temperature, config.seed)
    traces = plan_traces(
        prompts, codec=codec, target=target, sampling=sampling, policy=options.policy
    )
    shards = plan_shards(traces, num_shards=options.num_shards)
    settings = _settings(options, config, target, prompts, found)
    with claimed(options.out, settings, notes={"model": _findable(config.model)}) as folder:
        todo = [shard for shard in shards if not shard.is_finished(options.out)]
        _run(todo, options, config, found, progress)
        shutil.rmtree(options.out / SUSPECTS, ignore_errors=True)
        summary = summarise(options.out, shards)
        skipped = {"skipped_lines": len(read.bad_lines), "skipped": read.bad_lines[:MAX_NAMED]}
        result = {**summary.as_json(), **skipped}
        folder.finish(result, about=provenance(config=config, workload_hash=workload_hash(prompts)))
    return {"out": str(options.out), "resumed": folder.is_resumed, **result}


def open_target(config: Config) -> tuple[TextCodec, TargetFacts]:
    """Tokenizer and limits of the target, without its weights.

    Raises:
        UserError: the model cannot be found, or its configuration not be read.
    """
    from hvd_ray.engines.torch_engine import quiet_libraries
    from hvd_ray.targets.loading import read_model_config

    quiet_libraries()
    model = resolve_model(config.model)
    limits = read_model_config(model.path_or_id).get_text_config()
    capabilities = EngineCapabilities(
        name="torch",
        vocab_size=limits.vocab_size,
        context_length=limits.max_position_embeddings,
        eos_token_ids=(),  # of no concern before decoding
        dtype=config.dtype,
    )
    folder = model.path_or_id if model.is_local else None
    return HFTextCodec(model.path_or_id), TargetFacts(
        model=model.name,
        fingerprint=model_fingerprint(folder) if folder else model.name,
        tokenizer_sha=tokenizer_sha(folder) if folder else "",
        capabilities=capabilities,
    )


def default_num_workers(model: str) -> int:
    """One engine for each core, as far as the memory goes: a small model gains more from that
    than from a second thread.
    """
    folder = Path(resolve_model(model).path_or_id)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(_num_cores(), free // (2 * weights + BYTES_BESIDE_WEIGHTS)))


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


class CollectWorker:
    """Decodes shards with one engine."""

    def __init__(
        self, config: Config, found: FoundParts, *, policy: str, out: Path, run: str
    ) -> None:
        engine, self._codec = load_engine(config)
        self._parts, self._engine = found.load(engine, self._codec, config)
        self._config = config
        self._policy = policy
        self._out = out
        self._run = run

    def run(self, shard: CollectShard, report: Report) -> None:
        if shard.is_finished(self._out):
            return
        decoder = build_decoder(
            self._policy,
            engine=self._engine,
            codec=self._codec,
            config=self._config,
            parts=self._parts,
        )
        collect_shard(shard, decoder=decoder, out=self._out, report=report, run=self._run)


def _run(
    shards: Sequence[CollectShard],
    options: CollectOptions,
    config: Config,
    found: FoundParts,
    progress: RunProgress,
) -> None:
    if not shards:
        return
    num_workers = min(options.num_workers or default_num_workers(config.model), len(shards))
    threads = config.num_threads or max(1, _num_cores() // num_workers)
    config = config.model_copy(update={"num_threads": threads})
    progress.stage("starting Ray and loading the target")
    progress.expect(sum(_num_left(shard, options.out) for shard in shards))

    def on_counts(counts: Counts) -> None:
        progress.advance(counts.get("done", 0), f"{counts.get('tokens', 0):,} tokens")

    run_shards(
        shards,
        partial(
            CollectWorker,
            *(config, found),
            policy=options.policy,
            out=options.out.absolute(),
            run=secrets.token_hex(8),
        ),
        num_workers=num_workers,
        cpus_per_worker=threads,
        gpus_per_worker=options.gpus_per_worker,
        on_counts=on_counts,
    )


def _num_left(shard: CollectShard, out: Path) -> int:
    left = (part for part in shard.parts if not part.traces_file(out).exists())
    return sum(len(part.traces) for part in left)


def _findable(model: str) -> str:
    """The model as it can be named from any folder."""
    folder = Path(model).expanduser()
    return str(folder.resolve()) if folder.is_dir() else model


def _settings(
    options: CollectOptions,
    config: Config,
    target: TargetFacts,
    prompts: Sequence[Prompt],
    found: FoundParts,
) -> Mapping[str, Any]:
    """What decides the rows; how many workers there are does not."""
    used = config.model_dump(mode="json", include={"drafting", "policy", "seed"})
    used["policy"].pop("name")
    return {
        "command": "traces collect",
        "schema_version": SCHEMA_VERSION,
        "model": target.model,
        "model_fingerprint": target.fingerprint,
        "dtype": target.capabilities.dtype,
        "policy": options.policy,
        "parts": found.facts,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "shards": options.num_shards,
        "num_prompts": len(prompts),
        "workload_hash": workload_hash(prompts),
        "config": used,
    }
