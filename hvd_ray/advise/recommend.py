"""The advice as something to type: vLLM's JSON options and a Serve YAML."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import yaml

from hvd_ray.advise.contestants import WITH_HEAD
from hvd_ray.advise.verdict import WorkloadVerdict
from hvd_ray.config import Config

HEAD = "HEAD_FOLDER"
PREDICTOR = "PREDICTOR_FOLDER"
"""Stand in a configuration for what the advice cannot know."""
_PLUGIN_POLICIES = {
    "hvd_cost": "cost",
    "hvd_tau": "tau",
    "rule_score": "score",
    "rule_match": "match",
}
MODEL = "MODEL"


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What to turn on; empty configurations where it is advised to turn nothing on."""

    system: str | None
    speculative_config: Mapping[str, Any] | None
    additional_config: Mapping[str, Any] | None
    vllm_command: str
    serve_yaml: str
    placeholders: tuple[str, ...]
    """Words that stand for what only the reader knows."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Setting:
    """What a recommendation is made from besides the system."""

    config: Config
    model: str | None
    """The target, where the log or the caller names one that can be served."""
    predictor: str | None
    costs: str | None
    max_cached_tokens: int
    mean_output_tokens: float
    head_tokens: int


def recommend(advised: WorkloadVerdict, setting: Setting) -> Recommendation:
    """The configuration of the advised system."""
    model = setting.model or MODEL
    if advised.kind in ("will not help", "too short to say"):
        command = f"vllm serve {shlex.quote(model)}"
        plain = _serve_yaml(model, {"name": "greedy"}, {}, setting)
        return Recommendation(None, None, None, command, plain, _placeholders(command, plain))
    name, uses_head = advised.system.removesuffix(WITH_HEAD), advised.system.endswith(WITH_HEAD)
    speculative = _speculative(name, setting, uses_head=uses_head or name == "eagle3")
    additional = _additional(name, setting, uses_head=uses_head)
    command = f"vllm serve {shlex.quote(model)} --speculative-config {_quoted(speculative)}"
    if additional is not None:
        command += f" --additional-config {_quoted(additional)}"
    serve = _serve_yaml(model, _policy(name, setting), _drafting(name, setting), setting)
    words = _placeholders(command, serve)
    return Recommendation(advised.system, speculative, additional, command, serve, words)


def _speculative(name: str, setting: Setting, *, uses_head: bool) -> dict[str, Any]:
    drafting = setting.config.drafting
    if name == "ngram":
        return {
            "method": "ngram",
            "num_speculative_tokens": drafting.ngram.max_draft_tokens,
            "prompt_lookup_min": drafting.ngram.min_match,
            "prompt_lookup_max": drafting.ngram.max_match,
        }
    if name == "eagle3":
        return {"method": "eagle3", "model": HEAD, "num_speculative_tokens": setting.head_tokens}
    if uses_head:
        return {
            "method": "eagle3",
            "model": HEAD,
            "num_speculative_tokens": 32,
            "disable_padded_drafter_batch": True,
        }
    suffix = drafting.suffix
    return {
        "method": "suffix",
        "num_speculative_tokens": min(32, suffix.max_draft_tokens),
        "suffix_decoding_max_tree_depth": suffix.max_tree_depth,
        "suffix_decoding_max_cached_requests": _cached_requests(setting),
        "suffix_decoding_max_spec_factor": suffix.rule_spec_factor,
        "suffix_decoding_min_token_prob": suffix.min_token_prob,
    }


def _cached_requests(setting: Setting) -> int:
    """vLLM counts outputs where we count their tokens."""
    return max(1, round(setting.max_cached_tokens / max(1.0, setting.mean_output_tokens)))


def _additional(name: str, setting: Setting, *, uses_head: bool) -> dict[str, Any] | None:
    """The plugin's section; nothing where vLLM does without us."""
    if name not in _PLUGIN_POLICIES:
        return None
    section: dict[str, Any] = {"policy": _PLUGIN_POLICIES[name]}
    if uses_head:
        section["eagle3_tokens"] = setting.head_tokens
    if name in ("hvd_cost", "hvd_tau"):
        section["payoff"] = setting.predictor or PREDICTOR
    if name == "hvd_tau":
        section["tau"] = setting.config.policy.tau
    if name == "rule_match":
        section["min_match"] = setting.config.policy.min_match
    section["cache"] = {"max_cached_tokens": setting.max_cached_tokens}
    return {"hvd": section}


def _policy(name: str, setting: Setting) -> dict[str, Any]:
    policy: dict[str, Any] = {"name": name}
    if name in ("hvd_cost", "hvd_tau"):
        policy["predictor"] = setting.predictor or PREDICTOR
    if name == "hvd_tau":
        policy["tau"] = setting.config.policy.tau
    if name == "hvd_cost" and setting.costs is not None:
        policy["costs"] = setting.costs
    return policy


def _drafting(name: str, setting: Setting) -> dict[str, Any]:
    if name in ("ngram", "eagle3"):
        return {}
    return {"suffix": {"max_cached_tokens": setting.max_cached_tokens}}


def _serve_yaml(
    model: str, policy: Mapping[str, Any], drafting: Mapping[str, Any], setting: Setting
) -> str:
    arguments: dict[str, Any] = {"model": model, "dtype": setting.config.dtype, "policy": policy}
    if drafting:
        arguments["drafting"] = drafting
    arguments["serving"] = {"engine": "torch", "replicas": 1}
    application = {
        "name": "hvd",
        "route_prefix": "/",
        "import_path": "hvd_ray.serving.app:build",
        "args": arguments,
    }
    text: str = yaml.safe_dump({"applications": [application]}, sort_keys=False)
    return text


def _quoted(tree: Mapping[str, Any]) -> str:
    return shlex.quote(json.dumps(tree))


def _placeholders(*texts: str) -> tuple[str, ...]:
    found = [word for word in (MODEL, HEAD, PREDICTOR) if any(_has(text, word) for text in texts)]
    return tuple(found)


def _has(text: str, word: str) -> bool:
    return word in text.replace("_", " ").split() or f'"{word}"' in text or f" {word}\n" in text
