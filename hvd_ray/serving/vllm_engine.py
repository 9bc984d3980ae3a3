"""A replica on vLLM: Ray Serve LLM's server starts the engine, vLLM's own endpoints answer.

Everything of vLLM's and Ray Serve LLM's that serving touches stands in this file.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from hvd_ray.errors import NotSupportedError, UserError
from hvd_ray.fetch import resolve_model
from hvd_ray.serving.calls import MODES, Failure, Mode, ReplicaFacts, ReplicaState
from hvd_ray.serving.relay import RelayCall, RelayEvent, relayed
from hvd_ray.serving.settings import HotSettings, ServeConfig, hot_settings
from hvd_ray.systems import head_folder
from hvd_ray.vllm_plugin.options import OWN_PAYOFF, POLICIES, SECTION

_log = logging.getLogger(__name__)
MAX_DRAFT = 32
"""The most tokens of one draft: vLLM's scheduler keeps room for them in every step."""


class VllmReplica:
    """vLLM's engine and endpoints in this process; `open` starts it."""

    def __init__(self, config: ServeConfig, hot: HotSettings, server: Any, app: Any) -> None:
        self._arguments, self._hot = engine_arguments(config), hot
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
            modes=served_modes(self._arguments),
        )

    @classmethod
    async def open(cls, config: ServeConfig, hot: HotSettings) -> VllmReplica:
        """Start the engine; takes half a minute and more."""
        _set_environment()
        config = config.model_copy(update={"policy": hot.policy})
        from ray.llm._internal.serve.core.server.llm_server import LLMServer

        server = LLMServer.sync_init(_llm_config(config, engine_arguments(config)))
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
            policy=policy_name(self._arguments),
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


def engine_arguments(config: ServeConfig) -> dict[str, Any]:
    """Arguments of vLLM's engine: our plugin drafts, unless `serving.vllm` says how it is to.

    Raises:
        UserError: a setting cannot be had with this engine.
    """
    given = dict(config.serving.vllm)
    if "model" in given:
        raise UserError("serving.vllm.model: name the model with model=, at the top")
    arguments: dict[str, Any] = {"dtype": config.dtype, "enable_prefix_caching": True}
    if not config.serving.gpus_per_replica:
        arguments |= {"distributed_executor_backend": "uni", "enforce_eager": True}
    if not {"speculative_config", "additional_config"} & set(given):
        arguments |= _hybrid(config)
    arguments |= given
    if arguments.get("speculative_config"):
        arguments.setdefault("per_request_spec_decode_metrics", "summary")
    return {name: value for name, value in arguments.items() if value is not None}


def _hybrid(config: ServeConfig) -> dict[str, Any]:
    """The plugin's configuration for our settings; with the head that is at hand."""
    speculative: dict[str, Any] = {"method": "suffix", "num_speculative_tokens": MAX_DRAFT}
    try:
        speculative |= {"method": "eagle3", "model": str(head_folder(config))}
    except UserError:
        if config.drafting.eagle3.head is not None:
            raise
    section: dict[str, Any] = {
        **_policy_options(config),
        "cache": config.drafting.suffix.model_dump(exclude_unset=True),
        "eagle3_tokens": config.drafting.eagle3.num_tokens,
    }
    return {"speculative_config": speculative, "additional_config": {SECTION: section}}


def _policy_options(config: ServeConfig) -> dict[str, Any]:
    """Our policy under the plugin's name; `cost` where nobody named one."""
    policy = config.policy
    if "name" not in policy.model_fields_set:
        return {"policy": "cost", "payoff": policy.predictor or _champion(config) or OWN_PAYOFF}
    name = next((ours for ours, system in POLICIES.items() if system == policy.name), None)
    if name is None:
        raise NotSupportedError(
            f"policy.name={policy.name} with vLLM; choose from {', '.join(POLICIES.values())}"
        )
    options: dict[str, Any] = {"policy": name}
    if name in ("cost", "tau"):
        options["payoff"] = policy.predictor
    if name == "tau":
        options["tau"] = policy.tau
    if name == "match":
        options["min_match"] = policy.min_match
    return options


def _champion(config: ServeConfig) -> str | None:
    from hvd_ray.tracking import resolve_predictor

    try:
        return str(resolve_predictor(config=config))
    except UserError:
        return None


def has_plugin(arguments: Mapping[str, Any]) -> bool:
    """Whether the engine drafts with our plugin, which reads what a request asks for."""
    return SECTION in (arguments.get("additional_config") or {})


def served_modes(arguments: Mapping[str, Any]) -> tuple[Mode, ...]:
    """vLLM's own drafters cannot be chosen for a request."""
    if not has_plugin(arguments):
        return ("auto",)
    has_head = arguments["speculative_config"].get("method") == "eagle3"
    return MODES if has_head else tuple(mode for mode in MODES if mode != "eagle3")


def policy_name(arguments: Mapping[str, Any]) -> str:
    """What drafts, in two words."""
    if has_plugin(arguments):
        return f"hvd {arguments['additional_config'][SECTION].get('policy', 'cost')}"
    speculative = arguments.get("speculative_config")
    return f"vLLM {speculative['method']}" if speculative else "greedy"


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


def _set_environment() -> None:
    """vLLM uses one of two cores unless told otherwise; the caller's settings win."""
    cores = sorted(os.sched_getaffinity(0))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}-{cores[-1]}")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_PLUGINS", "hvd_ray")  # others may be made for other versions
