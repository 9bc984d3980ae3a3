"""Arguments of vLLM's engine and endpoints from our settings."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hvd_ray.errors import NotSupportedError, UserError
from hvd_ray.serving.calls import MODES, Mode
from hvd_ray.serving.settings import Limits, ServeConfig
from hvd_ray.shipped import shipped_folder
from hvd_ray.systems import head_folder
from hvd_ray.vllm_plugin.options import OWN_PAYOFF, POLICIES, SECTION

MAX_DRAFT = 32
"""The most tokens of one draft: vLLM's scheduler keeps room for them in every step."""
TOOL_PARSER = "hermes"
"""What many small models were trained to write: JSON between `<tool_call>` tags."""
_LIMITS_OF_THEIRS: Mapping[str, str] = MappingProxyType(
    {
        "max_running": "serving.vllm.max_num_seqs={}",
        "max_prompt_tokens": "serving.vllm.max_model_len, for prompt and answer together,",
        "max_output_tokens": "serving.vllm.override_generation_config.max_new_tokens={}",
    }
)
TEMPLATE = "tools.jinja"
"""A chat template that shows tools, for a model whose own one does not."""


def engine_arguments(config: ServeConfig) -> dict[str, Any]:
    """Arguments of vLLM's engine: our plugin drafts, unless `serving.vllm` says how it is to.

    Raises:
        UserError: a setting cannot be had with this engine.
    """
    refuse_limits(config.serving.limits)
    given = dict(config.serving.vllm)
    if "model" in given:
        raise UserError("serving.vllm.model: name the model with model=, at the top")
    arguments: dict[str, Any] = {
        "dtype": config.dtype,
        "enable_prefix_caching": True,
        "trust_remote_code": False,
        "load_format": "safetensors",
    }
    if not config.serving.gpus_per_replica:
        arguments |= {"enforce_eager": True}
    if not {"speculative_config", "additional_config"} & set(given):
        arguments |= _hybrid(config)
    arguments |= _tools(config, given) | given
    if arguments.get("speculative_config"):
        _refuse_processors(arguments)
        arguments.setdefault("per_request_spec_decode_metrics", "summary")
    return {name: value for name, value in arguments.items() if value is not None}


def refuse_limits(limits: Limits) -> None:
    """Refuse limits that only our own endpoints keep.

    Raises:
        NotSupportedError: one is given; says how vLLM has it.
    """
    for name, theirs in _LIMITS_OF_THEIRS.items():
        most = getattr(limits, name)
        if name in limits.model_fields_set and most is not None:
            raise NotSupportedError(
                f"serving.limits.{name} with vLLM; give {theirs.format(most)} instead"
            )


def _refuse_processors(arguments: Mapping[str, Any]) -> None:
    """Refuse what the rows of a draft would not go through.

    Raises:
        NotSupportedError: there are logits processors.
    """
    if arguments.get("logits_processors"):
        raise NotSupportedError(
            "serving.vllm.logits_processors together with drafts, which vLLM verifies without "
            "them; leave them out, or draft nothing with serving.vllm.speculative_config=null"
        )


def _hybrid(config: ServeConfig) -> dict[str, Any]:
    """The plugin's configuration for our settings; with the head that is at hand."""
    head_tokens = config.drafting.eagle3.num_tokens
    speculative: dict[str, Any] = {
        "method": "suffix",
        "num_speculative_tokens": max(MAX_DRAFT, head_tokens),
    }
    section: dict[str, Any] = {
        **_policy_options(config),
        "cache": config.drafting.suffix.model_dump(exclude_unset=True),
    }
    try:
        speculative |= {"method": "eagle3", "model": str(head_folder(config))}
        section["eagle3_tokens"] = head_tokens
    except UserError:
        if config.drafting.eagle3.head is not None:
            raise
    return {"speculative_config": speculative, "additional_config": {SECTION: section}}


def _policy_options(config: ServeConfig) -> dict[str, Any]:
    """Our policy under the plugin's name; `cost` where nobody named one."""
    policy = config.policy
    if "name" not in policy.model_fields_set:
        payoff = policy.predictor or _champion(config) or OWN_PAYOFF
        return {"policy": "cost", "payoff": payoff, **_costs(config)}
    name = next((ours for ours, system in POLICIES.items() if system == policy.name), None)
    if name is None:
        raise NotSupportedError(
            f"policy.name={policy.name} with vLLM; choose from {', '.join(POLICIES.values())}"
        )
    options: dict[str, Any] = {"policy": name}
    if name in ("cost", "tau"):
        options["payoff"] = policy.predictor
    if name == "cost":
        options |= _costs(config)
    if name == "tau":
        options["tau"] = policy.tau
    if name == "match":
        options["min_match"] = policy.min_match
    return options


def _costs(config: ServeConfig) -> dict[str, str]:
    """A table that was named; without one the plugin finds its own."""
    return {} if config.policy.costs is None else {"costs": str(config.policy.costs)}


def _champion(config: ServeConfig) -> str | None:
    try:
        return _resolved(config)
    except UserError:
        return None


def _resolved(config: ServeConfig) -> str:
    from hvd_ray.tracking import resolve_predictor

    return str(resolve_predictor(config=config))


def policy_notes(config: ServeConfig, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """What the plugin has to do without."""
    section = (arguments.get("additional_config") or {}).get(SECTION)
    if section is None or section.get("payoff") != OWN_PAYOFF:
        return ()
    try:
        _resolved(config)
    except UserError as error:
        return (f"by the cache's own probabilities, without a predictor: {error}",)
    return ()


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


def _tools(config: ServeConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """How tool calls are read and, where a model's own template knows none, asked for."""
    arguments: dict[str, Any] = {"tool_call_parser": TOOL_PARSER, **given}
    if arguments["tool_call_parser"] is None:
        return {}
    folder = shipped_folder(config.model, "chat")
    template = {"chat_template": str(folder / TEMPLATE)} if folder else {}
    return {"tool_call_parser": TOOL_PARSER, "enable_auto_tool_choice": True, **template}
