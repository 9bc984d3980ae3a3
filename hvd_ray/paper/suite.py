"""`hvd bench --suite paper`: measured alone and in turns, stored prompt by prompt, then replayed.

The folder holds `manifest.json`, which says what was asked; `cells/`, every prompt's samples; and
`paper.json`, a result of `hvd bench` with the suite's own part under `paper`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hvd_ray.bench.cells import Sample
from hvd_ray.bench.result import BenchResult
from hvd_ray.bench.rivals import RIVALS
from hvd_ray.bench.session import SOURCES, BenchOptions, EngineLoader, Progress, run_bench
from hvd_ray.bench.workloads import workload_hash
from hvd_ray.config import Config
from hvd_ray.errors import UserError
from hvd_ray.home import atomic_path
from hvd_ray.paper.against import against_json
from hvd_ray.paper.beside import OURS
from hvd_ray.paper.cycles import cycles_json
from hvd_ray.paper.replays import replays_json, traces_of
from hvd_ray.paper.samples import SampleFolder
from hvd_ray.parts.find import FoundParts, Sources, find_parts
from hvd_ray.payoff.cost import RowCosts
from hvd_ray.pipelines.label import token_classes_of
from hvd_ray.pipelines.output import claimed
from hvd_ray.pipelines.spread import workers
from hvd_ray.systems import load_engine

SUITES = ("paper", "tiers")
RESULT = "paper.json"
FILLING = 16
"""Train prompts of a workload that a warm cache has seen; `--limit` may make it fewer."""


@dataclass(frozen=True, slots=True)
class SuiteOptions:
    """What a suite is asked for."""

    bench: BenchOptions
    out: Path
    """The folder that is filled."""
    concurrencies: tuple[int, ...] = (1,)
    num_workers: int = 1
    """Who replays, once nothing is timed any more."""
    """Requests served together, one result each; more than one in vLLM only."""


def suite_options(
    bench: BenchOptions,
    *,
    prompts_dir: Path,
    out: Path,
    concurrencies: tuple[int, ...] = (1,),
    num_workers: int = 1,
) -> SuiteOptions:
    """The paper's comparison on every file of a folder.

    Raises:
        UserError: the folder has no prompt files.
    """
    files = tuple(sorted(prompts_dir.glob("*.jsonl")))
    if not files:
        raise UserError(
            f"{prompts_dir}: holds no *.jsonl files of prompts: those of the papers' 16 "
            "workloads are not shipped (their licences are others'); name a folder with "
            "--prompts-dir that holds one file a workload, e.g. gsm8k.jsonl, with lines of "
            '{"messages": [{"role": "user", "content": "..."}]}'
        )
    filling = FILLING if bench.limit is None else min(FILLING, bench.limit)
    suited = replace(bench, prompt_files=files, filling_limit=filling)
    return SuiteOptions(suited, out, concurrencies, num_workers)


def run_suite(
    options: SuiteOptions,
    config: Config,
    *,
    progress: Progress,
    load_engine: EngineLoader = load_engine,
    sources: Sources = SOURCES,
) -> tuple[BenchResult, dict[str, Any]]:
    """Measure what is not measured yet, replay, and write the result.

    Returns:
        The bench's result, and the suite's own part of it.

    Raises:
        UserError: something asked for cannot be had; another run or other settings in the folder.
    """
    found = _Found(sources)
    bench = _with_rivals(options.bench, sources, config)
    store = _Remembering(SampleFolder(options.out))
    with claimed(options.out, settings_of("paper", bench, config)) as folder:
        result = run_bench(
            bench,
            config,
            progress=progress,
            load_engine=load_engine,
            sources=found.sources,
            store=store,
        )
        own = {
            **cycles_json(store.samples),
            "against": against_json(store.samples, OURS, seed=config.seed),
            **_replayed(store.samples, found.parts, config, progress, options.num_workers),
        }
        write_suite(options.out / RESULT, result, own)
        folder.finish({"prompts": store.folder.num_kept()}, about=result.provenance)
    return result, own


def write_suite(path: Path, result: BenchResult, own: Mapping[str, Any]) -> None:
    """A result of `hvd bench` with the suite's part, whole or not at all."""
    text = json.dumps({**result.as_json(), "paper": dict(own)}, indent=2, allow_nan=False)
    with atomic_path(path) as draft:
        draft.write_text(text + "\n", encoding="utf-8")


def _with_rivals(options: BenchOptions, sources: Sources, config: Config) -> BenchOptions:
    """All systems that can be built here, then the rivals; what was named stays as named."""
    if options.systems is not None:
        return options
    kept, _, _ = find_parts(None, config, sources)
    return replace(options, systems=(*kept, *RIVALS))


def settings_of(suite: str, options: BenchOptions, config: Config) -> dict[str, Any]:
    """What decides the samples of a suite."""
    prompts = options.load().prompts
    asked = asdict(options) | {"prompt_files": [path.name for path in options.prompt_files]}
    if not options.max_tokens_of:
        del asked["max_tokens_of"]  # folders of earlier versions can be gone on with
    return {
        "command": f"bench --suite {suite}",
        **asked,
        "prompts": workload_hash(prompts),
        "config": config.model_dump(mode="json"),
    }


def _replayed(
    samples: Sequence[Sample],
    parts: FoundParts,
    config: Config,
    progress: Progress,
    num_workers: int,
) -> dict[str, Any]:
    traces = traces_of(samples, context_length=2**20)
    if not traces:
        return {}
    costs = parts.costs.table() if parts.costs is not None else None
    assert costs is None or isinstance(costs, RowCosts)
    with workers(num_workers) as started:
        return replays_json(
            traces,
            classes=token_classes_of(config.model, ""),
            payoff=parts.payoff,
            costs=costs,
            config=config,
            progress=progress,
            workers=started,
        )


class _Found:
    """Notes which parts a run has found, for the replays after it."""

    def __init__(self, sources: Sources) -> None:
        self.parts = FoundParts()
        self._inner = sources

    @property
    def sources(self) -> Sources:
        return Sources(self._payoff, self._costs, self._inner.head)

    def _payoff(self, config: Config) -> Any:
        self.parts.payoff = self._inner.payoff(config)
        return self.parts.payoff

    def _costs(self, config: Config) -> Any:
        self.parts.costs = self._inner.costs(config)
        return self.parts.costs


class _Remembering:
    """A store that also keeps what passes through it at hand, in the order of the run."""

    def __init__(self, folder: SampleFolder) -> None:
        self.folder = folder
        self._samples: dict[str, list[Sample]] = {}

    @property
    def samples(self) -> list[Sample]:
        return [sample for samples in self._samples.values() for sample in samples]

    def stored(self, question: Any) -> list[Sample] | None:
        found = self.folder.stored(question)
        if found is not None:
            self._samples[question.request.request_id] = found
        return found

    def keep(self, samples: Sequence[Sample]) -> None:
        self.folder.keep(samples)
        self._samples[samples[0].request.request_id] = list(samples)
