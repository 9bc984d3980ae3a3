"""Which responses to collect for drafter training: prompt files, own prompts, tasks over texts.

A model tuned on conversations also writes the user's side of them: sampled from where a user's
turn begins, it asks what it was tuned to answer (Magpie, arXiv 2406.08464). `ask_requests` samples
such questions, and `PromptMix.questions` has them answered. They vary more than any list of ours,
and no outside text is needed.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hvd_ray.bench.prompt_rows import Prompt
from hvd_ray.bench.workloads import load_prompts, load_shipped, select
from hvd_ray.drafting.eagle3_prompts import (
    DEFAULT_COUNTS,
    OwnPrompt,
    own_prompts,
    second_stage_prompts,
)
from hvd_ray.drafting.eagle3_responses import read_responses
from hvd_ray.errors import UserError
from hvd_ray.pipelines.eagle3_collect import CollectRequest
from hvd_ray.text import HFTextCodec

FILE_TEMPERATURES = (0.0, 0.5, 0.8, 1.0)
"""A prompt file holds few prompts, so each is answered several times."""
LONG_PROMPT_TOKENS = 1200
LONG_TEMPERATURES = (0.0, 0.7)
ASK_WORKLOAD = "own_ask"
"""Responses of this workload are user turns, written by the target."""
ANSWER_WORKLOAD = "own_asked"
TEXT_WORKLOADS = ("own_article", ANSWER_WORKLOAD)
"""Answers to these prompts are texts that further tasks can be about."""
MAX_QUESTION_TOKENS = 256
MIN_QUESTION_CHARS = 12


@dataclass(frozen=True, kw_only=True)
class PromptMix:
    """Where prompts come from."""

    files: tuple[Path, ...] = ()
    with_shipped: bool = False
    """The workloads that ship with the package."""
    split: Literal["train", "test"] = "train"
    """Of files and shipped workloads; what is trained on is never `test`."""
    own_seed: int | None = None
    own_kinds: tuple[str, ...] = ()
    """Of own prompts; none: every kind, as many of each as `DEFAULT_COUNTS` has."""
    texts: Path | None = None
    """A collection whose articles and longer answers become summaries, questions and edits."""
    questions: Path | None = None
    """A collection of user turns that the target wrote (`ask_requests`), to be answered."""
    limit: int | None = None
    """Prompts of each workload of files, at the most."""


@dataclass(frozen=True)
class _Asked:
    prompt_id: str
    family: str
    workload: str
    token_ids: tuple[int, ...]
    temperatures: tuple[float, ...]


def build_requests(
    mix: PromptMix, *, model: Path, max_tokens: int, max_prompt_tokens: int, is_greedy: bool = False
) -> list[CollectRequest]:
    """The requests of a mix, shuffled so that any part of them is a fair sample.

    Samples of one prompt stay side by side: the engine reads the prompt once. Prompts over
    `max_prompt_tokens` are left out. `is_greedy` asks for one greedy answer to each prompt.

    Raises:
        UserError: a prompt file or the model's tokenizer cannot be read, or a kind of own prompts
            is unknown.
    """
    codec = HFTextCodec(model)
    asked = [*_from_files(mix, codec), *_from_own(mix, codec)]
    asked = [each for each in asked if len(each.token_ids) <= max_prompt_tokens]
    random.Random(0).shuffle(asked)
    return [
        CollectRequest(
            request_id=f"{each.prompt_id}#{index}@{temperature}",
            prompt_id=each.prompt_id,
            family=each.family,
            workload=each.workload,
            prompt_token_ids=each.token_ids,
            temperature=temperature,
            split=mix.split,
            max_tokens=max_tokens,
        )
        for each in asked
        for index, temperature in enumerate((0.0,) if is_greedy else each.temperatures)
    ]


def ask_requests(num_questions: int, *, model: Path, seed: int) -> list[CollectRequest]:
    """User turns to sample from the target itself at temperature 1.

    Raises:
        UserError: the model's tokenizer cannot be read.
    """
    opening = _user_turn_opening(HFTextCodec(model))
    return [
        CollectRequest(
            request_id=f"{ASK_WORKLOAD}/{seed}-{index}",
            prompt_id=f"{ASK_WORKLOAD}/{seed}-{index}",
            family="chat",
            workload=ASK_WORKLOAD,
            prompt_token_ids=opening,
            temperature=1.0,
            max_tokens=MAX_QUESTION_TOKENS,
        )
        for index in range(num_questions)
    ]


def _user_turn_opening(codec: HFTextCodec) -> tuple[int, ...]:
    """What a chat begins with, up to the user's first word: what two chats have in common."""
    chats = (codec.encode_chat([{"role": "user", "content": text}]) for text in ("a", "7 Zebras"))
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*chats, strict=False))
    return tuple(token for token, _same in pairs)


def _from_files(mix: PromptMix, codec: HFTextCodec) -> Iterator[_Asked]:
    prompts = load_prompts(mix.files).prompts if mix.files else ()
    if mix.with_shipped:
        prompts += load_shipped().prompts
    chosen = select(prompts, split=mix.split, limit=mix.limit) if prompts else ()
    for prompt in chosen:
        token_ids = _file_tokens(prompt, codec)
        is_long = len(token_ids) > LONG_PROMPT_TOKENS
        yield _Asked(
            f"{prompt.workload}/{prompt.id}",
            prompt.family,
            prompt.workload,
            token_ids,
            LONG_TEMPERATURES if is_long else FILE_TEMPERATURES,
        )


def _file_tokens(prompt: Prompt, codec: HFTextCodec) -> tuple[int, ...]:
    if prompt.prompt_token_ids is not None:
        return prompt.prompt_token_ids
    if prompt.prompt is not None:
        return tuple(codec.encode(prompt.prompt))
    messages = [{"role": each.role, "content": each.content} for each in prompt.messages]
    return tuple(codec.encode_chat(messages))


def _from_own(mix: PromptMix, codec: HFTextCodec) -> Iterator[_Asked]:
    prompts: list[OwnPrompt] = []
    if mix.own_seed is not None:
        prompts += own_prompts(mix.own_seed, num_per_kind=_counts(mix.own_kinds))
    if mix.texts is not None:
        prompts += second_stage_prompts(_texts(mix.texts, codec), seed=mix.own_seed or 0)
    if mix.questions is not None:
        prompts += _from_questions(mix.questions, codec)
    for prompt in prompts:
        token_ids = tuple(codec.encode_chat(prompt.messages))
        yield _Asked(
            prompt.prompt_id, prompt.family, prompt.workload, token_ids, prompt.temperatures
        )


def _counts(kinds: Sequence[str]) -> Mapping[str, int]:
    unknown = sorted(set(kinds) - set(DEFAULT_COUNTS))
    if unknown:
        raise UserError(
            f"no own prompts of the kind {unknown[0]!r}; there are {', '.join(DEFAULT_COUNTS)}"
        )
    return {kind: count for kind, count in DEFAULT_COUNTS.items() if not kinds or kind in kinds}


def _texts(folder: Path, codec: HFTextCodec, *, min_tokens: int = 80) -> Sequence[str]:
    """The articles and longer answers in a collection, but not those of held-out prompts."""
    return [
        codec.decode([token for token in each.output_token_ids if token > 2]).strip()
        for shard in sorted(folder.glob("part-*.parquet"))
        for each in read_responses(shard, max_prompt_tokens=4096)
        if each.workload in TEXT_WORKLOADS
        and not each.is_held_out
        and len(each.output_token_ids) >= min_tokens
    ]


def _from_questions(folder: Path, codec: HFTextCodec) -> list[OwnPrompt]:
    """Complete questions, each once; named by their text, so that asking more renames none."""
    texts = dict.fromkeys(
        codec.decode([token for token in row.output_token_ids if token > 2]).strip()
        for shard in sorted(folder.glob("part-*.parquet"))
        for row in read_responses(shard, max_prompt_tokens=4096)
        if row.workload == ASK_WORKLOAD and len(row.output_token_ids) < MAX_QUESTION_TOKENS
    )
    return [
        OwnPrompt(
            prompt_id=f"{ANSWER_WORKLOAD}/{hashlib.sha256(text.encode()).hexdigest()[:16]}",
            family="chat",
            workload=ANSWER_WORKLOAD,
            messages=({"role": "user", "content": text},),
        )
        for text in texts
        if len(text) >= MIN_QUESTION_CHARS
    ]
