"""Trajectories of coding agents: SWE-agent's documents and OpenHands' events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from hvd_ray.traces.transcripts_entries import (
    BadLogRowError,
    ChatMessage,
    Dialogue,
    ToolCall,
    kind_of,
    moment_of,
    text_of,
    whole_text,
)
from hvd_ray.traces.transcripts_messages import message_of, messages_of, tools_of

Row = Mapping[str, Any]

# Events that the model never reads, or reads as part of another message.
UNSEEN = ("agent_state_changed", "null", "recall", "condensation", "change_agent_state")


def swe_agent(row: Row) -> Iterator[Dialogue]:
    """A trajectory as one dialogue, or as one for each step where only the steps were kept.

    Turns of demonstrations (`is_demo`) were not written by the model: they are context.
    """
    history, steps = row.get("history"), row.get("trajectory")
    if history:
        turns = zip(messages_of(history, "history"), history, strict=True)
        messages = (replace(m, is_answer=False) if item.get("is_demo") else m for m, item in turns)
        yield Dialogue(tuple(messages))
    elif not isinstance(steps, list) or not steps:
        raise BadLogRowError(f"trajectory must be a list of steps, got {kind_of(steps)}")
    elif isinstance(steps[0], dict) and "role" in steps[0]:
        yield Dialogue(messages_of(steps, "trajectory"))
    else:
        for i, step in enumerate(steps):
            yield _step(step, f"trajectory[{i}]")


def _step(step: object, where: str) -> Dialogue:
    if not isinstance(step, dict):
        raise BadLogRowError(f"{where} must be a step, got {kind_of(step)}")
    past = messages_of(step.get("query"), f"{where}.query", are_answers=False)
    output = step.get("output") or step.get("response")
    said = {"role": "assistant", "content": output, "tool_calls": step.get("tool_calls")}
    return Dialogue((*past, message_of(said, where)))


def is_event_list(value: object) -> bool:
    """Whether this is a history of OpenHands: events, or pairs of action and observation."""
    if not isinstance(value, list) or not value:
        return False
    first = value[0][0] if isinstance(value[0], list) and value[0] else value[0]
    return isinstance(first, dict) and "role" not in first and _is_event(first)


def openhands(row: Row) -> Iterator[Dialogue]:
    """The dialogue that a history of events stands for.

    What the model wrote is taken from the response kept with its actions (`tool_call_metadata`),
    once for all the actions of a response. Where none was kept, as without function calling, an
    action counts as its thought and a call of its name with its arguments.
    """
    events = _flat(row.get("history"))
    messages: list[ChatMessage] = []
    tools: Sequence[Mapping[str, Any]] = ()
    seen: set[str] = set()
    for i, event in enumerate(events):
        where = f"history[{i}]"
        if event.get("action") == "system":
            tools = tools_of(_object(event, "args", where).get("tools")) or tools
        message = _message(event, where, seen)
        if message is not None:
            messages.append(message)
    yield Dialogue(tuple(messages), tuple(tools))


def _is_event(item: Row) -> bool:
    return "action" in item or "observation" in item


def _flat(history: object) -> list[Row]:
    """The events in a row; older histories pair each action with its observation."""
    items = history if isinstance(history, list) else []
    pairs = (item if isinstance(item, list) else [item] for item in items)
    events = list(chain.from_iterable(pairs))
    if not events or not all(isinstance(event, dict) for event in events):
        raise BadLogRowError(f"history must be a list of events, got {kind_of(history)}")
    return events


def _message(event: Row, where: str, seen: set[str]) -> ChatMessage | None:
    """The turn that an event adds, if it adds one; `seen` holds the responses met so far."""
    kind = event.get("action") or event.get("observation")
    if kind in UNSEEN:
        return None
    if "observation" in event:
        return ChatMessage("tool", text_of(event.get("content"), f"{where}.content"))
    args = _object(event, "args", where)
    content = text_of(args.get("content", args.get("thought")), f"{where}.args")
    if kind == "system":
        return ChatMessage("system", content)
    if event.get("source") != "agent":
        return ChatMessage("user", content) if kind == "message" else None
    return _agent_turn(event, kind, args, where, seen)


def _agent_turn(
    event: Row, kind: object, args: Row, where: str, seen: set[str]
) -> ChatMessage | None:
    moment = event.get("timestamp")
    created_at = None if moment is None else moment_of(moment, f"{where}.timestamp")
    metadata = _object(event, "tool_call_metadata", where)
    response = _object(metadata, "model_response", f"{where}.tool_call_metadata")
    said = _choice(response, f"{where}.model_response")
    if said is not None:
        response_id = str(response.get("id", where))
        if response_id in seen:
            return None
        seen.add(response_id)
        return replace(said, is_answer=True, created_at=created_at)
    if kind == "message":
        content = text_of(args.get("content"), f"{where}.args.content")
        return ChatMessage("assistant", content, is_answer=True, created_at=created_at)
    thought = text_of(args.get("thought"), f"{where}.args.thought")
    call = _call(str(kind), args, where)
    return ChatMessage("assistant", thought, (call,), is_answer=True, created_at=created_at)


def _choice(response: Row, where: str) -> ChatMessage | None:
    """What the model wrote, from the response kept with an action; None where none was."""
    choices = response.get("choices")
    if not choices:
        return None
    if not isinstance(choices, list) or not isinstance(choices[0], dict):
        raise BadLogRowError(f"{where}.choices must be a list of objects, got {kind_of(choices)}")
    return message_of(choices[0].get("message"), where, default_role="assistant")


def _call(kind: str, args: Row, where: str) -> ToolCall:
    given = {key: value for key, value in args.items() if key != "thought"}
    arguments = whole_text(json.dumps(given, ensure_ascii=False), f"{where}.args")
    return ToolCall(whole_text(kind, f"{where}.action"), arguments)


def _object(row: Row, key: str, where: str) -> Row:
    """An object that may be absent or null."""
    value = row.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadLogRowError(f"{where}.{key} must be an object, got {kind_of(value)}")
    return value
