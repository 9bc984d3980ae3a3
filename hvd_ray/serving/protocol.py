"""The requests of the OpenAI endpoints, with the fields that vLLM adds under vLLM's names.

A field that is not served is refused by name, unless its value asks for nothing: a null, or the
default that clients send along.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isinf
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hvd_ray.errors import UserError
from hvd_ray.serving.api_error import ApiError, bad_request, named_param
from hvd_ray.serving.calls import Message, Mode, Prompt
from hvd_ray.types import (
    MAX_COUNT,
    MAX_TOP_LOGPROBS,
    MIN_TEMPERATURE,
    SamplingParams,
    VerificationName,
)

MAX_CHOICES = 128
MAX_STOPS = 32
MAX_MESSAGES = 4096
"""Of a conversation, and parts of a message: a template takes its time for each, however short."""
MAX_TOKEN_LIST = 1024
"""Biases and stop tokens are looked at for every token that is decoded."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "add_generation_prompt": (True,),
        "add_special_tokens": (True, False),
        "allowed_token_ids": (),
        "audio": (),
        "bad_words": ([],),
        "best_of": (1,),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "documents": ([],),
        "function_call": ("none",),
        "functions": ([],),
        "include_reasoning": (True, False),
        "length_penalty": (1,),
        "logprob_token_ids": ([],),
        "metadata": ({},),
        "modalities": (["text"],),
        "parallel_tool_calls": (True, False),
        "prediction": (),
        "priority": (0,),
        "prompt_embeds": (),
        "reasoning_effort": ("none",),
        "repetition_detection": (),
        "response_format": ({"type": "text"},),
        "return_token_offsets": (False,),
        "return_tokens_as_token_ids": (False,),
        "service_tier": ("auto", "default"),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "store": (False,),
        "stream_interval": (1,),
        "structured_outputs": (),
        "suffix": ("",),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "truncate_prompt_tokens": (),
        "use_beam_search": (False,),
        "watermarking": (False,),
        "web_search_options": (),
    }
)
"""Fields that are understood and not served, and their values that ask for nothing."""

_FORMS: Mapping[str, str] = MappingProxyType(
    {
        "prompt": "a text, token ids, a list of texts or a list of lists of token ids, none empty",
        "stop": f"a text or a list of at most {MAX_STOPS} texts",
    }
)
"""Fields that take several forms."""

TokenId = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Text = Annotated[str, Field(min_length=1, max_length=1024)]
Body = TypeVar("Body", bound="_Body")


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(_Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class _Generation(_Body):
    """What both endpoints share."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] = Field(default_factory=list)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_TOKEN_LIST)] = Field(
        default_factory=list
    )
    include_stop_str_in_output: bool = False
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_TOKEN_LIST)] = Field(
        default_factory=dict
    )
    min_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 0
    ignore_eos: bool = False
    user: str | None = None
    session_id: Text | None = None
    cache_salt: Text | None = None
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")] | None = None
    return_token_ids: bool = False
    return_metrics: bool = False
    """Ours: `metrics` in the response, as vLLM's, with the share of each source."""
    return_steps: bool = False
    """Ours: `hvd` in each choice, the decisions of each cycle and who proposed which text."""
    hvd: Mode = "auto"
    """Ours: what may be drafted from. The text is the same whatever it says."""
    verification: VerificationName | None = None
    """Ours: who checks drafts, of those that the deployment allows; None: the target, in full.

    The answer's `verification` is `full` also where a lossy one was asked for and no token went
    unchecked, as until the audit trusts the slim model; `return_metrics` adds
    `verification_reason` then."""

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_running_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def sampling(self, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """The sampling parameters, checked.

        Raises:
            ApiError: a value is out of range; names the field.
        """
        cold = self.temperature < MIN_TEMPERATURE
        try:
            return SamplingParams(
                temperature=0.0 if cold else self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                logit_bias=_token_biases(self.logit_bias),
                max_tokens=MAX_COUNT if max_tokens is None else max(1, max_tokens),
                min_tokens=self.min_tokens,
                stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
                stop_token_ids=tuple(self.stop_token_ids),
                ignore_eos=self.ignore_eos,
                seed=self.seed,
                logprobs=logprobs,
            )
        except UserError as error:
            message = str(error)
            raise bad_request(message.removeprefix("sampling: "), named_param(message)) from None


class CompletionRequest(_Generation):
    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    )
    max_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 16
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        if isinstance(self.prompt, str):
            return (self.prompt,)
        if isinstance(self.prompt[0], int):
            return (tuple(self.prompt),)
        return tuple(p if isinstance(p, str) else tuple(p) for p in self.prompt)


class ChatRequest(_Generation):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0

    @property
    def budget(self) -> int | None:
        """The newer name wins, as it does elsewhere."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The messages as a chat template takes them.

        Raises:
            ApiError: a message has another form, or content that is no text.
        """
        return conversation(self.messages)


class TokenizeRequest(_Body):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(_Body):
    model: str | None = None
    tokens: list[TokenId]


class _Turn(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[_TextPart], Field(max_length=MAX_MESSAGES)] = ""
    name: str | None = None
    tool_call_id: str | None = None


_UNION_ARMS = ("str", "list[_TextPart]")
"""Pydantic's names of what `content` may be."""


class _TextPart(_Body):
    type: Literal["text"]
    text: str


def conversation(messages: list[dict[str, Any]]) -> tuple[Message, ...]:
    """Messages as a chat template takes them.

    Raises:
        ApiError: a message has another form, or content that is no text.
    """
    return tuple(_message(message, index) for index, message in enumerate(messages))


def _message(message: dict[str, Any], index: int) -> Message:
    given = {key: value for key, value in message.items() if value not in (None, [])}
    try:
        turn = _Turn.model_validate(given)
    except ValidationError as error:
        deepest = max(error.errors(), key=lambda found: len(found["loc"]))
        place = ".".join(str(part) for part in deepest["loc"] if part not in _UNION_ARMS)
        if deepest["loc"][-1] == "type" and "content" in deepest["loc"]:
            words = f'messages[{index}].{place}: this model reads text alone, give type "text"'
            raise bad_request(words, "messages", "unsupported_parameter") from None
        raise bad_request(f"messages[{index}].{place}: {deepest['msg']}", "messages") from None
    parts = turn.content
    content = parts if isinstance(parts, str) else "".join(part.text for part in parts)
    role = "system" if turn.role == "developer" else turn.role
    return Message(role, content)


def read_object(raw: bytes) -> dict[str, Any]:
    """A request body as JSON.

    Raises:
        ApiError: 400, it is no JSON object.
    """
    try:
        text = raw.decode("utf-8-sig")
        body = json.loads(text, parse_constant=_no_number, parse_float=_finite)
        if "\\u" in text:
            _refuse_halves(body)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise bad_request(f"the body must be a JSON object, got {type(body).__name__}")
    return body


def read_body(model: type[Body], raw: bytes) -> Body:
    """A request body, checked.

    Raises:
        ApiError: 400, it is no JSON object, or a field is unknown, not served or out of range.
    """
    body = read_object(raw)
    fields = set(model.model_fields)
    for name in body:
        _refuse_unserved(name, body[name], fields)
    given = {name: body[name] for name in body if name in fields and body[name] is not None}
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise _refused(error) from None


def _refuse_halves(body: object) -> None:
    """JSON can spell one half of a surrogate pair, which is no text: it cannot be sent back,
    hashed or tokenized.

    Raises:
        ValueError: a string or a key holds one.
    """
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it holds one half of a surrogate pair") from None


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    """JSON has no limit for numbers, floats have: what lies beyond would become an infinity."""
    number = float(text)
    if isinf(number):
        raise ValueError(f"the number {text[:20]} is too large")
    return number


def _refuse_unserved(name: str, value: Any, fields: set[str]) -> None:
    if name in fields or value is None:
        return
    allowed = NEUTRAL.get(name)
    if allowed is None:
        raise bad_request(f"{name}: unknown parameter", name, "unknown_parameter")
    if value not in allowed:
        shown = " or ".join(json.dumps(neutral) for neutral in allowed)
        hint = f"; leave it out or give {shown}" if shown else "; leave it out"
        raise bad_request(f"not supported: {name}{hint}", name, "unsupported_parameter")


def _refused(error: ValidationError) -> ApiError:
    first = error.errors()[0]
    param = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "missing":
        return bad_request(f"{param}: required", param, "missing_required_parameter")
    if (
        param is not None and param in _FORMS and len(first["loc"]) > 1
    ):  # each form complains about the others
        return bad_request(f"{param}: expected {_FORMS[param]}", param, "invalid_value")
    where = ".".join(str(part) for part in first["loc"])
    return bad_request(f"{where}: {first['msg']}", param, "invalid_value")


def _token_biases(given: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError as error:
        raise bad_request(
            f"logit_bias: expected token ids as keys ({error})", "logit_bias"
        ) from None
