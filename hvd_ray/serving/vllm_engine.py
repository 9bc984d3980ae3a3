"""A replica on vLLM: Ray Serve LLM's server starts the engine, vLLM's own endpoints answer.

Everything of vLLM's and Ray Serve LLM's that serving touches stands in this file.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from hvd_ray.errors import UserError
from hvd_ray.fetch import resolve_model
from hvd_ray.serving.calls import Failure, ReplicaFacts, ReplicaState
from hvd_ray.serving.carrier import Carriers, Load
from hvd_ray.serving.relay import RelayCall, RelayEvent, RelayHead, body_of, relayed
from hvd_ray.serving.settings import HotSettings, ServeConfig, hot_settings, num_shared_cores
from hvd_ray.serving.vllm_arguments import (
    engine_arguments,
    policy_name,
    policy_notes,
    refuse_limits,
    served_modes,
)

_log = logging.getLogger(__name__)
MOST_PARTS_PER_S = 1000.0
"""Of all streams without a carrier; each costs every process on its way a millisecond."""
MOST_GAP_S = 0.1


class VllmReplica:
    """vLLM's engine and endpoints in this process; `open` starts it."""

    def __init__(self, config: ServeConfig, hot: HotSettings, server: Any, app: Any) -> None:
        self._arguments, self._hot = engine_arguments(config), hot
        self._notes = policy_notes(config, self._arguments)
        self._server, self._app = server, app
        self._num_requests = 0
        self._carriers = Carriers()
        self._refused: str | None = None
        length: int = server.engine._engine_client.model_config.max_model_len
        root = resolve_model(config.model).path_or_id
        self.facts = ReplicaFacts(
            model=config.served_name,
            root=root,
            engine="vllm",
            dtype=config.dtype,
            context_length=length,
            modes=served_modes(self._arguments),
        )

    @classmethod
    async def open(cls, config: ServeConfig, hot: HotSettings) -> VllmReplica:
        """Start the engine; takes half a minute and more."""
        refuse_limits(hot.limits)
        set_environment(config)
        config = config.model_copy(update={"policy": hot.policy})
        server = _server(config)
        await server.start()
        return cls(config, hot, server, await server.__serve_build_asgi_app__())

    @property
    def _is_dead(self) -> bool:
        """Whether the process with the model has ended; vLLM knows at once."""
        return bool(self._server.engine._engine_client.errored)

    async def relay(self, call: RelayCall) -> AsyncGenerator[RelayEvent | Failure, None]:
        """vLLM's answer as it comes; above capacity, or without an engine, a refusal at once."""
        limit = self._hot.limits.max_requests
        if call.method == "POST" and self._num_requests >= limit:
            yield Failure("busy", f"this replica is full ({limit} requests); try again later")
            return
        if self._is_dead:  # vLLM itself would answer 500
            message = "vLLM's engine has ended; another one is being started, try again later"
            yield Failure("dead", message, code="engine_dead", retry_after_s=30.0)
            return
        self._num_requests += 1
        try:
            async with aclosing(self._answer(call)) as events:
                async for event in events:
                    yield event
        finally:
            self._num_requests -= 1

    async def _answer(self, call: RelayCall) -> AsyncGenerator[RelayEvent | Failure, None]:
        """What goes the call's own way; a carrier takes the rest."""

        def gap_s() -> float:
            return 0.0 if call in self._carriers else self._gap_s()

        async with (
            aclosing(relayed(self._app, call, gap_s=gap_s)) as events,
            aclosing(self._carriers.carried(call, events)) as kept,
        ):
            async for event in kept:
                yield event

    async def carry(self, front: str, name: str) -> AsyncGenerator[Load, None]:
        """What this replica's calls say to a front, together (`carrier.py`)."""
        async with aclosing(self._carriers.loads(front, name)) as loads:
            async for load in loads:
                yield load

    def _gap_s(self) -> float:
        """Between the parts of one stream, so that all streams together stay below a rate."""
        return min(self._num_requests / MOST_PARTS_PER_S, MOST_GAP_S)

    async def exposition(self) -> str:
        """vLLM's own figures and the plugin's as Prometheus reads them; empty where it has none."""
        async with aclosing(relayed(self._app, RelayCall("GET", "/metrics", {}))) as events:
            found = [event async for event in events]
        head = found[0]
        if not isinstance(head, RelayHead) or head.status != 200:
            return ""
        return body_of(found).decode()

    async def fields(self) -> Mapping[str, frozenset[str]]:
        """The fields of vLLM's request bodies."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
        from vllm.entrypoints.serve.tokenize import protocol as tokens

        return {
            "/v1/completions": frozenset(CompletionRequest.model_fields),
            "/v1/chat/completions": frozenset(ChatCompletionRequest.model_fields),
            "/tokenize": frozenset(tokens.TokenizeCompletionRequest.model_fields)
            | frozenset(tokens.TokenizeChatRequest.model_fields),
            "/detokenize": frozenset(tokens.DetokenizeRequest.model_fields),
        }

    async def state(self) -> ReplicaState:
        return ReplicaState(
            self.facts,
            is_alive=not self._is_dead,
            num_running=self._num_requests,
            policy=policy_name(self._arguments),
            notes=self._notes,
            refused=self._refused,
        )

    async def check_health(self) -> None:
        """Raises where the engine has died."""
        await self._server.check_health()

    async def reconfigure(self, tree: dict[str, Any]) -> bool:
        """Limits change; the policy is the engine's for its life."""
        try:
            hot = hot_settings(tree)
            refuse_limits(hot.limits)
        except UserError as error:
            self.refuse(error)
            return False
        if hot.policy != self._hot.policy:
            self.refuse(
                UserError("policy: fixed for the life of a vLLM engine; only limits change")
            )
            return False
        self._hot, self._refused = hot, None
        return True

    def refuse(self, error: UserError) -> None:
        """Note that the latest settings do not hold, and why."""
        self._refused = str(error)
        _log.error("settings refused, the old ones stay: %s", error)


def _llm_config(config: ServeConfig, arguments: Mapping[str, Any]) -> Any:
    """Ray Serve LLM's configuration."""
    from ray.serve.llm import LLMConfig

    return LLMConfig(
        model_loading_config={
            "model_id": config.served_name,
            "model_source": resolve_model(config.model).path_or_id,
        },
        engine_kwargs=dict(arguments),
        accelerator_type=None,
        placement_group_config={"bundles": [{"CPU": 1}]},
        log_engine_metrics=False,
    )


def _server(config: ServeConfig) -> Any:
    """Ray Serve LLM's server, without what costs half of its start on a small machine."""
    from ray.llm._internal.serve.core.server.llm_server import LLMServer
    from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine

    class Engine(VLLMEngine):  # type: ignore[misc]
        def _prepare_engine_config(self, callback_ctx: Any) -> Any:
            """Theirs has the model in a process of its own; beside the scheduler, as in vLLM by
            default, it saves an import of vLLM and a queue, and the plugin's figures of each
            request reach it (`vllm_plugin/request_counts.py`)."""
            *arguments, vllm_config = super()._prepare_engine_config(callback_ctx)
            use_one_process(vllm_config.parallel_config)
            return *arguments, vllm_config

    class Server(LLMServer):  # type: ignore[misc]
        async def _start_engine(self) -> None:
            """Theirs also starts an actor that reports what was deployed."""
            await self.engine.start()

    llm_config = _llm_config(config, engine_arguments(config))
    if resolve_model(config.model).is_local:  # nothing to download in a process of its own
        llm_config.get_or_create_callback().ctx.run_init_node = False
    return Server.sync_init(llm_config, engine_cls=Engine)


def use_one_process(parallel: Any) -> None:
    """Scheduler and worker in one, where there is one worker; several are vLLM's own processes
    and share the GPUs that Ray gave to the replica."""
    if parallel.world_size == 1:
        parallel.distributed_executor_backend = "uni"


def set_environment(config: ServeConfig) -> None:
    """For vLLM's own processes; the caller's settings win, but for the threads: Ray sets one."""
    if not config.serving.gpus_per_replica:
        os.environ["OMP_NUM_THREADS"] = str(config.num_threads or num_shared_cores(config))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_PLUGINS", "hvd_ray")  # others may be made for other versions
