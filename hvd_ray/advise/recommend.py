"""The advice as something to type: vLLM's JSON options and a Serve YAML."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
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


MAX_DRAFT = 32
"""The most tokens of one draft in vLLM: its scheduler keeps room for them in every step."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What to turn on; empty configurations where it is advised to turn nothing on.

    Without a command too the log did not say enough to advise anything.
    """

    system: str | None
    speculative_config: Mapping[str, Any] | None
    additional_config: Mapping[str, Any] | None
    vllm_command: str
    serve_yaml: str
    placeholders: tuple[str, ...]
    """Words that stand for what only the reader knows."""

    @property
    def is_known(self) -> bool:
        """Whether anything is advised."""
        return bool(self.vllm_command)

    @property
    def in_words(self) -> str:
        if not self.is_known:
            return "none, the log is too short to say; give a longer one"
        return self.system or "turn nothing on"

    @property
    def needs_calibration(self) -> bool:
        """Whether Ray Serve would look for a cost table that the advice cannot name."""
        is_by_cost = self.system is not None and self.system.startswith("hvd_cost")
        return is_by_cost and "costs:" not in self.serve_yaml

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


UNKNOWN = Recommendation(None, None, None, "", "", ())


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
    """The configuration of the advised system; none where the log does not tell."""
    if advised.kind == "too short to say" or advised.is_unproven:
        return UNKNOWN
    model = setting.model or MODEL
    if advised.kind == "will not help":
        command = f"vllm serve {shlex.quote(model)}"
        plain = _serve_yaml(model, {"name": "greedy"}, {}, setting)
        return Recommendation(None, None, None, command, plain, _placeholders(command, plain))
    name, uses_head = advised.system.removesuffix(WITH_HEAD), advised.system.endswith(WITH_HEAD)
    speculative = _speculative(name, setting, uses_head=uses_head or name == "eagle3")
    additional = _additional(name, setting, uses_head=uses_head)
    command = f"vllm serve {shlex.quote(model)} --speculative-config {_quoted(speculative)}"
    if additional is not None:
        command += f" --additional-config {_quoted(additional)}"
    drafting = _drafting(name, setting, uses_head=uses_head or name == "eagle3")
    serve = _serve_yaml(model, _policy(name, setting), drafting, setting)
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
            "num_speculative_tokens": MAX_DRAFT,
            "disable_padded_drafter_batch": True,
        }
    suffix = drafting.suffix
    longest = {
        "method": "suffix",
        "num_speculative_tokens": min(MAX_DRAFT, suffix.max_draft_tokens),
    }
    if name in _PLUGIN_POLICIES:
        return longest  # the rest is vLLM's own cache's, and the plugin has its own
    return {
        **longest,
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
    section["cache"] = _cache(setting)
    return {"hvd": section}


def _cache(setting: Setting) -> dict[str, Any]:
    """The cache as it was replayed, with the cap that was found to be enough."""
    changed = setting.config.drafting.suffix.model_dump(exclude_defaults=True)
    return {**changed, "max_cached_tokens": setting.max_cached_tokens}


def _policy(name: str, setting: Setting) -> dict[str, Any]:
    policy: dict[str, Any] = {"name": name}
    if name in ("hvd_cost", "hvd_tau"):
        policy["predictor"] = setting.predictor or PREDICTOR
    if name == "hvd_tau":
        policy["tau"] = setting.config.policy.tau
    if name == "rule_match":
        policy["min_match"] = setting.config.policy.min_match
    if name == "rule_score":
        policy["model_draft_tokens"] = setting.config.policy.model_draft_tokens
    if name == "hvd_cost" and setting.costs is not None:
        policy["costs"] = setting.costs
    return policy


def _drafting(name: str, setting: Setting, *, uses_head: bool) -> dict[str, Any]:
    drafting: dict[str, Any] = {}
    if name == "ngram":
        drafting["ngram"] = setting.config.drafting.ngram.model_dump(exclude_defaults=True)
    elif name != "eagle3":
        drafting["suffix"] = _cache(setting)
    if uses_head:
        drafting["eagle3"] = {"head": HEAD, "num_tokens": setting.head_tokens}
    return {section: options for section, options in drafting.items() if options}


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


def servable(tokenizer: str) -> str | None:
    """The model that a tokenizer's name is one of, for vLLM; None: it could not load that.

    Names of ours are packages' files, and a folder may hold a tokenizer alone.
    """
    from hvd_ray.targets.embedded import EMBEDDED_MODELS

    folder = Path(tokenizer).expanduser()
    if folder.is_dir():
        return tokenizer if any(folder.glob("*.safetensors")) else None
    return None if tokenizer in EMBEDDED_MODELS else tokenizer


def _quoted(tree: Mapping[str, Any]) -> str:
    return shlex.quote(json.dumps(tree))


def _placeholders(*texts: str) -> tuple[str, ...]:
    found = [word for word in (MODEL, HEAD, PREDICTOR) if any(_has(text, word) for text in texts)]
    return tuple(found)


def _has(text: str, word: str) -> bool:
    return word in text.replace("_", " ").split() or f'"{word}"' in text or f" {word}\n" in text
