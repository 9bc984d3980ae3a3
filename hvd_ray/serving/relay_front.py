"""The front over replicas that speak OpenAI themselves: vLLM's own endpoints, everything they do.

Who may call, whose cache is used, how much is taken on and for how long stay the front's; a body
passes through with the scope put in, and a field that vLLM would ignore is refused by name.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from hvd_ray.serving.api_error import ApiError, bad_request, from_failure
from hvd_ray.serving.calls import MODES, Failure, ReplicaState
from hvd_ray.serving.exchange import unless_gone
from hvd_ray.serving.expositions import merged
from hvd_ray.serving.front import Front, request_id_of
from hvd_ray.serving.openapi import description
from hvd_ray.serving.protocol import MAX_MESSAGES, read_object
from hvd_ray.serving.relay import RelayCall, RelayEvent, RelayHead
from hvd_ray.serving.sessions import session_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
OURS = frozenset({"hvd", "return_metrics", "verification"})
_OURS_ALONE = re.compile(rb"\bhvd_(rejected|client|replicas|settings)_")
"""What the engine cannot know; the rest is its own to tell."""
_STEPS = re.compile(r'^hvd_steps_total\{[^}]*source="(\w+)"[^}]*\} (\S+)$', re.MULTILINE)
_ERROR_EVENT = b'data: {"error"'
_ASKED_HEADERS = {"content-type": "application/json"}


class RelayBackend(Protocol):
    """Replicas with endpoints of their own."""

    def relay(self, call: RelayCall) -> AsyncIterator[RelayEvent | Failure]:
        """The answer as it comes; leaving early frees what the request holds."""
        ...

    async def state(self) -> ReplicaState:
        """How they are doing.

        Raises:
            ApiError: 503, nobody answers.
        """
        ...

    async def fields(self) -> Mapping[str, frozenset[str]]:
        """The body's fields that each path knows."""
        ...

    async def expositions(self) -> Mapping[str, str]:
        """The Prometheus text of each replica that answers, by its name."""
        ...


@dataclass(slots=True)
class RelayFront(Front):
    """The endpoints of a model that vLLM serves."""

    fields: Mapping[str, frozenset[str]] | None = None
    has_plugin: bool = False
    """Whether requests may choose what is drafted from."""

    @property
    def _relays(self) -> RelayBackend:
        return self.backend  # type: ignore[return-value]

    async def completions(self, request: Request) -> Response:
        return await self._pass(request, COMPLETIONS)

    async def chat_completions(self, request: Request) -> Response:
        return await self._pass(request, CHAT)

    async def tokenize(self, request: Request) -> Response:
        return await self._pass(request, TOKENIZE)

    async def detokenize(self, request: Request) -> Response:
        return await self._pass(request, DETOKENIZE)

    async def openapi(self, request: Request) -> Response:  # noqa: ARG002
        """The fields by name; what their values may be is vLLM's to say."""
        bodies: dict[str, dict[str, Any]] = {
            path: {"type": "object", "properties": {name: {} for name in sorted(names)}}
            for path, names in self._known().items()
        }
        return JSONResponse(description(bodies))

    def _known(self) -> Mapping[str, frozenset[str]]:
        paths = (COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE)
        known = self.fields or {}
        return {path: known.get(path, frozenset()) | OURS for path in paths}

    async def show_metrics(self, request: Request) -> Response:
        """vLLM's own figures of every replica, and what the front counts."""
        ours = await Front.show_metrics(self, request)
        kept = [line for line in bytes(ours.body).splitlines() if _OURS_ALONE.search(line)]
        theirs = merged(await self._relays.expositions()).encode()
        return Response(theirs + b"\n".join(kept) + b"\n", media_type="text/plain; version=0.0.4")

    async def _passes(self) -> dict[str, int]:
        """Of all replicas that live; the front sees none of them itself."""
        passes: Counter[str] = Counter()
        for text in (await self._relays.expositions()).values():
            for source, number in _STEPS.findall(text):
                passes[source] += round(float(number))
        return dict(passes)

    async def _pass(self, request: Request, path: str) -> Response:
        tenant = self._tenant(request)
        given = read_object(await self._read(request))
        body = self._checked(given, path, tenant)
        call = RelayCall(
            "POST",
            path,
            {**_ASKED_HEADERS, "x-request-id": request_id_of(request)},
            _written(body),
            session=session_of(given, tenant=tenant, header=request.headers.get("x-session-id")),
            limit_s=self._time_left_s(request),
        )
        return await self._answer_with(request, call)

    def _checked(self, given: dict[str, Any], path: str, tenant: str) -> dict[str, Any]:
        """The body for vLLM: fields known, the model ours, the scope the key's."""
        known = (self.fields or {}).get(path, frozenset())
        for name, value in given.items():
            if value is not None and name not in known and name not in OURS:
                raise bad_request(f"{name}: unknown parameter", name, "unknown_parameter")
        if given.get("verification") not in (None, "full"):
            message = 'verification: this deployment checks in full; leave it out or give "full"'
            raise bad_request(message, "verification", "unsupported_parameter")
        if given.get("model") is not None:
            self._check_model(str(given["model"]))
        _refuse_crowds(given.get("messages"))
        salt = given.get("cache_salt")
        if salt is not None and not isinstance(salt, str):
            raise bad_request("cache_salt: expected a text", "cache_salt")
        body = {k: v for k, v in given.items() if k not in OURS and v is not None}
        body["model"] = self.facts.model
        if path in (COMPLETIONS, CHAT):
            body["cache_salt"] = scope_salt(tenant, given.get("cache_salt"))
            self._choose_drafts(given.get("hvd"), body)
        return body

    def _choose_drafts(self, mode: object, body: dict[str, Any]) -> None:
        if mode is None:
            return
        if mode not in MODES:
            raise bad_request(f"hvd: expected one of {', '.join(MODES)}, got {mode!r}", "hvd")
        if mode not in self.facts.modes:
            message = f"hvd: {mode!r} is not served here; choose from {', '.join(self.facts.modes)}"
            raise bad_request(message, "hvd")
        if self.has_plugin:
            given = body.get("vllm_xargs", {})
            if not isinstance(given, dict):
                raise bad_request("vllm_xargs: expected an object", "vllm_xargs")
            body["vllm_xargs"] = {**given, "hvd": mode}

    async def _answer_with(self, request: Request, call: RelayCall) -> Response:
        deadline_s = asyncio.get_running_loop().time() + call.limit_s
        events = self._relays.relay(call)
        known = (self.fields or {}).get(call.path, frozenset())
        try:
            opening = _opening(events, deadline_s, known)
            head = await unless_gone(request, self.metrics, opening)
        except TimeoutError:
            await events.aclose()  # type: ignore[attr-defined]
            message = f"the request took longer than {call.limit_s:g} s and was given up"
            raise ApiError(408, message, code="timeout") from None
        except (ApiError, ClientDisconnect, asyncio.CancelledError):
            await events.aclose()  # type: ignore[attr-defined]
            raise
        headers = {"X-Request-Id": request_id_of(request), "Cache-Control": "no-store"}
        parts = self._parts(head.body, events, deadline_s)
        if head.status >= 400:
            parts = _openai_shaped(parts, head.status, known)
            self.metrics.rejected(head.status)
        return StreamingResponse(
            parts, status_code=head.status, media_type=head.content_type, headers=headers
        )

    async def _parts(
        self, first: bytes, events: AsyncIterator[RelayEvent | Failure], deadline_s: float
    ) -> AsyncIterator[bytes]:
        """The body as it comes; a failure or the end of the time is the stream's last word."""
        has_left = True
        try:
            async for part in _in_time(first, events, deadline_s):
                yield _with_our_error(part)
            has_left = False
        except ApiError as error:
            has_left = False
            self.metrics.rejected(error.status)
            yield f"data: {json.dumps(error.body())}\n\ndata: [DONE]\n\n".encode()
        finally:
            if has_left:
                self.metrics.disconnected()
            await events.aclose()  # type: ignore[attr-defined]


async def _in_time(
    first: bytes, events: AsyncIterator[RelayEvent | Failure], deadline_s: float
) -> AsyncIterator[bytes]:
    """The body's parts.

    Raises:
        ApiError: the replica has failed, or the time is over.
    """
    if first:
        yield first
    while True:
        try:
            async with asyncio.timeout_at(deadline_s):
                event = await anext(events, None)
        except TimeoutError:
            raise ApiError(408, "the request took too long", code="timeout") from None
        if isinstance(event, Failure):
            raise from_failure(event)
        if event is None:
            return
        assert isinstance(event, bytes)
        yield event


async def _opening(
    events: AsyncIterator[RelayEvent | Failure], deadline_s: float, known: frozenset[str]
) -> RelayHead:
    """How an answer begins.

    vLLM begins a stream before its engine has looked at the request: what the engine then refuses
    is a 200 with an error for its only event.

    Raises:
        ApiError: that error, with the status that it has in an answer that is not streamed; or
            the replica has failed.
        TimeoutError: it took too long.
    """
    async with asyncio.timeout_at(deadline_s):
        head = await anext(events)
    if isinstance(head, Failure):
        raise from_failure(head)
    assert isinstance(head, RelayHead)
    is_stream = head.status < 400 and head.content_type.startswith("text/event-stream")
    if is_stream and head.body.startswith(_ERROR_EVENT):
        error = _error_in(head.body.partition(b"\n\n")[0].removeprefix(b"data: "), 500, known)
        if error is not None:
            raise error
    return head


def _refuse_crowds(messages: object) -> None:
    """More messages, or parts of one, than a template is asked to render; their form is vLLM's."""
    listed = messages if isinstance(messages, list) else []
    contents = [message.get("content") for message in listed if isinstance(message, dict)]
    longest = max([len(listed), *(len(c) for c in contents if isinstance(c, list))])
    if longest > MAX_MESSAGES:
        message = f"messages: at most {MAX_MESSAGES}, and parts of one, got {longest}"
        raise bad_request(message, "messages")


def _written(body: dict[str, Any]) -> bytes:
    try:
        return json.dumps(body, allow_nan=False).encode()
    except RecursionError:  # one level more than what could just be read
        raise bad_request("the body is nested too deeply") from None


def _with_our_error(part: bytes) -> bytes:
    """Events of a stream; vLLM's last one where its engine failed."""
    at = 0 if part.startswith(_ERROR_EVENT) else part.find(b"\n\n" + _ERROR_EVENT) + 2
    if at == 1:  # there is none
        return part
    head, _, rest = part[at:].partition(b"\n\n")
    error = _error_in(head.removeprefix(b"data: "), 500, frozenset())
    if error is None:
        return part
    return part[:at] + b"data: " + _written(error.body()) + b"\n\n" + rest


async def _openai_shaped(
    parts: AsyncIterator[bytes], status: int, known: frozenset[str]
) -> AsyncIterator[bytes]:
    """An error's body; vLLM gives a number as `code`, OpenAI a word."""
    raw = b"".join([part async for part in parts])
    error = _error_in(raw, status, known)
    yield raw if error is None else _written(error.body())


def _error_in(raw: bytes, status: int, known: frozenset[str]) -> ApiError | None:
    """vLLM's error as ours; None: it is none.

    Where it names no field, its message mostly begins with one of those that are known.
    """
    try:
        error = json.loads(raw)["error"]
        message, param, code = (error.get(name) for name in ("message", "param", "code"))
        first_word = str(message or "").partition(" ")[0].strip("`'\"")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    status = code if isinstance(code, int) else status
    word = code if isinstance(code, str) else None
    return ApiError(
        status, message or "", param or (first_word if first_word in known else None), word
    )


def scope_salt(tenant: str, salt: object) -> str:
    """The `cache_salt` that vLLM and its plugin scope their caches by: the tenant's own."""
    word = json.dumps([tenant, salt])
    return hashlib.sha256(word.encode()).hexdigest()
