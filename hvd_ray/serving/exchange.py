"""One request's answer: the backend's events as JSON or a stream, and its line in the log."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from hvd_ray.serving.api_error import ApiError, from_failure
from hvd_ray.serving.calls import Call, Event, Failure, Opening, Piece
from hvd_ray.serving.metrics import FrontMetrics
from hvd_ray.serving.shapes import Shape
from hvd_ray.serving.tally import Tally

_log = logging.getLogger("hvd_ray.serving.front")
T = TypeVar("T")
GRACE_S = 2.0
"""For a replica's own word that the time is over."""


@dataclass(slots=True)
class Exchange:
    """From the first event to the last, whoever leaves or fails in between."""

    request: Request
    shape: Shape
    events: AsyncIterator[tuple[Event, ...]]
    tally: Tally
    log: RequestLog
    metrics: FrontMetrics
    again: Callable[[], AsyncIterator[tuple[Event, ...]]] | None = None
    """Asks once more, for an answer of which the client has seen nothing yet."""

    async def whole(self) -> Response:
        """The answer at the end.

        Raises:
            ApiError: the request failed.
            ClientDisconnect: nobody waits for it any more.
        """

        async def collect() -> None:
            async for batch in self.events:
                if self.again is not None and _is_death(batch):
                    return await self._begin_anew(collect)
                _raise_failure(batch)
                self.tally.add(batch)
            return None

        try:
            await self._in_time(collect())
        except ApiError as error:
            self.log.ended(str(error.status))
            raise
        except (ClientDisconnect, asyncio.CancelledError):
            self.log.ended("left")
            raise
        finally:
            await _close(self.events)
        self.log.ended("200")
        return JSONResponse(
            self.shape.whole(self.tally), headers={"X-Request-Id": self.log.request_id}
        )

    async def _begin_anew(self, collect: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """The replica died in the middle: another one gives the whole answer."""
        assert self.again is not None
        await _close(self.events)
        self.events, self.again = self.again(), None
        self.tally.forget()
        await collect()

    async def stream(self) -> Response:
        """An answer that begins with its first token, so that a refusal has a status of its own.

        Raises:
            ApiError: the request failed before.
            ClientDisconnect: nobody waits for it any more.
        """

        async def begin() -> tuple[Event, ...]:
            first: list[Event] = []
            async for batch in self.events:
                _raise_failure(batch)
                first += batch
                if any(isinstance(event, Piece) for event in batch):
                    break
            return tuple(first)

        try:
            first = await self._in_time(begin())
        except (ApiError, ClientDisconnect, asyncio.CancelledError) as error:
            self.log.ended(str(error.status) if isinstance(error, ApiError) else "left")
            await _close(self.events)
            raise
        chunks = self._chunks(first)
        headers = {"X-Request-Id": self.log.request_id, "Cache-Control": "no-store"}
        return StreamingResponse(chunks, media_type="text/event-stream", headers=headers)

    async def _in_time(self, work: Coroutine[Any, Any, T]) -> T:
        """The outcome of `work`; replicas keep the time limit themselves, once there is one."""
        limit_s = self.log.call.limit_s
        try:
            timed = asyncio.wait_for(work, limit_s + GRACE_S)
            return await unless_gone(self.request, self.metrics, timed)
        except TimeoutError:
            raise ApiError(
                408, f"no replica answered within {limit_s:g} s", code="timeout"
            ) from None

    async def _chunks(self, first: tuple[Event, ...]) -> AsyncIterator[str]:
        status = "left"
        try:
            yield _lines(self.shape, first, self.tally)
            async for batch in self.events:
                _raise_failure(batch)
                yield _lines(self.shape, batch, self.tally)
            yield "".join(_sse(chunk) for chunk in self.shape.end_chunks(self.tally))
            status = "200"
        except ApiError as error:
            status = str(error.status)
            self.metrics.rejected(error.status)
            yield _sse(error.body())
        finally:
            if status == "left":
                self.metrics.disconnected()
            self.log.ended(status)
            await _close(self.events)
        yield "data: [DONE]\n\n"


@dataclass(slots=True)
class RequestLog:
    """One line for each request, without a word of its text."""

    request_id: str
    path: str
    tenant: str
    call: Call
    tally: Tally
    _is_done: bool = False

    def ended(self, status: str) -> None:
        if self._is_done:
            return
        self._is_done = True
        first_s = self.tally.first_token_s
        _log.info(
            "request %s %s tenant=%s hvd=%s status=%s prompt_tokens=%d output_tokens=%d "
            "first_token_ms=%s whole_ms=%.0f",
            self.request_id,
            self.path,
            self.tenant,
            self.call.mode,
            status,
            self.tally.num_prompt_tokens,
            self.tally.num_output_tokens,
            "-" if first_s is None else f"{first_s * 1e3:.0f}",
            (self.tally.now() - self.tally.started_s) * 1e3,
        )


async def unless_gone(request: Request, metrics: FrontMetrics, work: Coroutine[Any, Any, T]) -> T:
    """The outcome of `work`, which is given up when the client leaves."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            metrics.disconnected()
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def _is_death(batch: tuple[Event, ...]) -> bool:
    return any(isinstance(event, Failure) and event.kind == "dead" for event in batch)


def _raise_failure(batch: tuple[Event, ...]) -> None:
    for event in batch:
        if isinstance(event, Failure):
            raise from_failure(event)


def _lines(shape: Shape, batch: tuple[Event, ...], tally: Tally) -> str:
    lines = []
    for event in batch:
        tally.add((event,))
        if isinstance(event, Opening):
            lines += [_sse(chunk) for chunk in shape.opening_chunks(event)]
        elif isinstance(event, Piece) and (chunk := shape.chunk(event, tally)) is not None:
            lines.append(_sse(chunk))
    return "".join(lines)


def _sse(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def _left(request: Request) -> None:
    """Returns when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _close(events: AsyncIterator[tuple[Event, ...]]) -> None:
    close = getattr(events, "aclose", None)
    if close is not None:
        await close()
