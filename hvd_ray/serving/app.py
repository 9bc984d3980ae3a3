"""The front and its replicas as deployments of Ray Serve, thin adapters both.

`build` makes the application: `serve run hvd_ray.serving.app:build policy.name=suffix`, or a YAML
of Serve's with `import_path: hvd_ray.serving.app:build` and the settings under `args`.
"""

# No `from __future__ import annotations` here: Serve reads `build`'s annotation as a class.

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import ray
from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.exceptions import TaskCancelledError
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hvd_ray.config import read_settings
from hvd_ray.errors import UserError
from hvd_ray.serving.auth import KeyFile, load_keys
from hvd_ray.serving.calls import Call, Event, Failure, Prompt, ReplicaState
from hvd_ray.serving.carrier import Load
from hvd_ray.serving.front import Front
from hvd_ray.serving.handle import HandleBackend
from hvd_ray.serving.kept import KeptSettings
from hvd_ray.serving.listener import VARIABLE as LISTENER
from hvd_ray.serving.listener import Answering, borrowed
from hvd_ray.serving.ray_metrics import mirror_for_ever
from hvd_ray.serving.relay import RelayCall, RelayEvent
from hvd_ray.serving.replica import Replica
from hvd_ray.serving.settings import (
    FRONT,
    MOST_REQUESTS,
    REPLICA,
    ServeConfig,
    hot_settings,
    serve_config,
)

if TYPE_CHECKING:
    from hvd_ray.serving.vllm_engine import VllmReplica

ROUTER = "hvd_ray.serving.ring.SessionRouter"
ONGOING_REQUESTS = 2 * MOST_REQUESTS
"""More than any replica takes: the replicas, whose limit may change, say when it is too much."""
QUEUED_REQUESTS = 1024
"""That come together, or while no replica is there, and wait to be dealt out."""
KEYS_S = 2.0
"""Between looks at the file of keys."""
HEAD = "node:__internal_head__"
"""Ray's resource of the head: a worker node that is lost never takes the one front with it."""

_log = logging.getLogger(__name__)


class BuildArgs(BaseModel):
    """What `build` takes: the settings of `hvd serve`, nested or as `section.key`."""

    model_config = ConfigDict(extra="allow")

    def config(self) -> ServeConfig:
        """The settings, validated.

        Raises:
            UserError: a key is unknown or a value out of range.
        """
        given = self.model_extra or {}
        words = [f"{key}={value}" for key, value in given.items() if isinstance(value, str)]
        tree = {key: value for key, value in given.items() if not isinstance(value, str)}
        for word in words:
            _merge(tree, read_settings(None, [word]))
        return serve_config(tree)


def _merge(tree: dict[str, Any], other: dict[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = value


class LeavingIsNoFault:
    """Turns what Serve raises where a client has left into what ASGI says of it.

    Its proxy cancels the call, and whoever waits to hear of the client gets an exception.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def heard() -> Message:
            try:
                return await receive()
            except TaskCancelledError:
                return {"type": "http.disconnect"}

        await self._app(scope, heard, send)


class ReplicaDeployment:
    """A `Replica` in a process of its own."""

    def __init__(self, tree: dict[str, Any]) -> None:
        _log_as_serve_does()
        self._config = serve_config(tree)
        self._replica: Replica | None = None

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve calls it once before the first request, and when `user_config` has changed."""
        kept = _kept(self._config)
        if self._replica is None:
            from hvd_ray.serving.opening import load_stage, open_replica

            stage = load_stage(self._config)
            self._replica = open_replica(self._config, stage, user_config, kept)
            self._replica.poll_every(self._config.serving.poll_s)
        elif await self._replica.reconfigure(user_config):
            kept.keep(user_config)

    async def serve(self, call: Call) -> AsyncIterator[tuple[Event, ...]]:
        async with aclosing(self._served.serve(call)) as batches:
            async for batch in batches:
                yield batch

    async def state(self) -> ReplicaState:
        return await self._served.state()

    async def tokenize(self, prompt: Prompt) -> tuple[tuple[int, ...], tuple[str, ...]] | Failure:
        return await self._served.tokenize(prompt)

    async def detokenize(self, token_ids: tuple[int, ...]) -> str | Failure:
        return await self._served.detokenize(token_ids)

    def check_health(self) -> None:
        """Serve replaces a replica whose check fails."""
        if self._replica is not None and not self._replica.is_healthy:
            raise RuntimeError("the decoding thread has stopped or hangs")

    @property
    def _served(self) -> Replica:
        assert self._replica is not None, "Serve reconfigures a replica before its first request"
        return self._replica


class VllmDeployment:
    """A `VllmReplica` in a process of its own."""

    def __init__(self, tree: dict[str, Any]) -> None:
        _log_as_serve_does()
        self._config = serve_config(tree)
        self._replica: VllmReplica | None = None

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve calls it once before the first request, and when `user_config` has changed."""
        kept = _kept(self._config)
        if self._replica is None:
            self._replica = await self._opened(user_config, kept)
        elif await self._replica.reconfigure(user_config):
            kept.keep(user_config)

    async def _opened(self, user_config: dict[str, Any], kept: KeptSettings) -> "VllmReplica":
        """A replica with these settings or, where they cannot be had, those that held last."""
        from hvd_ray.serving.vllm_engine import VllmReplica

        try:
            replica = await VllmReplica.open(self._config, hot_settings(user_config))
        except UserError as error:
            last = kept.last()
            if last is None:
                raise
            replica = await VllmReplica.open(self._config, hot_settings(last))
            replica.refuse(error)
        else:
            kept.keep(user_config)
        return replica

    async def relay(self, call: RelayCall) -> AsyncIterator[RelayEvent | Failure]:
        async with aclosing(self._served.relay(call)) as events:
            async for event in events:
                yield event

    async def carry(self, front: str, name: str) -> AsyncIterator[Load]:
        async with aclosing(self._served.carry(front, name)) as loads:
            async for load in loads:
                yield load

    async def state(self) -> ReplicaState:
        return await self._served.state()

    async def fields(self) -> Mapping[str, frozenset[str]]:
        return await self._served.fields()

    async def exposition(self) -> tuple[str, str]:
        """This replica's name and its figures."""
        return serve.get_replica_context().replica_id.unique_id, await self._served.exposition()

    async def check_health(self) -> None:
        """Serve replaces a replica whose check fails."""
        if self._replica is not None:
            await self._replica.check_health()

    @property
    def _served(self) -> "VllmReplica":
        assert self._replica is not None, "Serve reconfigures a replica before its first request"
        return self._replica


@serve.ingress()
class FrontDeployment:
    """A `Front` over the replicas' handle."""

    def __init__(self, tree: dict[str, Any], replicas: DeploymentHandle) -> None:
        _log_as_serve_does()
        self._config = serve_config(tree)
        self._backend = HandleBackend(replicas)
        path = self._config.serving.api_keys
        self._key_file = None if path is None else KeyFile(path)
        self._keys = load_keys(path)
        self._limits = self._config.serving.limits
        self._front: Front | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._answering: Answering | None = None

    async def __serve_build_asgi_app__(self) -> Starlette:
        self._front = await self._open_front()
        self._tasks = [asyncio.create_task(mirror_for_ever(self._front))]
        if self._key_file is not None:
            self._tasks.append(asyncio.create_task(self._follow(self._key_file, self._front)))
        app = self._front.app()
        app.add_middleware(LeavingIsNoFault)
        if LISTENER in os.environ:
            listening = borrowed(os.environ[LISTENER])
            self._answering = Answering(app, listening, drain_s=self._config.serving.drain_s)
        return app

    async def __del__(self) -> None:
        """Serve awaits it before it ends the process; of what came past its proxy it knows none."""
        if self._answering is not None:
            await self._answering.end()

    @staticmethod
    async def _follow(key_file: KeyFile, front: Front) -> None:
        """Take a changed file of keys on; one that holds none or is damaged changes nothing."""
        while True:
            await asyncio.sleep(KEYS_S)
            try:
                front.keys = key_file.changed() or front.keys
            except UserError as error:
                _log.error("refused, the keys before stay: %s", error)

    async def _open_front(self) -> Front:
        facts = (await self._backend.first_state()).facts
        if facts.engine != "vllm":
            return Front(self._backend, facts, self._keys, self._limits)
        from hvd_ray.serving.relay_front import RelayFront

        return RelayFront(
            self._backend,
            facts,
            self._keys,
            self._limits,
            fields=await self._backend.fields(),
            has_plugin=len(facts.modes) > 1,
        )

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Limits; what the replicas refuse is theirs to tell, and would end the one front here."""
        try:
            self._limits = hot_settings(user_config).limits
        except UserError as error:
            _log.error("refused, the limits before stay: %s", error)
            return
        if self._front is not None:
            self._front.limits = self._limits

    async def finish(self) -> None:
        """Take nothing on any more; returns when everything that came before has its answer."""
        if self._front is not None:
            await self._front.gate.close()


def build(args: BuildArgs) -> serve.Application:
    """The application of these settings.

    Raises:
        UserError: a setting is unknown or out of range.
    """
    return application(args.config())


def application(config: ServeConfig) -> serve.Application:
    """A front over replicas."""
    tree = config.lasting
    serving = config.serving
    scale: dict[str, Any] = {"num_replicas": serving.replicas}
    if serving.autoscaling is not None:
        scale = {
            "autoscaling_config": {
                "min_replicas": serving.autoscaling.min_replicas,
                "max_replicas": serving.autoscaling.max_replicas,
                "target_ongoing_requests": serving.autoscaling.target_requests,
            }
        }
    replica = serve.deployment(
        name=REPLICA,
        ray_actor_options={
            "num_cpus": serving.cpus_per_replica,
            "num_gpus": serving.gpus_per_replica,
        },
        max_ongoing_requests=ONGOING_REQUESTS,
        max_queued_requests=QUEUED_REQUESTS,
        user_config=config.hot,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        graceful_shutdown_timeout_s=serving.drain_s,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=5.0,
        health_check_timeout_s=30.0,
        **scale,
    )(VllmDeployment if serving.engine == "vllm" else ReplicaDeployment)
    front = serve.deployment(
        name=FRONT,
        ray_actor_options={"num_cpus": 0, "resources": {HEAD: 0.001}},
        max_ongoing_requests=ONGOING_REQUESTS,
        user_config=config.hot,
        graceful_shutdown_timeout_s=serving.drain_s,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=5.0,
    )(FrontDeployment)
    return front.bind(tree, replica.bind(tree))


def _kept(config: ServeConfig) -> KeptSettings:
    session = ray.get_runtime_context().get_session_name()
    return KeptSettings.of(session, serve.get_replica_context().app_name, config.lasting)


def _log_as_serve_does() -> None:
    """Into the files of Serve's own log, with its request ids."""
    ours, serves = logging.getLogger("hvd_ray"), logging.getLogger("ray.serve")
    ours.handlers = list(serves.handlers)
    ours.setLevel(os.environ.get("HVD_LOG_LEVEL", "INFO"))
    ours.propagate = False
