"""The formats of logs: which one a row is in, and what it says.

| format | a row |
|---|---|
| `chat` | `{"messages": [{"role", "content", "tool_calls"?}, ...]}`: OpenAI chat JSONL |
| `requests` | `{"request": {...}, "response": {...}}`: OpenAI requests and responses, bodies |
| | bare or under `body`; or `{"messages": [...], "response": {...}}` |
| `sharegpt` | `{"conversations": [{"from", "value"}, ...]}` |
| `swe-agent` | SWE-agent's `.traj` documents: `history`, or `trajectory` with its queries |
| `openhands` | OpenHands' `history` of events, or a document that is a list of them |
| `completions` | `{"prompt", "completion"}`, both of them text |

Every row may carry `id`, `session_id` (or `conversation_id`), `workload`, `family`, `split`,
`model` and a time (`created_at`, `timestamp` or `created`). A `split` counts as a side by the names
of `SPLITS`; under any other, and without one, the session decides.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal, get_args

from hvd_ray.traces import transcripts_agents as agents
from hvd_ray.traces import transcripts_requests as requests
from hvd_ray.traces.transcripts_entries import (
    BadLogRowError,
    ChatMessage,
    Continuation,
    Dialogue,
    LogEntry,
    kind_of,
    moment_of,
    name_of,
    text_of,
)
from hvd_ray.traces.transcripts_messages import messages_of, tools_of

LogFormat = Literal["chat", "requests", "sharegpt", "swe-agent", "openhands", "completions"]
LOG_FORMATS: tuple[LogFormat, ...] = get_args(LogFormat)

ID_KEYS = ("id", "conversation_id", "instance_id", "traj_id", "request_id", "custom_id")
SESSION_KEYS = ("session_id", "conversation_id", "thread_id", "chat_id")
TIME_KEYS = ("created_at", "timestamp", "created")
SPLITS = {"train": "train", "training": "train"} | dict.fromkeys(
    ("test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation"), "test"
)
"""What logs call the sides: whatever was held out is a side to judge on."""
Body = Dialogue | Continuation
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RowDefaults:
    """What holds for a row that does not say otherwise itself."""

    id: str
    workload: str
    family: str = "other"


def format_of(row: object) -> LogFormat | None:
    """The format that a row's keys tell, if they tell one."""
    if agents.is_event_list(row):
        return "openhands"
    if not isinstance(row, dict):
        return None
    return next((name for name, is_it in _SIGNS.items() if is_it(row)), None)


def parse_json(text: bytes) -> object:
    """The JSON value of one row.

    Raises:
        BadLogRowError: it is none.
    """
    try:
        return json.loads(text.decode("utf-8"))
    except UnicodeDecodeError:
        raise BadLogRowError("is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno} of it, " if error.lineno > 1 else ""
        raise BadLogRowError(f"is no JSON: {error.msg} at {line}column {error.colno}") from None
    except RecursionError:
        raise BadLogRowError("is nested too deeply") from None
    except ValueError:
        raise BadLogRowError("holds a number with too many digits") from None


def entries_of(
    row: object, *, log_format: LogFormat, line: int, defaults: RowDefaults
) -> list[LogEntry]:
    """What a row holds; nothing where it holds no answer.

    Raises:
        BadLogRowError: the row is not in this format; the message is the reason, on one line.
    """
    if not isinstance(row, dict):
        if log_format != "openhands" or not isinstance(row, list):
            raise BadLogRowError(f"expected a JSON object, got {kind_of(row)}")
        row = {"history": row}
    bodies = [body for body in _READERS[log_format](row) if _has_answer(body)]
    if not bodies:
        return []
    first = _entry(row, bodies[0], log_format, line, defaults)
    return [replace(first, part=part, body=body) for part, body in enumerate(bodies)]


def _has_answer(body: Body) -> bool:
    return bool(body.answers) if isinstance(body, Dialogue) else bool(body.completion)


def _entry(
    row: Row, body: Body, log_format: LogFormat, line: int, defaults: RowDefaults
) -> LogEntry:
    is_request = log_format == "requests"
    sources = requests.sources_of(row) if is_request else [row]
    own_id = _first_name(sources, ID_KEYS) or defaults.id
    session_id = _first_name(sources, SESSION_KEYS)
    if session_id is None:
        session_id = requests.opening_of(body) if is_request else own_id
    return LogEntry(
        line=line,
        id=own_id,
        session_id=session_id,
        workload=_first_name(sources, ("workload",)) or defaults.workload,
        family=_first_name(sources, ("family",)) or defaults.family,
        split=_split(row),
        model=_first_name(sources, ("model", "model_name")) or "",
        created_at=_moment(sources),
        sampling=requests.sampling_of(row) if is_request else None,
        body=body,
    )


def _first_name(sources: Iterable[Row], keys: Iterable[str]) -> str | None:
    for source in sources:
        for key in keys:
            if source.get(key) is not None:
                return name_of(source[key], key)
    return None


def _moment(sources: Iterable[Row]) -> datetime | None:
    for source in sources:
        for key in TIME_KEYS:
            if source.get(key) is not None:
                return moment_of(source[key], key)
    return None


def _split(row: Row) -> str:
    """The side that a row names; empty where it names none known: its session decides then."""
    split = row.get("split")
    return SPLITS.get(split.strip().lower(), "") if isinstance(split, str) else ""


def _chat(row: Row) -> list[Body]:
    tools = tools_of(row.get("tools") or row.get("functions"))
    return [Dialogue(messages_of(row.get("messages"), "messages"), tools)]


def _sharegpt(row: Row) -> list[Body]:
    messages = messages_of(row.get("conversations"), "conversations")
    if row.get("system") and not (messages and messages[0].role == "system"):
        messages = (ChatMessage("system", text_of(row["system"], "system")), *messages)
    return [Dialogue(messages, tools_of(row.get("tools")))]


def _completions(row: Row) -> list[Body]:
    for key in ("prompt", "completion"):
        if not isinstance(row.get(key), str):
            raise BadLogRowError(f"{key} must be text, got {kind_of(row.get(key))}")
    prompt, completion = (text_of(row[key], key) for key in ("prompt", "completion"))
    return [Continuation(prompt, completion)]


def _first_is(row: Row, key: str, *names: str) -> bool:
    """Whether `row[key]` is a list of objects that have one of these keys."""
    items = row.get(key)
    first = items[0] if isinstance(items, list) and items else None
    return isinstance(first, dict) and any(name in first for name in names)


# In this order: a row is the first that it fits.
_SIGNS: dict[LogFormat, Callable[[Row], bool]] = {
    "requests": lambda row: "response" in row and ("request" in row or "messages" in row),
    "openhands": lambda row: agents.is_event_list(row.get("history")),
    "swe-agent": lambda row: (
        _first_is(row, "history", "role") or _first_is(row, "trajectory", "action", "role")
    ),
    "chat": lambda row: isinstance(row.get("messages"), list),
    "sharegpt": lambda row: isinstance(row.get("conversations"), list),
    "completions": lambda row: isinstance(row.get("prompt"), str) and "completion" in row,
}
_READERS: dict[LogFormat, Callable[[Row], list[Body]]] = {
    "chat": _chat,
    "requests": requests.requests,
    "sharegpt": _sharegpt,
    "swe-agent": lambda row: list(agents.swe_agent(row)),
    "openhands": lambda row: list(agents.openhands(row)),
    "completions": _completions,
}
