"""The engines of `hvd bench --engine vllm`: what each system is in vLLM, and starting them all.

`greedy`, `ngram`, `suffix` and `eagle3` are vLLM's own methods; the others are the plugin's
policies. Every system has an engine in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hvd_ray.bench.cells import Arm
from hvd_ray.bench.engine_process import Answer, EngineProcess
from hvd_ray.bench.result import BASELINE
from hvd_ray.config import Config
from hvd_ray.engines.base import EngineCapabilities
from hvd_ray.errors import NotSupportedError, UserError
from hvd_ray.fetch import resolve_model
from hvd_ray.systems import HYBRIDS, head_folder
from hvd_ray.types import Request, Source

if TYPE_CHECKING:
    from hvd_ray.bench.session import Progress

SYSTEMS = ("greedy", "ngram", "suffix", "eagle3", "hvd_cost")
"""Compared unless others are named."""
MAX_DRAFT_TOKENS = 32
"""`num_speculative_tokens` of `suffix` and the hybrids."""
MAX_MODEL_LEN = 4096
"""Prompt and answer of a request, in tokens; the longest prompts of the papers' sets fit."""
GPU_KEY = "gpu_memory_utilization"
GPU_SHARE = 0.9
"""Of a GPU's memory, for all engines together."""
_POLICIES = {"hvd_cost": "cost", "hvd_tau": "tau", "rule_score": "score", "rule_match": "match"}
_JUDGED = frozenset({"hvd_cost", "hvd_tau"})
"""Policies that ask a predictor."""
_OWN = "own"
"""The plugin's word for the cache's own probabilities in a predictor's place."""
OWN_SOURCE = {
    "ngram": Source.NGRAM,
    "suffix": Source.SUFFIX,
    "eagle3": Source.EAGLE3,
}
"""What vLLM's own methods draft from."""


class Engine(Protocol):
    """What a system is asked through; `EngineProcess`, or a test's stand-in."""

    def start(self) -> None: ...

    def wait_ready(self) -> None: ...

    def serve(self, requests: Sequence[Request]) -> tuple[float, list[Answer]]: ...

    def reset(self) -> None: ...

    def close(self) -> None: ...


OpenEngine = Callable[[dict[str, Any]], Engine]


@dataclass(frozen=True, slots=True)
class Wave:
    """Requests that are served together."""

    concurrency: int
    max_model_len: int = MAX_MODEL_LEN


def target_limits(config: Config) -> EngineCapabilities:
    """What the engines can hold.

    Raises:
        UserError: the model's configuration cannot be read.
    """
    from hvd_ray.targets.loading import read_model_config

    limits = read_model_config(resolve_model(config.model).path_or_id).get_text_config()
    return EngineCapabilities(
        name="vllm",
        vocab_size=limits.vocab_size,
        context_length=min(MAX_MODEL_LEN, limits.max_position_embeddings),
        eos_token_ids=(),
        dtype=config.dtype,
    )


def engine_arguments(system: str, config: Config, wave: Wave) -> dict[str, Any]:
    """vLLM's arguments for a system.

    Raises:
        UserError: the system needs a head and there is none.
    """
    base: dict[str, Any] = {
        "model": resolve_model(config.model).path_or_id,
        "trust_remote_code": False,
        "load_format": "safetensors",
        "dtype": config.dtype,
        "max_model_len": wave.max_model_len,
        "max_num_seqs": wave.concurrency,
        "seed": config.seed % 2**32,
    }
    speculation = _speculation(system, config)
    if speculation is not None:
        base["speculative_config"] = speculation
    if system in HYBRIDS:
        base["additional_config"] = {"hvd": _section(system, config)}
    return base


def memory_share(num_engines: int) -> dict[str, float]:
    """What goes beside the arguments of engines that are loaded at the same time: their part of a
    GPU, of which each would take nearly all. A CPU's engines take what VLLM_CPU_KVCACHE_SPACE says.
    """
    return {GPU_KEY: round(GPU_SHARE / num_engines, 3)}


def _speculation(system: str, config: Config) -> dict[str, Any] | None:
    if system == BASELINE:
        return None
    if system == "ngram":
        ngram = config.drafting.ngram
        return {
            "method": "ngram",
            "num_speculative_tokens": ngram.max_draft_tokens,
            "prompt_lookup_min": ngram.min_match,
            "prompt_lookup_max": ngram.max_match,
        }
    if system == "suffix":
        return {"method": "suffix", "num_speculative_tokens": MAX_DRAFT_TOKENS}
    head_tokens = config.drafting.eagle3.num_tokens
    tokens = head_tokens if system == "eagle3" else max(MAX_DRAFT_TOKENS, head_tokens)
    head = str(head_folder(config).absolute())
    return {"method": "eagle3", "model": head, "num_speculative_tokens": tokens}


def _section(system: str, config: Config) -> dict[str, Any]:
    """The plugin's section; without a predictor the cache's own estimate decides."""
    section: dict[str, Any] = {
        "policy": _POLICIES[system],
        "eagle3_tokens": config.drafting.eagle3.num_tokens,
        "cache": config.drafting.suffix.model_dump(),
    }
    if system in _JUDGED:
        section["payoff"] = _predictor(config)
    if system == "hvd_cost" and config.policy.costs is not None:
        section["costs"] = str(Path(config.policy.costs).absolute())
    if system == "hvd_tau":
        section["tau"] = config.policy.tau
    if system == "rule_match":
        section["min_match"] = config.policy.min_match
    return section


def _predictor(config: Config) -> str:
    from hvd_ray.tracking import resolve_predictor

    try:
        return str(resolve_predictor(config=config).absolute())
    except UserError:
        if config.policy.predictor is not None:
            raise
        return _OWN


def predictor_facts(systems: Collection[str], config: Config) -> dict[str, Any]:
    """For the provenance of a result: what `_predictor` gave the engines, if any asked for it."""
    if not _JUDGED & set(systems):
        return {}
    if _predictor(config) == _OWN:
        return {"predictor": "the cache's own estimate"}
    from hvd_ray.parts.payoff import find_payoff

    return find_payoff(config).facts


@contextmanager
def opened_engines(
    arms: Sequence[Arm],
    config: Config,
    wave: Wave,
    *,
    progress: Progress,
    open_engine: OpenEngine = EngineProcess,
) -> Iterator[dict[str, Engine]]:
    """An engine for each system, started one after the other, and ended.

    Raises:
        UserError: a system has no place in vLLM, or an engine cannot be started.
    """
    known = (BASELINE, *OWN_SOURCE, *_POLICIES)
    for arm in arms:
        if arm.system not in known:
            raise NotSupportedError(f"system {arm.system!r} with --engine vllm")
    if any(arm.cache == "warm" for arm in arms):
        raise NotSupportedError("--cache warm with --engine vllm; choose --cache cold")
    shared = memory_share(len(arms))
    with ExitStack() as opened:
        engines: dict[str, Engine] = {}
        for arm in arms:
            progress.stage(f"starting vLLM for {arm.system}")
            engine = open_engine(engine_arguments(arm.system, config, wave) | shared)
            opened.callback(engine.close)
            engine.start()
            engine.wait_ready()
            engines[arm.system] = engine
        yield engines
