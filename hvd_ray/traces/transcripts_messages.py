"""Messages of a log, in OpenAI's form or one near to it, as turns of a dialogue."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hvd_ray.traces.transcripts_entries import (
    AnswerEnd,
    BadLogRowError,
    ChatMessage,
    Role,
    kind_of,
    moment_of,
    role_of,
    text_of,
    tool_calls_of,
    whole_text,
)

ROLE_KEYS = ("role", "from")
CONTENT_KEYS = ("content", "value", "text", "system_prompt")
REASONING_KEYS = ("reasoning_content", "reasoning")
ENDS: dict[object, AnswerEnd] = {"length": "length", "content_filter": "abort"}


def messages_of(items: object, where: str, *, are_answers: bool = True) -> tuple[ChatMessage, ...]:
    """The turns of a list of messages.

    Args:
        items: the list as the log holds it.
        where: its key, for error messages.
        are_answers: whether the assistant's turns were produced here or are quoted.

    Raises:
        BadLogRowError: it is no list of messages.
    """
    if not isinstance(items, list) or not items:
        raise BadLogRowError(f"{where} must be a list of messages, got {_list_kind(items)}")
    return tuple(
        message_of(item, f"{where}[{i}]", is_answer=are_answers) for i, item in enumerate(items)
    )


def message_of(
    item: object, where: str, *, is_answer: bool = True, default_role: Role | None = None
) -> ChatMessage:
    """One turn; what was thought before it stands in front of its text, in think tags."""
    if not isinstance(item, dict):
        raise BadLogRowError(f"{where} must be a message, got {kind_of(item)}")
    own_role = _first(item, ROLE_KEYS)
    role = default_role if own_role is None and default_role else role_of(own_role, f"{where}.role")
    content = text_of(_first(item, CONTENT_KEYS), f"{where}.content")
    if role != "assistant":
        return ChatMessage(role, content)
    thought = _first(item, REASONING_KEYS)
    if isinstance(thought, str) and thought:
        content = f"<think>\n{text_of(thought, where)}\n</think>\n\n{content}"
    moment = item.get("created_at", item.get("timestamp"))
    return ChatMessage(
        "assistant",
        content,
        tool_calls_of(item, where),
        is_answer=is_answer,
        end=answer_end(item.get("finish_reason")),
        created_at=None if moment is None else moment_of(moment, f"{where}.created_at"),
    )


def tools_of(value: object) -> tuple[Mapping[str, Any], ...]:
    """The functions that the model was offered, as a list or as its JSON text.

    Those of the older form, without a type, are wrapped.

    Raises:
        BadLogRowError: it is no list of objects.
    """
    if isinstance(value, str):
        value = _parsed(value)
    if not value:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadLogRowError(f"tools must be a list of objects, got {kind_of(value)}")
    whole_text(json.dumps(value, ensure_ascii=False), "tools")
    return tuple(tool if "function" in tool else _wrapped(tool) for tool in value)


def answer_end(finish_reason: object) -> AnswerEnd:
    """How an answer ended; calls of tools and silence count as the model's own stop."""
    return ENDS.get(finish_reason, "stop") if isinstance(finish_reason, str) else "stop"


def _parsed(text: str) -> object:
    try:
        return json.loads(text) if text.strip() else None
    except (ValueError, RecursionError):
        raise BadLogRowError("tools is text, but no JSON") from None


def _wrapped(function: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "function", "function": function}


def _first(item: Mapping[str, Any], keys: tuple[str, ...]) -> object:
    for key in keys:
        if item.get(key) is not None:
            return item[key]
    return None


def _list_kind(items: object) -> str:
    return "an empty list" if items == [] else kind_of(items)
