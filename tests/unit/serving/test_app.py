"""What stands between Serve and the front."""

import asyncio
from types import SimpleNamespace
from typing import Any

from ray.exceptions import TaskCancelledError
from starlette.types import Message, Receive, Scope, Send

from hvd_ray.serving.app import BuildArgs, FrontDeployment, LeavingIsNoFault, build
from hvd_ray.serving.settings import MOST_REQUESTS, Limits, deploy_tree, serve_config


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


def test_serve_holds_nobody_back_whom_the_replicas_may_be_told_to_take() -> None:
    """Limits may change without a restart, so `build` does not know them."""
    config = serve_config({"serving": {"limits": {"max_requests": MOST_REQUESTS}}})
    tree = deploy_tree(config, app="hvd")["applications"][0]["args"]
    front: Any = build(BuildArgs(**tree))._bound_deployment
    replica = front.init_args[1]._bound_deployment
    for deployment in (front, replica):
        assert deployment._deployment_config.max_ongoing_requests > MOST_REQUESTS
    assert replica._deployment_config.max_queued_requests >= 1000


def test_settings_that_cannot_be_had_leave_the_front_as_it_is() -> None:
    """Serve ends and starts anew whoever raises here; the replicas say why they refuse."""
    deployed: Any = SimpleNamespace(_limits=Limits(max_requests=7), _front=None)
    FrontDeployment.reconfigure(deployed, {"limits": {"max_requests": 0}})
    assert deployed._limits.max_requests == 7
    FrontDeployment.reconfigure(deployed, {"limits": {"max_requests": 8}})
    assert deployed._limits.max_requests == 8
