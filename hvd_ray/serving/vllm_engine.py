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
from hvd_ray.serving.calls import MODES, Failure, Mode, ReplicaFacts, ReplicaState
from hvd_ray.serving.relay import RelayCall, RelayEvent, relayed
from hvd_ray.serving.settings import HotSettings, ServeConfig, hot_settings

_log = logging.getLogger(__name__)


class VllmReplica:
    """vLLM's engine and endpoints in this process; `open` starts it."""

    def __init__(self, config: ServeConfig, hot: HotSettings, server: Any, app: Any) -> None:
        self._config, self._hot = config, hot
        self._server, self._app = server, app
        self._num_requests = 0
        self._refused: str | None = None
        self._is_alive = True
        length: int = server.engine._engine_client.model_config.max_model_len
        root = resolve_model(config.model).path_or_id
        self.facts = ReplicaFacts(
            model=config.served_name,
            root=root,
            engine="vllm",
            dtype=config.dtype,
            context_length=length,
            modes=_modes(config),
        )

    @classmethod
    async def open(cls, config: ServeConfig, hot: HotSettings) -> VllmReplica:
        """Start the engine; takes half a minute and more."""
        _set_environment()
        from ray.llm._internal.serve.core.server.llm_server import LLMServer

        server = LLMServer.sync_init(_llm_config(config))
        await server.start()
        return cls(config, hot, server, await server.__serve_build_asgi_app__())

    async def relay(self, call: RelayCall) -> AsyncGenerator[RelayEvent | Failure, None]:
        """vLLM's answer as it comes; above capacity a refusal at once."""
        limit = self._hot.limits.max_requests
        if call.method == "POST" and self._num_requests >= limit:
            yield Failure("busy", f"this replica is full ({limit} requests); try again later")
            return
        self._num_requests += 1
        try:
            async with aclosing(relayed(self._app, call)) as events:
                async for event in events:
                    yield event
        finally:
            self._num_requests -= 1

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
            is_alive=self._is_alive,
            num_running=self._num_requests,
            policy=_policy(self._config),
            refused=self._refused,
        )

    async def check_health(self) -> None:
        """Raises where the engine has died."""
        try:
            await self._server.check_health()
        except BaseException:
            self._is_alive = False
            raise

    async def reconfigure(self, tree: dict[str, Any]) -> bool:
        """Limits change; the policy is the engine's for its life."""
        try:
            hot = hot_settings(tree)
        except UserError as error:
            self._refused = str(error)
            return False
        if hot.policy != self._hot.policy:
            self._refused = "policy: fixed for the life of a vLLM engine; only limits can change"
            _log.error("settings refused, the old ones stay: %s", self._refused)
            return False
        self._hot, self._refused = hot, None
        return True


def has_plugin(config: ServeConfig) -> bool:
    """Whether the engine drafts with our plugin, which reads what a request asks for."""
    return "hvd" in (config.serving.vllm.get("additional_config") or {})


def _modes(config: ServeConfig) -> tuple[Mode, ...]:
    """vLLM's own drafters cannot be chosen for a request."""
    if not has_plugin(config):
        return ("auto",)
    speculative = config.serving.vllm.get("speculative_config") or {}
    is_headed = speculative.get("method") == "eagle3"
    return MODES if is_headed else tuple(mode for mode in MODES if mode != "eagle3")


def _policy(config: ServeConfig) -> str:
    if has_plugin(config):
        return f"hvd {config.serving.vllm['additional_config']['hvd'].get('policy', 'cost')}"
    speculative = config.serving.vllm.get("speculative_config", {"method": "suffix"})
    return f"vLLM {speculative['method']}" if speculative else "greedy"


def _llm_config(config: ServeConfig) -> Any:
    """Ray Serve LLM's configuration; what `serving.vllm` says wins."""
    from ray.serve.llm import LLMConfig

    given = dict(config.serving.vllm)
    if "model" in given:
        raise UserError("serving.vllm.model: name the model with model=, at the top")
    kwargs: dict[str, Any] = {
        "dtype": config.dtype,
        "speculative_config": _suffix_config(config),
        "per_request_spec_decode_metrics": "summary",
        "enable_prefix_caching": True,
        **given,
    }
    if not kwargs["speculative_config"]:
        del kwargs["speculative_config"], kwargs["per_request_spec_decode_metrics"]
    if not config.serving.gpus_per_replica:
        kwargs.setdefault("distributed_executor_backend", "uni")
        kwargs.setdefault("enforce_eager", True)
    return LLMConfig(
        model_loading_config={
            "model_id": config.served_name,
            "model_source": resolve_model(config.model).path_or_id,
        },
        engine_kwargs=kwargs,
        accelerator_type=None,
        placement_group_config={"bundles": [{"CPU": 1}]},
        log_engine_metrics=False,
    )


def _suffix_config(config: ServeConfig) -> dict[str, Any]:
    """vLLM's own suffix decoding with our settings of the cache."""
    suffix = config.drafting.suffix
    return {
        "method": "suffix",
        "num_speculative_tokens": suffix.max_draft_tokens,
        "suffix_decoding_max_tree_depth": suffix.max_tree_depth,
        "suffix_decoding_max_spec_factor": suffix.max_spec_factor,
        "suffix_decoding_min_token_prob": suffix.min_token_prob,
    }


def _set_environment() -> None:
    """vLLM uses one of two cores unless told otherwise; the caller's settings win."""
    cores = sorted(os.sched_getaffinity(0))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}-{cores[-1]}")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
