"""Dialogues as text, through a chat template: where each answer begins and ends.

What a template does not render is written into the text in one fixed form:

- calls of tools stand at the end of the assistant's turn, each as
  `<tool_call>\\n{"name": "NAME", "arguments": ARGUMENTS}\\n</tool_call>`, the arguments character
  for character as the log has them, parts joined by line breaks;
- a tool's result becomes a user's turn, `<tool_response>\\nRESULT\\n</tool_response>`;
- the tools on offer stand at the end of the system's turn (made if there is none), each as one
  line of JSON between `<tools>` and `</tools>`;
- a system's turn becomes a user's, and users' turns in a row become one, parted by an empty line,
  where the template refuses the one or the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from hvd_ray.errors import UserError
from hvd_ray.traces.transcripts_entries import ChatMessage, Dialogue, ToolCall

TemplateMessage = dict[str, Any]
_CALL = ToolCall("probe_name", '{"probe_key": "probe_value"}')
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
    },
}
_MAX_KNOWN = 10_000
_PROBE = " \n probe text \n "


class ChatTemplate(Protocol):
    """A chat template, as tokenizers carry one."""

    def render(
        self,
        messages: Sequence[TemplateMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        with_opening: bool = False,
    ) -> str:
        """The text of a conversation, with the opening of the assistant's turn if it is asked for.

        Raises:
            UserError: the template refuses these messages.
        """
        ...


class RenderedAnswer(NamedTuple):
    """An answer's place in a text; several answers may share one text object."""

    place: int
    """The message's place in its dialogue."""
    text: str
    start: int
    """The prompt is `text[:start]`."""
    end: int
    """The answer and its end token are `text[start:end]`."""
    is_closed: bool
    """Whether the template has written an end token."""


@dataclass(frozen=True, slots=True)
class _Wrapper:
    """What a template writes around a turn's text."""

    head: str
    tail: str
    is_trimmed: bool

    def wrap(self, content: str) -> str:
        return self.head + (content.strip() if self.is_trimmed else content) + self.tail


class DialogueRenderer:
    """Renders dialogues with one template.

    Most templates only write something before and after each turn. What that is is learned once;
    a dialogue is then joined from its turns, in time linear in its length, and compared with what
    the template itself makes of the whole and of the last prompt. Where they differ, or the
    template treats turns by their neighbours, every prompt is rendered by itself.

    Args:
        template: the chat template.
        special_tokens: texts of the tokens that end a turn or stand in the template.
    """

    def __init__(self, template: ChatTemplate, special_tokens: Sequence[str]) -> None:
        self._template = template
        self._special_tokens = tuple(special_tokens)
        self._has_system = self._shows(
            [_plain("system", "probe text"), _plain("user", "a")], "probe"
        )
        self._has_repeats = self._shows(
            [_plain("user", "a"), _plain("user", "probe text")], "probe"
        )
        self._has_calls = self._shows(_call_probe(), "probe_name", "probe_value")
        self._has_results = self._shows(
            [*_call_probe(), _plain("tool", "probe text")], "probe text"
        )
        self._has_tools = self._shows([_plain("user", "a")], "probe_tool", tools=[_TOOL])
        self._known_prefixes: dict[tuple[str, ...], bool] = {}
        self._opening, self._first, self._later = self._learn()

    def answers(self, dialogue: Dialogue) -> Iterator[RenderedAnswer]:
        """Every answer of the dialogue, in order.

        Raises:
            UserError: the template refuses the dialogue.
        """
        turns, place_of = self._turns(dialogue)
        tools = dialogue.tools if self._has_tools else ()
        places = [place_of[k] for k in dialogue.answers]
        joined = None if tools else self._joined(turns, places)
        found = joined if joined is not None else self._one_by_one(turns, places, tools)
        for k, answer in zip(dialogue.answers, found, strict=True):
            yield answer._replace(place=k)

    def _turns(self, dialogue: Dialogue) -> tuple[list[TemplateMessage], dict[int, int]]:
        """The turns as the template takes them, and which of them each message has become."""
        messages = list(enumerate(dialogue.messages))
        if dialogue.tools and not self._has_tools:
            messages = _with_tools(messages, dialogue.tools)
        turns: list[TemplateMessage] = []
        place_of = {}
        for k, message in messages:
            turn = self._message(message)
            is_next = bool(turns) and turns[-1]["role"] == turn["role"] == "user"
            if is_next and not self._has_repeats:
                turn = _plain("user", f"{turns.pop()['content']}\n\n{turn['content']}")
            place_of[k] = len(turns)
            turns.append(turn)
        return turns, place_of

    def _message(self, message: ChatMessage) -> TemplateMessage:
        if message.role == "system" and not self._has_system:
            return _plain("user", message.content)
        if message.role == "tool" and not self._has_results:
            return _plain("user", f"<tool_response>\n{message.content}\n</tool_response>")
        if not message.tool_calls:
            return _plain(message.role, message.content)
        if not self._has_calls:
            return _plain(message.role, _with_calls(message.content, message.tool_calls))
        calls = [_native_call(call) for call in message.tool_calls]
        return {**_plain(message.role, message.content), "tool_calls": calls}

    def _joined(
        self, messages: list[TemplateMessage], places: list[int]
    ) -> list[RenderedAnswer] | None:
        """The answers in one text, or None where the template does more than wrap turns."""
        pieces = []
        for k, message in enumerate(messages):
            wrapper = (self._later if k else self._first).get(message["role"])
            if wrapper is None or "tool_calls" in message:
                return None
            pieces.append(wrapper.wrap(message["content"]))
        text = "".join(pieces)
        if text != self._template.render(messages):
            return None
        answers = self._places(text, pieces, places)
        return answers if self._is_prefix(messages[: places[-1]], text, answers[-1].start) else None

    def _is_prefix(self, messages: list[TemplateMessage], text: str, end: int) -> bool:
        """Whether the template opens the answer to these turns as the joined text does.

        That depends on who spoke and in which order, so each order is looked at once.
        """
        roles = tuple(message["role"] for message in messages)
        if roles not in self._known_prefixes:
            prompt = self._template.render(messages, with_opening=True)
            if len(self._known_prefixes) >= _MAX_KNOWN:
                self._known_prefixes.clear()
            self._known_prefixes[roles] = prompt == text[:end]
        return self._known_prefixes[roles]

    def _places(self, text: str, pieces: list[str], places: list[int]) -> list[RenderedAnswer]:
        starts = [0]
        for piece in pieces:
            starts.append(starts[-1] + len(piece))
        answers = []
        for k in places:
            start = starts[k] + len(self._opening)
            size, is_closed = self._answer_size(pieces[k][len(self._opening) :])
            answers.append(RenderedAnswer(k, text, start, start + size, is_closed))
        return answers

    def _one_by_one(
        self,
        messages: list[TemplateMessage],
        places: list[int],
        tools: Sequence[Mapping[str, Any]],
    ) -> Iterator[RenderedAnswer]:
        for k in places:
            prompt = self._template.render(messages[:k], tools=tools, with_opening=True)
            whole = self._template.render(messages[: k + 1], tools=tools)
            if whole.startswith(prompt):
                size, is_closed = self._answer_size(whole[len(prompt) :])
            else:  # the opening holds more than the finished turn, such as the start of a thought
                answer = _own_text(messages[k])
                whole, size, is_closed = prompt + answer, len(answer), False
            yield RenderedAnswer(k, whole, len(prompt), len(prompt) + size, is_closed)

    def _answer_size(self, rest: str) -> tuple[int, bool]:
        """Characters up to and with the end token, which only white space may follow."""
        bare = rest.rstrip()
        if bare.endswith(self._special_tokens):
            return len(bare), True
        return len(rest), False

    def _learn(self) -> tuple[str, dict[str, _Wrapper], dict[str, _Wrapper]]:
        """The opening of an answer, and the wrappers of a first and of a later turn by role."""
        user, assistant = _plain("user", "a"), _plain("assistant", "b")
        nothing: dict[str, _Wrapper] = {}
        try:
            base = self._template.render([user])
            opened = self._template.render([user], with_opening=True)
            later = {"assistant": self._wrapper([user], "assistant")}
            later |= {role: self._wrapper([user, assistant], role) for role in _OTHERS}
            first = {role: self._wrapper([], role) for role in ("user", "assistant", "system")}
        except UserError:
            return "", nothing, nothing
        opening = opened[len(base) :]
        turn = later["assistant"]
        if not opened.startswith(base) or turn is None or not turn.head.startswith(opening):
            return "", nothing, nothing
        return opening, _known(first), _known(later)

    def _wrapper(self, before: list[TemplateMessage], role: str) -> _Wrapper | None:
        """What is written around a turn of this role; None where that cannot be told."""
        try:
            base = self._template.render(before) if before else ""
            text = self._template.render([*before, _plain(role, _PROBE)])
        except UserError:
            return None
        if not text.startswith(base):
            return None
        for content, is_trimmed in ((_PROBE, False), (_PROBE.strip(), True)):
            head, found, tail = text[len(base) :].partition(content)
            if found:
                return _Wrapper(head, tail, is_trimmed)
        return None

    def _shows(
        self,
        messages: list[TemplateMessage],
        *texts: str,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> bool:
        try:
            rendered = self._template.render(messages, tools=tools)
        except UserError:
            return False
        return all(text in rendered for text in texts)


def call_text(call: ToolCall) -> str:
    """A call in the fixed form for templates that render none."""
    name = json.dumps(call.name, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {call.arguments}}}\n</tool_call>'


def _with_calls(content: str, calls: Iterable[ToolCall]) -> str:
    return "\n".join([*([content] if content else []), *map(call_text, calls)])


def _own_text(message: TemplateMessage) -> str:
    """What the turn itself says, without anything of the template's."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = (ToolCall(f["name"], json.dumps(f["arguments"])) for f in functions)
    return _with_calls(message["content"], calls)


_OTHERS = ("user", "system", "tool")


def _known(wrappers: Mapping[str, _Wrapper | None]) -> dict[str, _Wrapper]:
    return {role: wrapper for role, wrapper in wrappers.items() if wrapper is not None}


def _plain(role: str, content: str) -> TemplateMessage:
    return {"role": role, "content": content}


def _call_probe() -> list[TemplateMessage]:
    return [_plain("user", "a"), {**_plain("assistant", ""), "tool_calls": [_native_call(_CALL)]}]


def _native_call(call: ToolCall) -> dict[str, Any]:
    """A call as chat templates expect it: with its arguments as an object."""
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = call.arguments
    return {"type": "function", "function": {"name": call.name, "arguments": arguments}}


def _with_tools(
    messages: list[tuple[int, ChatMessage]], tools: Sequence[Mapping[str, Any]]
) -> list[tuple[int, ChatMessage]]:
    """The numbered messages with the tools in the system's turn, a new one if there is none."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = f"<tools>\n{lines}\n</tools>"
    first = messages[0][1]
    if first.role == "system":
        return [(0, ChatMessage("system", f"{first.content}\n\n{text}")), *messages[1:]]
    return [(-1, ChatMessage("system", text)), *messages]
