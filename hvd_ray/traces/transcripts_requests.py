"""Logged requests with their responses, in the shapes of OpenAI's endpoints."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hvd_ray.errors import UserError
from hvd_ray.traces.transcripts_entries import (
    BadLogRowError,
    ChatMessage,
    Continuation,
    Dialogue,
    kind_of,
    text_of,
)
from hvd_ray.traces.transcripts_messages import answer_end, message_of, messages_of, tools_of
from hvd_ray.types import SamplingParams

SAMPLING_KEYS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)
_MAX_WRAPPINGS = 4
_SEEDS = range(-(2**63), 2**63)
"""Seeds that a trace can hold; some clients draw theirs from all unsigned numbers of 64 bits."""

Row = Mapping[str, Any]


def requests(row: Row) -> list[Dialogue | Continuation]:
    """One body for each choice of the response; none where the response is an error.

    What the model said earlier in the conversation was the answer to earlier requests.
    """
    request, choices = part_of(row, "request"), _choices(row)
    if isinstance(request.get("prompt"), str):
        prompt = text_of(request["prompt"], "request.prompt")
        return [_continuation(prompt, choice, i) for i, choice in enumerate(choices)]
    past = messages_of(request.get("messages"), "request.messages", are_answers=False)
    tools = tools_of(request.get("tools") or request.get("functions"))
    return [Dialogue((*past, _answer(c, f"choices[{i}]")), tools) for i, c in enumerate(choices)]


def part_of(row: Row, key: str) -> Row:
    """The request or the response: an object or its JSON text, bare or under `body`.

    A row that holds the messages itself is its own request.
    """
    value = row.get(key)
    if value is None and key == "request" and "messages" in row:
        return row
    for _ in range(_MAX_WRAPPINGS):
        if isinstance(value, str):
            value = _parsed(value, key)
        if not isinstance(value, dict):
            break
        if not isinstance(value.get("body"), dict | str):
            return value
        value = value["body"]
    raise BadLogRowError(f"{key} must be an object, got {kind_of(value)}")


def sources_of(row: Row) -> list[Row]:
    """Where the facts of a request may stand, the row itself first."""
    request, response = part_of(row, "request"), part_of(row, "response")
    metadata = request.get("metadata")
    return [row, request, response, *([metadata] if isinstance(metadata, dict) else [])]


def sampling_of(row: Row) -> SamplingParams:
    """What the request asked for, without a seed that a trace cannot hold.

    Raises:
        BadLogRowError: a value is out of its range.
    """
    request = part_of(row, "request")
    given = {key: request[key] for key in SAMPLING_KEYS if request.get(key) is not None}
    budget = request.get("max_completion_tokens") or request.get("max_tokens")
    if budget is not None:
        given["max_tokens"] = budget
    try:
        sampling = SamplingParams(**given)
    except UserError as error:
        raise BadLogRowError(f"request: {error}") from None
    return (
        sampling
        if sampling.seed is None or sampling.seed in _SEEDS
        else replace(sampling, seed=None)
    )


def opening_of(body: Dialogue | Continuation) -> str:
    """A name for the conversation that a request goes on with: how it began.

    Logs of requests seldom say which of them belong together, but each holds its whole past.
    """
    opening = [body.prompt] if isinstance(body, Continuation) else _opening_texts(body.messages)
    return hashlib.sha256("\0".join(opening).encode("utf-8")).hexdigest()[:16]


def _opening_texts(messages: Sequence[ChatMessage]) -> list[str]:
    roles = [message.role for message in messages]
    end = roles.index("user") + 1 if "user" in roles else 1
    return [f"{message.role}:{message.content}" for message in messages[:end]]


def _choices(row: Row) -> list[Row]:
    choices = part_of(row, "response").get("choices")
    if choices is None:
        return []
    if not isinstance(choices, list) or not all(isinstance(c, dict) for c in choices):
        raise BadLogRowError("response.choices must be a list of objects")
    return choices


def _continuation(prompt: str, choice: Row, index: int) -> Continuation:
    text = text_of(choice.get("text"), f"choices[{index}].text")
    return Continuation(prompt, text, answer_end(choice.get("finish_reason")))


def _answer(choice: Row, where: str) -> ChatMessage:
    message = message_of(choice.get("message"), f"{where}.message", default_role="assistant")
    if message.role != "assistant":
        raise BadLogRowError(f"{where}.message.role must be assistant, got {message.role}")
    return replace(message, end=answer_end(choice.get("finish_reason")), created_at=None)


def _parsed(text: str, key: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadLogRowError(f"{key} is text, but no JSON") from None
