"""Calling an ASGI application in this process as if over the wire, its answer as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

ASGIApp = Any
LEAVING_S = 5.0
"""For an application to end after it was told that its client has left."""


@dataclass(frozen=True, slots=True)
class RelayCall:
    """A request for somebody else's endpoints."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""
    session: str | None = None
    limit_s: float = 600.0
    call_id: str = ""
    front: str = ""
    """Who asks: a carrier goes to one front."""


@dataclass(frozen=True, slots=True)
class RelayHead:
    """How the answer begins, with the body's first part: who carries them pays by the event."""

    status: int
    content_type: str
    body: bytes = b""
    carrier: str | None = None
    """What brings the rest of the body; None: the stream that brought this."""


RelayEvent = RelayHead | bytes


def body_of(events: Iterable[RelayEvent]) -> bytes:
    """The whole body of an answer."""
    return b"".join(one.body if isinstance(one, RelayHead) else one for one in events)


async def relayed(
    app: ASGIApp, call: RelayCall, *, gap_s: Callable[[], float] = lambda: 0.0
) -> AsyncGenerator[RelayEvent, None]:
    """The head with the first part of the body, then the other parts; leaving early is a
    disconnect to the application.

    Parts that come within `gap_s` (asked anew each time) of the last one are handed on as one, the
    first at once: who carries them pays by the part and not by the byte.
    """
    messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    has_left = asyncio.Event()
    bodies = iter([{"type": "http.request", "body": call.body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        body = next(bodies, None)
        if body is not None:
            return body
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(_scope(call), receive, messages.put)
        finally:
            messages.put_nowait(None)

    running = asyncio.create_task(run())
    try:
        now_s = asyncio.get_running_loop().time
        free_s = now_s()
        head: RelayHead | None = None
        while (message := await messages.get()) is not None:
            if message["type"] == "http.response.start":
                head = _head(message)
            elif message.get("body"):
                await asyncio.sleep(max(0.0, free_s - now_s()))
                body = message["body"] + _waiting(messages)
                yield body if head is None else replace(head, body=body)
                head, free_s = None, now_s() + gap_s()
        await running  # raises what the application raised
        if head is not None:  # an answer without a body
            yield head
    finally:
        has_left.set()
        _let_end(running)


def _let_end(running: asyncio.Task[None]) -> None:
    """Cancel it only where it does not end of its own accord.

    vLLM answers what is not streamed in a task of its own, which it cancels when it is told of the
    disconnect, and leaves running when it is cancelled itself.
    """
    watch = asyncio.get_running_loop().call_later(LEAVING_S, running.cancel)

    def over(task: asyncio.Task[None]) -> None:
        watch.cancel()
        if not task.cancelled():
            task.exception()  # nobody is left to be told of it

    running.add_done_callback(over)


def _waiting(messages: asyncio.Queue[dict[str, Any] | None]) -> bytes:
    """The parts that have come meanwhile; the end stays in the queue."""
    parts = []
    while not messages.empty():
        message = messages.get_nowait()
        if message is None:
            messages.put_nowait(None)  # nothing comes after it
            break
        parts.append(message.get("body", b""))
    return b"".join(parts)


def _scope(call: RelayCall) -> dict[str, Any]:
    headers = {**call.headers, "content-length": str(len(call.body))}
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 80),
        "state": {},
    }


def _head(message: dict[str, Any]) -> RelayHead:
    headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
    return RelayHead(message["status"], headers.get("content-type", "application/json"))
