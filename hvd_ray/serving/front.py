"""The HTTP front: OpenAI's endpoints over a backend that decodes.

It knows no model: it checks who calls and what they ask, passes calls on, and shapes the events
that come back. Errors are OpenAI-shaped whatever their cause.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, request_response
from starlette.types import ASGIApp

from hvd_ray import __version__
from hvd_ray.serving.api_error import ApiError, bad_request, from_failure
from hvd_ray.serving.auth import ApiKeys
from hvd_ray.serving.calls import (
    Call,
    Event,
    Failure,
    Prompt,
    ReplicaFacts,
    ReplicaState,
)
from hvd_ray.serving.exchange import Exchange, RequestLog
from hvd_ray.serving.gate import Gate
from hvd_ray.serving.metrics import FrontMetrics
from hvd_ray.serving.openapi import description
from hvd_ray.serving.page import page_response
from hvd_ray.serving.protocol import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    conversation,
    read_body,
)
from hvd_ray.serving.sessions import session_of
from hvd_ray.serving.settings import Limits
from hvd_ray.serving.shapes import ChatShape, CompletionShape, Shape
from hvd_ray.serving.tally import Tally

_log = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
STATE_WAIT_S = 5.0
"""For the replicas' figures; Prometheus gives a scrape ten seconds."""
Handler = Callable[[Request], Awaitable[Response]]


class Backend(Protocol):
    """Whoever decodes: one replica in this process, or many behind a handle."""

    def serve(self, call: Call) -> AsyncIterator[tuple[Event, ...]]:
        """The events of a call; leaving early frees what it holds."""
        ...

    async def state(self) -> ReplicaState:
        """How it is doing.

        Raises:
            ApiError: 503, nobody answers.
        """
        ...

    async def tokenize(
        self, prompt: Prompt
    ) -> tuple[tuple[int, ...], tuple[str, ...]] | Failure: ...

    async def detokenize(self, token_ids: tuple[int, ...]) -> str | Failure: ...


@dataclass(slots=True)
class Front:
    """The endpoints of one model."""

    backend: Backend
    facts: ReplicaFacts
    keys: ApiKeys = field(default_factory=ApiKeys)
    limits: Limits = field(default_factory=Limits)
    """May be replaced while serving."""
    gate: Gate = field(default_factory=Gate)
    """Closed when the server is about to end."""
    metrics: FrontMetrics = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = FrontMetrics(self.facts.model)

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=self._routes(),
            exception_handlers={
                ApiError: self._on_api_error,
                HTTPException: self._on_http_error,
                ClientDisconnect: self._on_disconnect,
                Exception: self._on_fault,
            },
        )

    def _routes(self) -> list[Route]:
        posts: dict[str, Handler] = {
            "/v1/completions": self.completions,
            "/v1/chat/completions": self.chat_completions,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
        }
        gets: dict[str, Handler] = {
            "/health": self.health,
            "/metrics": self.show_metrics,
            "/version": self.version,
            "/openapi.json": self.openapi,
            "/v1/models": self.models,
            "/v1/models/{model:path}": self.model,
            "/ui": page_response,
            "/ui/state": self.ui_state,
        }
        return [
            *(
                Route(path, self._gated(handler), methods=["POST"])
                for path, handler in posts.items()
            ),
            *(Route(path, self._near(handler), methods=["GET"]) for path, handler in gets.items()),
        ]

    def _gated(self, handler: Handler) -> ASGIApp:
        return self.gate.guarding(request_response(handler))

    def _near(self, handler: Handler) -> Handler:
        """What is open to everybody with keys is this machine's own without them: else a page
        whose name a browser was made to take for this machine could read it."""

        async def guarded(request: Request) -> Response:
            if self.keys.is_open:
                self._tenant(request)
            return await handler(request)

        return guarded

    # -- text ------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        tenant, body = await self._asked(request, CompletionRequest)
        return await self._answer(request, tenant, body, CompletionShape)

    async def chat_completions(self, request: Request) -> Response:
        tenant, body = await self._asked(request, ChatRequest)
        return await self._answer(request, tenant, body, ChatShape)

    async def _answer(
        self,
        request: Request,
        tenant: str,
        body: Any,
        shape_class: Any,
    ) -> Response:
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options: needs stream to be true", "stream_options")
        answer_id = body.request_id or request_id_of(request)
        shape: Shape = shape_class(body, answer_id=answer_id, model=self.facts.model)
        session = session_of(vars(body), tenant=tenant, header=request.headers.get("x-session-id"))
        call = shape.call(
            request_id=_own_id(answer_id),
            tenant=tenant,
            session=session,
            limit_s=self._time_left_s(request),
        )
        tally = Tally(self.metrics)
        log = RequestLog(answer_id, request.url.path, tenant, call, tally)
        events = self.backend.serve(call)

        def again() -> AsyncIterator[tuple[Event, ...]]:
            return self.backend.serve(replace(call, request_id=_own_id(answer_id)))

        exchange = Exchange(request, shape, events, tally, log, self.metrics, again)
        return await (exchange.stream() if body.stream else exchange.whole())

    # -- tokens ----------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        _, body = await self._asked(request, TokenizeRequest)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages", "prompt")
        prompt: Prompt = body.prompt or ""
        if body.messages is not None:
            prompt = conversation(body.messages)
        found = await self.backend.tokenize(prompt)
        if isinstance(found, Failure):
            raise from_failure(found)
        token_ids, texts = found
        answer = {
            "count": len(token_ids),
            "max_model_len": self.facts.context_length,
            "tokens": list(token_ids),
            "token_strs": list(texts) if body.return_token_strs else None,
        }
        return JSONResponse(answer)

    async def detokenize(self, request: Request) -> Response:
        _, body = await self._asked(request, DetokenizeRequest)
        found = await self.backend.detokenize(tuple(body.tokens))
        if isinstance(found, Failure):
            raise from_failure(found)
        return JSONResponse({"prompt": found})

    # -- about the server ------------------------------------------------------------------

    async def health(self, request: Request) -> Response:  # noqa: ARG002
        self.gate.refuse_if_closed()
        state = await self.backend.state()
        if not state.is_alive:
            message = "the decoding thread has stopped"
            raise ApiError(503, message, code="engine_dead", retry_after_s=5)
        return JSONResponse({"status": "ok"})

    async def version(self, request: Request) -> Response:  # noqa: ARG002
        return JSONResponse({"version": __version__})

    async def openapi(self, request: Request) -> Response:  # noqa: ARG002
        return JSONResponse(description())

    async def show_metrics(self, request: Request) -> Response:  # noqa: ARG002
        text = self.metrics.exposition(await self._state_soon())
        return Response(text, media_type="text/plain; version=0.0.4")

    async def _state_soon(self) -> ReplicaState | None:
        """None where no replica answers before whoever scrapes gives up."""
        try:
            async with asyncio.timeout(STATE_WAIT_S):
                return await self.backend.state()
        except (ApiError, TimeoutError):
            return None

    async def models(self, request: Request) -> Response:
        self._tenant(request)
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self._tenant(request)
        self._check_model(request.path_params["model"])
        return JSONResponse(self._card())

    async def ui_state(self, request: Request) -> Response:
        """What the page shows of the replica."""
        self._tenant(request)
        state = await self.backend.state()
        return JSONResponse(
            {
                "model": self.facts.model,
                "engine": self.facts.engine,
                "dtype": self.facts.dtype,
                "modes": list(self.facts.modes),
                "verifications": list(self.facts.verifications),
                "context_length": self.facts.context_length,
                "policy": state.policy,
                "tau": state.tau,
                "predictor": state.predictor,
                "notes": list(state.notes),
                "num_replicas": state.num_replicas,
                "num_alive": state.num_alive,
                "num_running": state.num_running,
                "num_waiting": state.num_waiting,
                "num_cached_tokens": state.num_cached_tokens,
                "passes": await self._passes(),
                "refused": state.refused,
            }
        )

    async def _passes(self) -> dict[str, int]:
        """Passes since the start, by what they verified."""
        return dict(self.metrics.passes)

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.facts.model,
            "object": "model",
            "created": 0,
            "owned_by": "hvd_ray",
            "root": self.facts.root,
            "parent": None,
            "max_model_len": self.facts.context_length,
            "permission": [],
        }

    # -- what every request goes through ---------------------------------------------------

    async def _asked(self, request: Request, model: type[Body]) -> tuple[str, Body]:
        """Who asks, and the body, checked."""
        tenant = self._tenant(request)
        body = read_body(model, await self._read(request))
        named: str | None = getattr(body, "model", None)
        if named is not None:
            self._check_model(named)
        return tenant, body

    def _tenant(self, request: Request) -> str:
        return self.keys.tenant(
            authorization=request.headers.get("authorization"),
            peer=request.client.host if request.client else None,
            host=request.headers.get("host"),
        )

    def _check_model(self, name: str) -> None:
        if name != self.facts.model:
            raise ApiError(
                404,
                f"the model {name!r} is not served here; this is {self.facts.model!r}",
                "model",
                "model_not_found",
            )

    async def _read(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"expected Content-Type application/json, got {kind or 'none'}")
        limit_s, request.state.began_s = self.limits.request_timeout_s, time.monotonic()
        try:
            async with asyncio.timeout(limit_s):
                return await self._body(request)
        except TimeoutError:
            message = f"the body did not arrive within {limit_s:g} s"
            raise ApiError(408, message, code="timeout") from None

    async def _body(self, request: Request) -> bytes:
        limit, size, parts = self.limits.max_body_bytes, 0, []
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
            parts.append(part)
        return b"".join(parts)

    def _time_left_s(self, request: Request) -> float:
        """Of the request's limit, once its body is there; tenths of a second count."""
        took_s: float = round(time.monotonic() - request.state.began_s, 1)
        return max(0.0, self.limits.request_timeout_s - took_s)

    # -- errors ----------------------------------------------------------------------------

    async def _on_api_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        self.metrics.rejected(error.status)
        headers = {**error.headers(), "X-Request-Id": request_id_of(request)}
        return JSONResponse(error.body(), error.status, headers)

    async def _on_http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        answer = await self._on_api_error(request, ApiError(error.status_code, message))
        answer.headers.update(error.headers or {})
        return answer

    async def _on_disconnect(self, request: Request, error: Exception) -> Response:  # noqa: ARG002
        return Response(status_code=499)  # nobody reads it

    async def _on_fault(self, request: Request, error: Exception) -> Response:
        _log.error("request %s failed", request_id_of(request), exc_info=error)
        fault = ApiError(500, "the server failed on this request; its log says why")
        return await self._on_api_error(request, fault)


def _own_id(answer_id: str) -> str:
    """Ids of clients may repeat."""
    return f"{answer_id}-{secrets.token_hex(4)}"


def request_id_of(request: Request) -> str:
    """The caller's X-Request-Id, or one of ours that stays for the request."""
    if not hasattr(request.state, "request_id"):
        given = request.headers.get("x-request-id", "")
        is_good = _REQUEST_ID.fullmatch(given) is not None
        request.state.request_id = given if is_good else secrets.token_hex(12)
    return str(request.state.request_id)
