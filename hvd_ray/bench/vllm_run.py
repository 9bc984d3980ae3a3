"""`hvd bench --engine vllm`: the systems inside vLLM, against vLLM's own speculation.

`greedy`, `ngram`, `suffix` and `eagle3` are vLLM's own methods; the others are the plugin's
policies. Every system has an engine in a process of its own; all are loaded, and they are asked in
turns, wave by wave, so that whatever else the machine does meets all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hvd_ray.bench.cells import Arm, Sample
from hvd_ray.bench.engine_process import Answer, EngineProcess
from hvd_ray.bench.measure import WARM_UP_TOKENS
from hvd_ray.bench.plan import Plan, Question
from hvd_ray.bench.result import BASELINE, Difference
from hvd_ray.config import Config
from hvd_ray.engines.base import EngineCapabilities
from hvd_ray.errors import NotSupportedError, UserError
from hvd_ray.fetch import resolve_model
from hvd_ray.systems import HYBRIDS, head_folder
from hvd_ray.types import Completion, FinishReason, Request, Source, Step

if TYPE_CHECKING:
    from hvd_ray.bench.session import Progress

SYSTEMS = ("greedy", "ngram", "suffix", "eagle3", "hvd_cost")
"""Compared unless others are named."""
MAX_DRAFT_TOKENS = 32
"""`num_speculative_tokens` of `suffix` and the hybrids."""
_POLICIES = {"hvd_cost": "cost", "hvd_tau": "tau", "rule_score": "score", "rule_match": "match"}
_OWN_SOURCE = {
    "ngram": Source.NGRAM,
    "suffix": Source.SUFFIX,
    "eagle3": Source.EAGLE3,
}


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
    max_model_len: int = 2048


def target_limits(config: Config, wave: Wave) -> EngineCapabilities:
    """What the engines can hold.

    Raises:
        UserError: the model's configuration cannot be read.
    """
    from hvd_ray.engines.torch_engine import read_model_config

    limits = read_model_config(resolve_model(config.model).path_or_id).get_text_config()
    return EngineCapabilities(
        name="vllm",
        vocab_size=limits.vocab_size,
        context_length=min(wave.max_model_len, limits.max_position_embeddings),
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
    tokens = config.drafting.eagle3.num_tokens if system == "eagle3" else MAX_DRAFT_TOKENS
    head = str(head_folder(config).absolute())
    return {"method": "eagle3", "model": head, "num_speculative_tokens": tokens}


def _section(system: str, config: Config) -> dict[str, Any]:
    """The plugin's section; without a predictor the cache's own estimate decides."""
    section: dict[str, Any] = {
        "policy": _POLICIES[system],
        "eagle3_tokens": config.drafting.eagle3.num_tokens,
        "cache": config.drafting.suffix.model_dump(),
    }
    if system in ("hvd_cost", "hvd_tau"):
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
        return "own"


def measure_in_vllm(
    plan: Plan, *, engines: Mapping[str, Engine], wave: Wave, on_request: Callable[[str], None]
) -> list[Sample]:
    """Measure a plan with engines that are ready; every one is cold at each workload's start.

    The first prompt is asked of all of them once before, briefly, and not counted.
    """
    first = next(iter(plan.measured.values()))[0].request
    warm_up = replace(
        first, sampling=replace(first.sampling, max_tokens=WARM_UP_TOKENS, min_tokens=0)
    )
    for engine in engines.values():
        engine.serve([warm_up])
    samples: list[Sample] = []
    turn = 0
    for workload, questions in plan.measured.items():
        for engine in engines.values():
            engine.reset()
        for questions_together in _waves(questions, wave.concurrency):
            order = [plan.arms[(turn + i) % len(plan.arms)] for i in range(len(plan.arms))]
            turn += 1
            asked: list[Sample] = []
            for arm in order:
                asked += _ask(questions_together, arm, engines[arm.system])
                for _ in questions_together:
                    on_request(f"{workload}: {arm.system}")
            samples += _compared(asked)
    return samples


def _waves(questions: Sequence[Question], size: int) -> Iterator[Sequence[Question]]:
    for start in range(0, len(questions), size):
        yield questions[start : start + size]


def _ask(questions: Sequence[Question], arm: Arm, engine: Engine) -> list[Sample]:
    """One sample a question; a wave's time is shared by its requests."""
    seconds, answers = engine.serve([question.request for question in questions])
    return [
        Sample(
            question.prompt,
            arm,
            question.request,
            _completion(question.request, answer, arm.system),
            seconds / len(questions),
        )
        for question, answer in zip(questions, answers, strict=True)
    ]


def _completion(request: Request, answer: Answer, system: str) -> Completion:
    reason: FinishReason = "length" if answer.finish_reason == "length" else "stop"
    steps = tuple(_steps(answer, _OWN_SOURCE.get(system, Source.SUFFIX)))
    return Completion(request.request_id, answer.token_ids, "", reason, steps=steps)


def _steps(answer: Answer, source: Source) -> Iterator[Step]:
    """The passes of a request. vLLM tells which drafts were verified, in order, but not in which
    passes: a draft of which nothing was accepted is taken for the next pass that emitted one."""
    drafts = list(answer.drafts)
    position = 0
    for cycle, emitted in enumerate(answer.emitted):
        drafted = accepted = 0
        is_last = cycle == len(answer.emitted) - 1
        if drafts and (drafts[0][1] == emitted - 1 or is_last):
            drafted, accepted = drafts.pop(0)
        yield Step(
            cycle=cycle,
            position=position,
            source=source if drafted else Source.NONE,
            drafted=drafted,
            accepted=min(accepted, emitted),
            emitted=emitted,
        )
        position += emitted


def _compared(samples: Sequence[Sample]) -> list[Sample]:
    """The samples of a wave with each output compared with greedy's."""
    greedy = {s.prompt.id: s.completion.token_ids for s in samples if s.arm.is_baseline}
    return [replace(s, difference=_difference(s, greedy[s.prompt.id])) for s in samples]


def _difference(sample: Sample, reference: tuple[int, ...]) -> Difference | None:
    tokens = sample.completion.token_ids
    if tokens == reference:
        return None
    pairs = enumerate(zip(reference, tokens, strict=False))
    position = next((i for i, (a, b) in pairs if a != b), min(len(reference), len(tokens)))
    return Difference(sample.prompt.id, position, None)


def run_engines(
    plan: Plan,
    config: Config,
    wave: Wave,
    *,
    progress: Progress,
    open_engine: OpenEngine = EngineProcess,
) -> list[Sample]:
    """Start an engine for each system, one after the other, measure, and end them.

    Raises:
        UserError: an engine cannot be started.
    """
    known = (BASELINE, *_OWN_SOURCE, *_POLICIES)
    for arm in plan.arms:
        if arm.system not in known:
            raise NotSupportedError(f"system {arm.system!r} with --engine vllm")
    if any(arm.cache == "warm" for arm in plan.arms):
        raise NotSupportedError("--cache warm with --engine vllm; choose --cache cold")
    with ExitStack() as opened:
        engines: dict[str, Engine] = {}
        for arm in plan.arms:
            progress.stage(f"starting vLLM for {arm.system}")
            engine = open_engine(engine_arguments(arm.system, config, wave))
            opened.callback(engine.close)
            engine.start()
            engine.wait_ready()
            engines[arm.system] = engine
        progress.stage("warming up")
        progress.expect(plan.num_requests)
        done = iter(range(1, plan.num_requests + 1))
        return measure_in_vllm(
            plan,
            engines=engines,
            wave=wave,
            on_request=lambda text: progress.advance(next(done), text),
        )
