"""What a log holds, whatever its format: dialogues with answers, and texts with a continuation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from hvd_ray.errors import UserError
from hvd_ray.types import SamplingParams

Role = Literal["system", "user", "assistant", "tool"]
AnswerEnd = Literal["stop", "length", "abort"]

# What logs call them; "developer" is OpenAI's newer word for the system's role.
ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "ai": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "agent": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
    "environment": "tool",
}
MAX_NAME_CHARS = 400
FIRST_UNIX_MS = 10**11
"""Unix times from here on count milliseconds: as seconds they would lie beyond the year 5000."""
LAST_YEAR = 9998
"""The last one in which a turn may happen after another and still have a time."""


class BadLogRowError(UserError):
    """A row that cannot become traces; the message says why, the reader adds file and line.

    Messages name keys and shapes and never quote what people wrote.
    """


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants called."""

    name: str
    arguments: str
    """JSON text, character for character as the model wrote it where the log has kept that."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a dialogue."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    is_answer: bool = False
    """The model wrote it here; demonstrations and turns quoted from elsewhere are no answers."""
    end: AnswerEnd = "stop"
    created_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Turns in their order; every answer among them becomes a trace."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """The functions that the model was offered, in OpenAI's form."""

    @property
    def answers(self) -> list[int]:
        """Places of the answers; what nothing stands before answers nothing."""
        return [k for k, message in enumerate(self.messages) if k and message.is_answer]


@dataclass(frozen=True, slots=True)
class Continuation:
    """A raw text and what the model went on with; no chat template has a part in it."""

    prompt: str
    completion: str
    end: AnswerEnd = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """One dialogue or continuation of a log, and what the log says of it."""

    line: int
    """Where its row begins in the file, from 1."""
    part: int = 0
    """Its number within the row: a row may hold several choices or steps."""
    id: str
    session_id: str
    workload: str
    family: str
    split: str = ""
    model: str = ""
    created_at: datetime | None = None
    sampling: SamplingParams | None = None
    """What the request asked for, where the log has it."""
    body: Dialogue | Continuation = field(default_factory=lambda: Dialogue(()))


def role_of(value: object, where: str) -> Role:
    """The role that a log's own word stands for."""
    role = ROLES.get(value) if isinstance(value, str) else None
    if role is None:
        known = ", ".join(ROLES)
        raise BadLogRowError(f"{where} must be one of {known}, got {kind_of(value)}")
    return role


def text_of(value: object, where: str) -> str:
    """Message content as text: a string, null, or OpenAI's list of parts.

    A part that is no text is named in brackets, `[image_url]`: the prompt keeps its shape.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return whole_text(value, where)
    if isinstance(value, list):
        return "".join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(value))
    raise BadLogRowError(f"{where} must be text, null or a list of parts, got {kind_of(value)}")


def tool_calls_of(message: Mapping[str, Any], where: str) -> tuple[ToolCall, ...]:
    """The calls of an assistant turn, in OpenAI's newer or older form."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise BadLogRowError(f"{where}.tool_calls must be a list, got {kind_of(calls)}")
    if message.get("function_call"):
        calls = [*calls, {"function": message["function_call"]}]
    return tuple(_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls))


def moment_of(value: object, where: str) -> datetime:
    """A time in UTC: ISO 8601 (UTC where it names no zone), or Unix seconds or milliseconds."""
    try:
        moment = _moment(value)
    except (ValueError, OverflowError, OSError):
        moment = None
    if moment is None:
        raise BadLogRowError(
            f"{where} must be an ISO 8601 time or Unix seconds, got {kind_of(value)}"
        )
    if moment.year > LAST_YEAR:
        raise BadLogRowError(f"{where} must be a time before the year {LAST_YEAR + 1}")
    return moment


def name_of(value: object, where: str) -> str:
    """An id or another name, fit for tables and terminals."""
    name = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise BadLogRowError(f"{where} must be printable text, got {kind_of(value)}")
    if len(name) > MAX_NAME_CHARS:
        raise BadLogRowError(f"{where} must be at most {MAX_NAME_CHARS} characters long")
    return name


def kind_of(value: object) -> str:
    """What a value is, without telling what it says."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    if value is None:
        return "null"
    if isinstance(value, str) and len(value) <= 20 and value.isidentifier():
        return repr(value)
    return names.get(type(value), "a number")


def whole_text(text: str, where: str) -> str:
    """The text itself, if it can be encoded; half a surrogate pair cannot, and JSON allows it."""
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadLogRowError(
            f"{where} holds half a surrogate pair, which is no character"
        ) from None
    return text


def _moment(value: object) -> datetime | None:
    """The time that a value names, if it is of a kind that names one."""
    if isinstance(value, str):
        moment = datetime.fromisoformat(value)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = value / 1000 if abs(value) >= FIRST_UNIX_MS else value
        return datetime.fromtimestamp(seconds, UTC)
    return None


def _part_text(part: object, where: str) -> str:
    if isinstance(part, str):
        return whole_text(part, where)
    if not isinstance(part, dict):
        raise BadLogRowError(f"{where} must be a content part, got {kind_of(part)}")
    for key in ("text", "refusal"):
        if isinstance(part.get(key), str):
            return whole_text(part[key], where)
    kind = part.get("type", "part")
    return whole_text(f"[{kind if isinstance(kind, str) else 'part'}]", f"{where}.type")


def _tool_call(call: object, where: str) -> ToolCall:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadLogRowError(f"{where} must be an object with a function's name and arguments")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    name = whole_text(function["name"], where)
    return ToolCall(name, whole_text(arguments, f"{where}.arguments") or "{}")
