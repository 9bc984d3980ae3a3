"""Case L09 over HTTP: a client that leaves is computed for no further, whichever engine serves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from hvd_ray.serving.front import Front
from hvd_ray.serving.relay_front import RelayFront
from hvd_ray.serving.replica import Replica
from tests.unit.serving.conftest import make_replica
from tests.unit.serving.test_relay import FACTS, KNOWN, Backend, Upstream
from tests.unit.serving.test_replica import GatedEngine, until


class Client:
    """One connection to an ASGI application, as a server of HTTP drives it."""

    def __init__(self, app: Any, path: str, **body: Any) -> None:
        self.num_parts = 0
        self._app, self._path = app, path
        self._body = json.dumps(body).encode()
        self._has_left = asyncio.Event()
        self._is_asked = False

    async def __call__(self) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": self._path,
            "raw_path": self._path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        await self._app(scope, self._receive, self._send)

    def leave(self) -> None:
        self._has_left.set()

    async def _receive(self) -> dict[str, Any]:
        if not self._is_asked:
            self._is_asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.num_parts += bool(message.get("body"))


async def left(client: Client, when: Callable[[], bool]) -> None:
    """The request's whole life, of a client that leaves at a moment."""
    asking = asyncio.create_task(client())
    await until(when)
    client.leave()
    async with asyncio.timeout(10):
        await asking


@pytest.fixture
def gated() -> Iterator[tuple[Replica, GatedEngine]]:
    engine = GatedEngine()
    replica = make_replica(engine=engine)
    yield replica, engine
    engine.gate.set()
    replica.end()


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_l09_a_client_that_leaves_ends_its_decoding(
    gated: tuple[Replica, GatedEngine], path: str, is_stream: bool
) -> None:
    """400 passes were wanted; the one under way is the last."""
    replica, engine = gated
    body = {"max_tokens": 400, "ignore_eos": True, "temperature": 1.0, "stream": is_stream}
    asked = (
        {"prompt": "a"} if "chat" not in path else {"messages": [{"role": "user", "content": "a"}]}
    )

    async def run() -> None:
        client = Client(Front(replica, replica.facts).app(), path, **body, **asked)
        await left(client, lambda: replica._loop.num_running == 1)
        engine.gate.set()
        await until(lambda: replica._loop.num_running == 0)

    asyncio.run(run())
    assert engine.num_passes <= 1


class Streaming(Upstream):
    """Tokens at the pace of a fast engine."""

    async def _chunks(self) -> AsyncIterator[str]:
        try:
            while True:
                yield "data: 1\n\n"
                await asyncio.sleep(0.001)
        finally:
            self.left.set()


def test_l09_a_client_that_leaves_a_relayed_stream_reaches_vllm() -> None:
    async def run() -> None:
        upstream = Streaming()
        fields = {"/v1/completions": KNOWN}
        front = RelayFront(Backend(upstream), FACTS, fields=fields)  # type: ignore[arg-type]
        client = Client(front.app(), "/v1/completions", prompt="a", stream=True)
        await left(client, lambda: client.num_parts > 3)
        async with asyncio.timeout(5):
            await upstream.left.wait()

    asyncio.run(run())
