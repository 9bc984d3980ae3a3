"""What stands between Serve and the front."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import TaskCancelledError
from starlette.types import Message, Receive, Scope, Send

from hvd_ray.errors import UserError
from hvd_ray.serving.app import (
    BuildArgs,
    FrontDeployment,
    LeavingIsNoFault,
    VllmDeployment,
    build,
)
from hvd_ray.serving.auth import KeyFile, load_keys
from hvd_ray.serving.kept import KeptSettings
from hvd_ray.serving.settings import (
    MOST_REQUESTS,
    HotSettings,
    Limits,
    deploy_tree,
    hot_settings,
    serve_config,
)


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


class FakeVllm:
    """Stands in for a replica on vLLM: takes limits, and engines of one policy."""

    def __init__(self, hot: HotSettings) -> None:
        self.hot = hot
        self.refused: str | None = None

    @classmethod
    async def open(cls, _config: Any, hot: HotSettings) -> "FakeVllm":
        return cls(hot)

    async def reconfigure(self, tree: dict[str, Any]) -> bool:
        try:
            self.hot = hot_settings(tree)
        except UserError:
            return False
        return True

    def refuse(self, error: UserError) -> None:
        self.refused = str(error)


def test_a_vllm_replica_in_place_of_a_dead_one_starts_with_what_the_others_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve gives it the latest settings, also those that the others have refused."""
    monkeypatch.setattr("hvd_ray.serving.vllm_engine.VllmReplica", FakeVllm)
    monkeypatch.setattr("hvd_ray.serving.app._kept", lambda _: KeptSettings(tmp_path / "kept"))

    async def run() -> None:
        first, second = (VllmDeployment({"serving": {"engine": "vllm"}}) for _ in range(2))
        good, bad = ({"limits": {"max_requests": number}} for number in (7, 0))
        with pytest.raises(UserError):
            await first.reconfigure(bad)
        await first.reconfigure(good)
        await first.reconfigure(bad)
        await second.reconfigure(bad)
        replica: Any = second._replica
        assert replica.hot.limits.max_requests == 7
        assert "max_requests" in replica.refused

    asyncio.run(run())


def test_settings_that_cannot_be_had_leave_the_front_as_it_is() -> None:
    """Serve ends and starts anew whoever raises here; the replicas say why they refuse."""
    deployed: Any = SimpleNamespace(_limits=Limits(max_requests=7), _front=None)
    FrontDeployment.reconfigure(deployed, {"limits": {"max_requests": 0}})
    assert deployed._limits.max_requests == 7
    FrontDeployment.reconfigure(deployed, {"limits": {"max_requests": 8}})
    assert deployed._limits.max_requests == 8


def test_the_front_follows_its_file_of_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvd_ray.serving.app.KEYS_S", 0.01)
    path = tmp_path / "keys"
    path.write_text(f"alice {'a' * 20}\n")
    front: Any = SimpleNamespace(keys=load_keys(path))

    async def run() -> None:
        following = asyncio.create_task(FrontDeployment._follow(KeyFile(path), front))
        for text, names in (
            (f"bob {'b' * 20}\n", ["bob"]),
            ("bob short\n", ["bob"]),
            (f"carol {'c' * 21}\n", ["carol"]),
        ):
            path.write_text(text)
            await asyncio.sleep(0.1)
            assert [tenant for _, tenant in front.keys.tenant_of] == names
        following.cancel()

    asyncio.run(run())
