"""One line of a prompt file, read strictly: what would be ignored in silence is refused instead."""

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Literal, NoReturn, cast

from hvd_ray.errors import UserError
from hvd_ray.types import SamplingParams

Split = Literal["train", "test"]
Role = Literal["system", "developer", "user", "assistant", "tool"]
SamplingValue = int | float | str | tuple[str, ...] | None

MAX_LINE_BYTES = 16 * 2**20
"""A longer line is refused unread: far more than any context, and no memory is lost to a slip."""
MAX_NAME_CHARS = 200
MAX_TOKEN_ID = 2**31 - 1

ROLES = ("system", "developer", "user", "assistant", "tool")
PROMPT_KEYS = ("messages", "prompt", "prompt_token_ids")
ROW_KEYS = ("id", "workload", "family", "session_id", "split", "sampling", *PROMPT_KEYS)
SAMPLING_KEYS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
    "stop",
    "seed",
)
# Keys of request logs that change the prompt or the answer: dropping them would measure another.
MISPLACED = dict.fromkeys(SAMPLING_KEYS, 'belongs into "sampling"') | {
    "sampling_params": 'is called "sampling" here',
    "tools": "is not read: describe the tools in the system message",
    "functions": "is not read: describe them in the system message",
}
MISPLACED_IN_MESSAGE = ("tool_calls", "function_call")


class BadRowError(UserError):
    """A line that is no prompt; the message says why, the loader adds file and line."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation, as a chat template takes it."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """Something to be answered: exactly one of `messages`, `prompt`, `prompt_token_ids` is set."""

    id: str
    """Unique within its file and its workload."""
    workload: str
    """A row of the report's table; the file's stem where the row names none."""
    family: str
    """Kind of work: agentic, code, structured, chat, ...; "other" where the row names none."""
    session_id: str | None
    """Prompts of one session share context and are asked in file order."""
    split: Split | None
    """None where the file carries no split."""
    messages: tuple[Message, ...]
    """A conversation whose last message is the one to answer; empty for raw prompts."""
    prompt: str | None
    """Text to be continued as it is, without a chat template."""
    prompt_token_ids: tuple[int, ...] | None
    """Tokens to be continued as they are; the target's own ids."""
    sampling: tuple[tuple[str, SamplingValue], ...]
    """What this prompt asks for itself, sorted by name; the run decides the rest."""
    origin: str
    """`FILE:LINE`, for error messages."""

    def sampling_params(self, run: SamplingParams) -> SamplingParams:
        """The run's parameters with this prompt's own in their place.

        Raises:
            UserError: together they contradict each other, e.g. `max_tokens` below `min_tokens`.
        """
        return replace(run, **dict(self.sampling))  # type: ignore[arg-type]


def parse_row(line: bytes, *, origin: str, default_id: str, default_workload: str) -> Prompt:
    """The prompt of one line of a JSONL file.

    Unknown keys are ignored, as logs carry many; but a key that looks like a misspelt known one,
    or that would change prompt or answer, is refused.

    Raises:
        BadRowError: the line is no prompt; the message is the reason, on one line.
    """
    row = _json_object(line)
    _refuse_doubtful_keys(row)
    messages, prompt, token_ids = _question(row)
    return Prompt(
        id=_name(row, "id", default_id),
        workload=_name(row, "workload", default_workload),
        family=_name(row, "family", "other"),
        session_id=_name(row, "session_id", "") or None,
        split=_split(row),
        messages=messages,
        prompt=prompt,
        prompt_token_ids=token_ids,
        sampling=_sampling(row),
        origin=origin,
    )


def _json_object(line: bytes) -> Mapping[str, object]:
    if len(line) > MAX_LINE_BYTES:
        raise BadRowError(f"line longer than {MAX_LINE_BYTES // 2**20} MiB")
    try:
        row = json.loads(
            line.decode("utf-8"),
            parse_constant=_refuse_constant,
            object_pairs_hook=_object_of_distinct_keys,
        )
    except UnicodeDecodeError as error:
        raise BadRowError(f"not UTF-8 (byte {error.start + 1} of the line)") from None
    except json.JSONDecodeError as error:
        raise BadRowError(
            f"not one JSON object a line: {error.msg} at column {error.colno}"
        ) from None
    except RecursionError:
        raise BadRowError("JSON nested too deeply") from None
    except BadRowError:
        raise
    except ValueError as error:  # an integer of thousands of digits
        raise BadRowError(f"not JSON that can be read: {error}") from None
    if not isinstance(row, dict):
        raise BadRowError(f"expected a JSON object, got {_shown(row)}")
    return row


def _refuse_constant(name: str) -> NoReturn:
    raise BadRowError(f"{name} is not JSON")


def _object_of_distinct_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    row = dict(pairs)
    if len(row) != len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise BadRowError(f"key {_shown(twice)} stands twice in one object")
    return row


def _refuse_doubtful_keys(row: Mapping[str, object]) -> None:
    for key in row:
        if key in ROW_KEYS:
            continue
        if key in MISPLACED:
            raise BadRowError(f'key "{key}" {MISPLACED[key]}')
        plain = key.lower().replace("-", "_")
        close = get_close_matches(plain, ROW_KEYS, n=1, cutoff=0.85)
        if close:
            raise BadRowError(f'unknown key {_shown(key)}: is "{close[0]}" meant?')


def _question(
    row: Mapping[str, object],
) -> tuple[tuple[Message, ...], str | None, tuple[int, ...] | None]:
    given = [key for key in PROMPT_KEYS if row.get(key) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise BadRowError(f"expected exactly one of {', '.join(PROMPT_KEYS)}, got {found}")
    value = row[given[0]]
    if given[0] == "messages":
        return _messages(value), None, None
    if given[0] == "prompt":
        return (), _not_empty(_text(value, "prompt"), "prompt"), None
    return (), None, _token_ids(value)


def _messages(value: object) -> tuple[Message, ...]:
    if not isinstance(value, list):
        raise BadRowError(f"messages must be a list, got {_shown(value)}")
    if not value:
        raise BadRowError("empty prompt: messages is an empty list")
    messages = tuple(_message(item, f"messages[{i}]") for i, item in enumerate(value))
    if messages[-1].role not in ("user", "tool"):
        raise BadRowError(
            f"the last message is to be answered: role user or tool, not {messages[-1].role}"
        )
    _not_empty(messages[-1].content, "the last message")
    return messages


def _message(item: object, where: str) -> Message:
    if not isinstance(item, dict):
        raise BadRowError(f"{where} must be an object with role and content, got {_shown(item)}")
    for key in MISPLACED_IN_MESSAGE:
        if item.get(key):
            raise BadRowError(f"{where}.{key} is not read: write the call into content")
    role = item.get("role")
    if role not in ROLES:
        raise BadRowError(f"{where}.role must be one of {', '.join(ROLES)}, got {_shown(role)}")
    return Message(cast(Role, role), _text(item.get("content"), f"{where}.content"))


def _token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise BadRowError(f"prompt_token_ids must be a list of token ids, got {_shown(value)}")
    if not value:
        raise BadRowError("empty prompt: prompt_token_ids is an empty list")
    for i, token in enumerate(value):
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            raise BadRowError(f"prompt_token_ids[{i}] must be a token id, got {_shown(token)}")
    return tuple(value)


def _split(row: Mapping[str, object]) -> Split | None:
    split = row.get("split")
    if split is None:
        return None
    if split not in ("train", "test"):
        raise BadRowError(f"split must be train or test, got {_shown(split)}")
    return split


def _sampling(row: Mapping[str, object]) -> tuple[tuple[str, SamplingValue], ...]:
    value = row.get("sampling")
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise BadRowError(f"sampling must be an object, got {_shown(value)}")
    settings = {key: _sampling_value(key, value[key]) for key in sorted(value)}
    try:
        SamplingParams(**settings)  # type: ignore[arg-type]
    except UserError as error:
        raise BadRowError(str(error)) from None
    return tuple(settings.items())


def _sampling_value(key: str, value: object) -> SamplingValue:
    if key not in SAMPLING_KEYS:
        raise BadRowError(
            f"sampling: unknown setting {_shown(key)}, known: {', '.join(SAMPLING_KEYS)}"
        )
    if key == "stop":
        stops = value if isinstance(value, list) else [value]
        return tuple(_text(stop, "sampling.stop") for stop in stops)
    # Ranges are for SamplingParams to judge; this only keeps integers within a machine word.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or abs(cast(float, value)) >= 2**63:
        raise BadRowError(f"sampling: {key} must be a number, got {_shown(value)}")
    return cast(float, value)


def _name(row: Mapping[str, object], key: str, default: str) -> str:
    if row.get(key) is None:
        return default
    name = _text(row[key], key)
    # Names go into tables, terminals and file names: no line ends, no escape sequences.
    if not name.strip() or not name.isprintable() or len(name) > MAX_NAME_CHARS:
        raise BadRowError(
            f"{key} must be 1 to {MAX_NAME_CHARS} printable characters, got {_shown(name)}"
        )
    return name


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise BadRowError(f"{where} must be text, got {_shown(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRowError(f"{where} holds half a surrogate pair, which is no character") from None
    return value


def _not_empty(text: str, where: str) -> str:
    if not text.strip():
        raise BadRowError(f"empty prompt: {where} holds no text")
    return text


def _shown(value: object) -> str:
    return "null" if value is None else reprlib.repr(value)
