"""The socket of `hvd serve`: that process listens on it and lends it to the front of the time.

Ray Serve's proxy costs a part of a stream more than the front itself does (docs/LOG.md), so on a
Ray of our own the front answers on the socket itself. It does not open it: who connects while one
front ends and the next one starts waits in the socket's queue instead of being refused.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import ceil
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hvd_ray.errors import UserError

if TYPE_CHECKING:
    import uvicorn

VARIABLE = "HVD_SERVE_LISTENER"
"""Where a front borrows the socket; not set: Serve's proxy listens."""
QUEUED_CONNECTIONS = 2048
KEEP_ALIVE_S = 90
"""Longer than clients and balancers keep theirs, so that they are the ones to close."""
BORROWING_S, AGAIN_S = 10.0, 0.1
ASKING_S = 1.0
"""For a client who has connected to send the request; longer than a kept connection needs, too, to
be asked once more and to be told that this was the last time."""
_CLOSE = (b"connection", b"close")
_CREDENTIALS = struct.Struct("3i")


@contextmanager
def lent(host: str, port: int) -> Iterator[str]:
    """Listen until the block is left; the name by which this user's processes borrow the socket.

    Raises:
        UserError: the address cannot be listened on.
    """
    name = f"hvd_ray.listener.{os.getpid()}.{secrets.token_hex(8)}"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=QUEUED_CONNECTIONS)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"cannot listen on {host}:{port}: {reason}") from None
    with listening, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as desk:
        desk.bind(f"\0{name}")
        desk.listen()
        is_over = threading.Event()
        lending = threading.Thread(target=_lend, args=(desk, listening, is_over), daemon=True)
        lending.start()
        try:
            yield name
        finally:
            is_over.set()
            desk.shutdown(socket.SHUT_RDWR)  # or the thread would wait in `accept` for ever
            lending.join()


def _lend(desk: socket.socket, listening: socket.socket, is_over: threading.Event) -> None:
    """Until it is over: a borrower that hangs up, or a want of descriptors, must not end it."""
    while not is_over.is_set():
        try:
            borrower, _ = desk.accept()
        except OSError:  # shut down, or there are too many open files for the moment
            is_over.wait(AGAIN_S)
            continue
        with borrower, suppress(OSError):
            if _user_of(borrower) == os.getuid():  # names of this kind are open to everybody
                socket.send_fds(borrower, [b"\0"], [listening.fileno()])


def _user_of(peer: socket.socket) -> int:
    sent = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(sent)[1]
    return user


def borrowed(name: str) -> socket.socket:
    """The listening socket that another process of this user lends by that name.

    Raises:
        OSError: nobody lends one.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(BORROWING_S)
        asking.connect(f"\0{name}")
        _, descriptors, _, _ = socket.recv_fds(asking, 1, 1)
    if not descriptors:
        raise ConnectionRefusedError(f"{name} lends no socket to this user")
    return socket.socket(fileno=descriptors[0])


class Answering:
    """An application that answers on a borrowed socket, on the running event loop."""

    def __init__(self, app: ASGIApp, listening: socket.socket, *, drain_s: float) -> None:
        self._app = app
        self._is_ending = False
        self._server = _server(self._last_answers, drain_s)
        self._running = asyncio.create_task(self._server.serve(sockets=[listening]))

    async def end(self) -> None:
        """Leave newcomers to the next one; returns when all that came before have their answers.

        Whose connection was taken just now may not have asked yet, and would be cut off by uvicorn
        as idle.
        """
        self._is_ending = True
        for accepting in self._server.servers:
            accepting.close()
        await asyncio.sleep(ASKING_S)
        self._server.should_exit = True
        await self._running

    async def _last_answers(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application's answers; while this ends, each is its connection's last."""

        async def send_last(message: Message) -> None:
            if self._is_ending and message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], _CLOSE]}
            await send(message)

        await self._app(scope, receive, send_last)


def _server(app: ASGIApp, drain_s: float) -> uvicorn.Server:
    import uvicorn

    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # or every message is traced
    config = uvicorn.Config(
        app,
        interface="asgi3",  # it takes a method for an older kind of application
        lifespan="off",
        access_log=False,
        log_config=None,
        proxy_headers=False,
        server_header=False,
        backlog=QUEUED_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=ceil(drain_s),
    )
    return uvicorn.Server(config)
