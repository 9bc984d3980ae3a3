"""What is to be measured: prompts, systems and states of the cache, checked before any work."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hvd_ray.bench.cells import Arm
from hvd_ray.bench.result import BASELINE, CacheState
from hvd_ray.bench.rivals import RIVALS
from hvd_ray.bench.workloads import Prompt
from hvd_ray.config import split_system
from hvd_ray.engines.base import EngineCapabilities
from hvd_ray.errors import NotSupportedError, UserError
from hvd_ray.systems import MODEL_ONLY, check_system
from hvd_ray.text import TextCodec
from hvd_ray.types import Request, SamplingParams

DEFAULT_MAX_TOKENS = 128
# They draft from the request at hand alone, so cold and warm are the same to them.
WITHOUT_MEMORY = frozenset({BASELINE, "ngram", *MODEL_ONLY, *RIVALS})


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt in the target's tokens, ready to be asked."""

    prompt: Prompt
    request: Request


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the run samples; what is None is left to each prompt."""

    max_tokens: int | None = None
    temperature: float | None = None
    seed: int = 0
    max_tokens_of: Mapping[str, int] = field(default_factory=dict)
    """By workload, for prompts that do not say themselves."""

    def of(self, prompt: Prompt) -> SamplingParams:
        """The run's parameters, then the prompt's own, then what was asked for explicitly.

        A prompt that brings no seed gets one of its own, so that two prompts never share their
        stream of random numbers.
        """
        seed = zlib.crc32(f"{self.seed}/{prompt.workload}/{prompt.id}".encode())
        num_tokens = self.max_tokens_of.get(prompt.workload, DEFAULT_MAX_TOKENS)
        params = prompt.sampling_params(SamplingParams(max_tokens=num_tokens, seed=seed))
        given = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        return replace(params, **{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Plan:
    """One run; prompts stay in file order within their workload."""

    arms: tuple[Arm, ...]
    measured: Mapping[str, tuple[Question, ...]]
    """By workload."""
    filling: Mapping[str, tuple[Question, ...]]
    """What a warm cache has seen before, by workload; empty without warm arms."""

    @property
    def num_requests(self) -> int:
        num_measured = sum(map(len, self.measured.values())) * len(self.arms)
        return num_measured + sum(map(len, self.filling.values()))


def choose_arms(systems: Sequence[str], caches: Sequence[CacheState]) -> tuple[Arm, ...]:
    """The arms of a comparison, plain decoding always first.

    Raises:
        UserError: a system is unknown or named twice, or none is named.
    """
    if not systems:
        raise UserError("no system to measure: name some, e.g. --systems greedy,suffix")
    for system in systems:
        check_measurable(system)
        if systems.count(system) > 1:
            raise UserError(f"system {system!r} is named twice")
    rest = [system for system in systems if system != BASELINE]
    arms = [Arm(BASELINE, "none")]
    for system in rest:
        states: Sequence[CacheState] = ("none",) if has_no_memory(system) else caches
        arms.extend(Arm(system, cache) for cache in states)
    return tuple(arms)


def has_no_memory(system: str) -> bool:
    return system in WITHOUT_MEMORY or split_system(system)[0] in WITHOUT_MEMORY


def check_measurable(system: str) -> None:
    """Refuse a name that is neither a system nor a rival.

    Raises:
        UserError: with those that are.
        NotSupportedError: it is a system that cannot be.
    """
    if system in RIVALS:
        return
    try:
        check_system(system)
    except NotSupportedError:
        raise
    except UserError as error:
        raise UserError(f"{error}; or a rival, {', '.join(RIVALS)}") from None


def choose_filling(
    prompts: Sequence[Prompt], measured: Sequence[Prompt], *, limit: int | None = None
) -> dict[str, tuple[Prompt, ...]]:
    """The prompts whose outputs a warm cache holds from the start, for each measured workload.

    They are the workload's train prompts, without the measured ones, without prompts that ask
    the same again, and without any session of which a part is measured; at most `limit` of them.

    Raises:
        UserError: a workload has none.
    """
    taken = {key for prompt in measured for key in _identities(prompt)}
    filling = {}
    for workload in dict.fromkeys(prompt.workload for prompt in measured):
        chosen = tuple(
            prompt
            for prompt in prompts
            if prompt.workload == workload
            and prompt.split == "train"
            and taken.isdisjoint(_identities(prompt))
        )
        if not chosen:
            raise UserError(
                f"workload {workload!r} has no train prompts besides the measured ones to fill a "
                "warm cache from; choose --cache cold, or --split test of files with both splits"
            )
        filling[workload] = chosen[:limit]
    return filling


def _identities(prompt: Prompt) -> list[object]:
    """Whatever would make another prompt's output this one's own."""
    keys: list[object] = [
        ("id", prompt.workload, prompt.id),
        ("text", prompt.messages, prompt.prompt, prompt.prompt_token_ids),
    ]
    if prompt.session_id:
        keys.append(("session", prompt.workload, prompt.session_id))
    return keys


def ask(
    prompts: Sequence[Prompt],
    *,
    codec: TextCodec,
    capabilities: EngineCapabilities,
    sampling: Sampling,
) -> dict[str, tuple[Question, ...]]:
    """The prompts in the target's tokens, by workload.

    Raises:
        UserError: a prompt is empty, over the context or not of the vocabulary; file and line
            are named.
    """
    questions: dict[str, list[Question]] = {}
    for prompt in prompts:
        try:
            question = _question(prompt, codec, capabilities, sampling)
        except UserError as error:
            raise UserError(f"{prompt.origin}: {error}") from None
        questions.setdefault(prompt.workload, []).append(question)
    return {workload: tuple(asked) for workload, asked in questions.items()}


def _question(
    prompt: Prompt, codec: TextCodec, capabilities: EngineCapabilities, sampling: Sampling
) -> Question:
    token_ids = encode_prompt(prompt, codec)
    if not token_ids:
        raise UserError(f"prompt {prompt.id!r} is empty")
    if len(token_ids) >= capabilities.context_length:
        raise UserError(
            f"prompt {prompt.id!r} has {len(token_ids)} tokens, but the target's context of "
            f"{capabilities.context_length} must also hold the answer; shorten or drop it"
        )
    if max(token_ids) >= capabilities.vocab_size:
        raise UserError(
            f"prompt {prompt.id!r} holds token {max(token_ids)}, but the target's vocabulary has "
            f"{capabilities.vocab_size}"
        )
    request_id = f"{prompt.workload}/{prompt.id}"
    request = Request(request_id, tuple(token_ids), sampling.of(prompt), allows_loss=True)
    return Question(prompt, request)


def encode_prompt(prompt: Prompt, codec: TextCodec) -> Sequence[int]:
    """The prompt in the target's tokens; a conversation through the chat template."""
    if prompt.prompt_token_ids is not None:
        return prompt.prompt_token_ids
    if prompt.prompt is not None:
        return codec.encode(prompt.prompt)
    return codec.encode_chat([{"role": m.role, "content": m.content} for m in prompt.messages])
