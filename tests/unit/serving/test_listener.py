"""One socket, one front after the other, and nobody who connects in between is refused."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from hvd_ray.errors import UserError
from hvd_ray.serving import listener
from hvd_ray.serving.listener import Answering, borrowed, lent


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "ASKING_S", 0.5)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _app(word: str) -> Starlette:
    async def at_once(request: Request) -> Response:  # noqa: ARG001
        return PlainTextResponse(word)

    async def slowly(request: Request) -> Response:  # noqa: ARG001
        async def parts() -> Any:
            for _ in range(5):
                yield word
                await asyncio.sleep(0.1)

        return StreamingResponse(parts())

    return Starlette(routes=[Route("/", at_once), Route("/slowly", slowly)])


async def _get(port: int, path: str = "/") -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    return answer.partition("\r\n\r\n")[2]


def _with_lent_port(run: Callable[[str, int], Awaitable[None]]) -> None:
    port = _free_port()

    async def bounded(name: str) -> None:
        async with asyncio.timeout(30):
            await run(name, port)

    with lent("127.0.0.1", port) as name:
        asyncio.run(bounded(name))
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "closed with the block"


def test_fronts_follow_one_another_and_lose_nobody() -> None:
    async def run(name: str, port: int) -> None:
        first = Answering(_app("first"), borrowed(name), drain_s=10)
        assert await _get(port) == "first"
        stream = asyncio.create_task(_get(port, "/slowly"))
        await asyncio.sleep(0.15)
        ending = asyncio.create_task(first.end())
        await asyncio.sleep(0.15)
        between = asyncio.create_task(_get(port))  # one has left off, the other is not there yet
        await ending
        assert (await stream).count("first") == 5, "what was under way is finished"
        await asyncio.sleep(0.1)
        assert not between.done()
        second = Answering(_app("second"), borrowed(name), drain_s=10)
        assert await between == "second"
        await second.end()

    _with_lent_port(run)


def test_who_has_just_connected_is_heard_and_a_kept_connection_is_told_to_close() -> None:
    async def run(name: str, port: int) -> None:
        answering = Answering(_app("word"), borrowed(name), drain_s=10)
        kept, asking = await asyncio.open_connection("127.0.0.1", port)
        fresh, asking_first = await asyncio.open_connection("127.0.0.1", port)
        ask = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        asking.write(ask)
        assert b"connection: close" not in await kept.readuntil(b"word")
        ending = asyncio.create_task(answering.end())
        await asyncio.sleep(0.3)
        for reader, writer in ((kept, asking), (fresh, asking_first)):
            writer.write(ask)
            told = await reader.read()  # to the end of the connection
            assert told.startswith(b"HTTP/1.1 200"), told
            assert b"connection: close" in told
            writer.close()
        await ending

    _with_lent_port(run)


def test_a_front_that_ends_waits_no_longer_than_it_may() -> None:
    async def run(name: str, port: int) -> None:
        answering = Answering(_app("x"), borrowed(name), drain_s=0.2)
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /slow")  # a request that never ends
        await asyncio.sleep(0.1)
        async with asyncio.timeout(5):
            await answering.end()
        writer.close()

    _with_lent_port(run)


def test_only_the_same_user_borrows(monkeypatch: pytest.MonkeyPatch) -> None:
    with lent("127.0.0.1", _free_port()) as name:
        monkeypatch.setattr(listener, "_user_of", lambda _peer: os.getuid() + 1)
        with pytest.raises(ConnectionRefusedError, match="lends no socket"):
            borrowed(name)
        monkeypatch.undo()
        borrowed(name).close()
    with pytest.raises(OSError, match="refused"):
        borrowed(name)


def test_borrowers_who_hang_up_do_not_end_the_lending() -> None:
    with lent("127.0.0.1", _free_port()) as name:
        for _ in range(200):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as hasty:
                hasty.connect(f"\0{name}")
        borrowed(name).close()


def test_a_port_that_is_taken_is_named() -> None:
    port = _free_port()
    with (
        lent("127.0.0.1", port),
        pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}: Address already"),
        lent("127.0.0.1", port),
    ):
        pass


def test_headers_of_a_proxy_are_not_believed() -> None:
    """Who asks without a key must be on this machine, whatever a header says."""

    async def run(name: str, port: int) -> None:
        async def peer(request: Request) -> Response:
            assert request.client is not None
            return PlainTextResponse(request.client.host)

        app = Starlette(routes=[Route("/", peer)])
        answering = Answering(app, borrowed(name), drain_s=1)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.0\r\nX-Forwarded-For: 10.0.0.7\r\n\r\n")
        assert (await reader.read()).endswith(b"127.0.0.1")
        writer.close()
        await answering.end()

    _with_lent_port(run)
