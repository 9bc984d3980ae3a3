"""Calling an ASGI application in this process as if over the wire, its answer as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

ASGIApp = Any


@dataclass(frozen=True, slots=True)
class RelayCall:
    """A request for somebody else's endpoints."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""
    session: str | None = None
    limit_s: float = 600.0


@dataclass(frozen=True, slots=True)
class RelayHead:
    """How the answer begins."""

    status: int
    content_type: str


RelayEvent = RelayHead | bytes


async def relayed(app: ASGIApp, call: RelayCall) -> AsyncGenerator[RelayEvent, None]:
    """The head, then the body's parts; leaving early is a disconnect to the application."""
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
        while (message := await messages.get()) is not None:
            if message["type"] == "http.response.start":
                yield _head(message)
            elif message.get("body"):
                yield message["body"]
        await running  # raises what the application raised
    finally:
        has_left.set()
        running.cancel()


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
