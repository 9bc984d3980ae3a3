"""What stands between Serve and the front."""

import asyncio

from ray.exceptions import TaskCancelledError
from starlette.types import Message, Receive, Scope, Send

from hvd_ray.serving.app import LeavingIsNoFault


def test_a_call_that_serve_cancels_is_a_client_that_left() -> None:
    heard: list[Message] = []

    async def app(_scope: Scope, receive: Receive, _send: Send) -> None:
        heard.extend([await receive(), await receive()])

    messages = iter([{"type": "http.request", "body": b""}])

    async def receive() -> Message:
        for message in messages:
            return message
        raise TaskCancelledError

    async def send(_message: Message) -> None: ...

    asyncio.run(LeavingIsNoFault(app)({"type": "http"}, receive, send))
    assert [message["type"] for message in heard] == ["http.request", "http.disconnect"]
