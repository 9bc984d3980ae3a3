"""What `--additional-config '{"hvd": {...}}'` may say; unknown keys are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from hvd_ray.config import Config, PolicyName, SuffixConfig, validated
from hvd_ray.errors import UserError, shown

SECTION = "hvd"
OWN_PAYOFF = "own"
Place = Annotated[str, Field(min_length=1)]

PluginPolicy = Literal["cost", "tau", "score", "match", "cache", "eagle3", "off"]
POLICIES: Mapping[PluginPolicy, PolicyName] = MappingProxyType(
    {
        "cost": "hvd_cost",
        "tau": "hvd_tau",
        "score": "rule_score",
        "match": "rule_match",
        "cache": "suffix",
        "eagle3": "eagle3",
        "off": "greedy",
    }
)
"""The plugin's policies and the systems (`systems.SYSTEMS`) that decide for them."""


class Control(StrEnum):
    """What one request asks for in `vllm_xargs` / `extra_args`: `{"hvd": "off"}`."""

    AUTO = "auto"
    """The configured policy."""
    CACHE = "cache"
    """The cache's draft whenever there is one, never the head."""
    EAGLE3 = "eagle3"
    """The head in every step, never the cache."""
    OFF = "off"
    """Plain decoding."""


@dataclass(frozen=True, slots=True)
class Target:
    """What the plugin must know of the engine's model."""

    model: str
    """Name, folder or hub id, as given to vLLM."""
    tokenizer: str
    vocab_size: int
    max_model_len: int
    has_head: bool


class TraceOptions(BaseModel):
    """Sampled traces of what is served, as Parquet (`hvd traces label` reads them)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: Place
    share: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 0.01
    """Of the requests."""
    max_mib: Annotated[int, Field(ge=1, le=2**20)] = 256
    """The oldest files go beyond."""
    rows_per_part: Annotated[int, Field(ge=1, le=100_000)] = 256
    """Requests a file, the most; what waits for a minute is written with fewer."""


class HvdOptions(BaseModel):
    """The section `hvd` of vLLM's additional configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: PluginPolicy = "cost"
    eagle3_tokens: Annotated[int, Field(ge=1, le=64)] = 4
    """The most tokens of a chain drafted by the head; `num_speculative_tokens` bounds any draft."""
    payoff: Place | None = None
    """The predictor: a folder, `models:/NAME@ALIAS`, `own` for the cache's own probabilities, or
    None for the target's champion."""
    costs: Place | None = None
    """A cost table's file for `cost`; None: learnt from the engine's own steps."""
    tau: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 6.0
    """Threshold of `tau` on the predicted payoff, in tokens."""
    min_match: Annotated[int, Field(ge=1, le=512)] = 5
    """What the match must reach under `match`, in tokens."""
    cache: SuffixConfig = SuffixConfig()
    """The suffix cache; `max_cached_tokens` is its cap over all scopes."""
    lookup_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 5.0
    """The most time of a step for look-ups; beyond it requests go without, by turns."""
    traces: TraceOptions | None = None
    """Where to leave sampled traces; None: nowhere."""

    @property
    def system(self) -> PolicyName:
        return POLICIES[self.policy]

    def config(self, model: str) -> Config:
        """The configuration tree that the rest of hvd_ray reads."""
        policy: dict[str, Any] = {
            "name": self.system,
            "tau": self.tau,
            "predictor": self.payoff,
            "costs": self.costs,
            "min_match": self.min_match,
            "model_draft_tokens": self.eagle3_tokens,
        }
        drafting = {"suffix": self.cache, "eagle3": {"num_tokens": self.eagle3_tokens}}
        return validated(Config, {"model": model, "policy": policy, "drafting": drafting})


_IDLE: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "payoff": frozenset({"cost", "tau"}),
        "costs": frozenset({"cost"}),
        "tau": frozenset({"tau"}),
        "min_match": frozenset({"match"}),
    }
)
"""Options that only some policies read."""
_SUBSECTIONS: Mapping[str, type[BaseModel]] = MappingProxyType(
    {"cache": SuffixConfig, "traces": TraceOptions}
)


def read_options(additional_config: object) -> HvdOptions | None:
    """The options in vLLM's additional configuration; None where it has no section `hvd`.

    Raises:
        UserError: a key is unknown, has no effect under the policy, or its value is out of range.
    """
    if not isinstance(additional_config, Mapping) or SECTION not in additional_config:
        return None
    section = additional_config[SECTION]
    _refuse_unknown(section, HvdOptions, name=SECTION)
    for name, model in _SUBSECTIONS.items():
        if section.get(name) is not None:
            _refuse_unknown(section[name], model, name=f"{SECTION}.{name}")
    options = validated(HvdOptions, dict(section), section=SECTION)
    for name, users in _IDLE.items():
        if section.get(name) is not None and options.policy not in users:
            raise UserError(
                f"setting {SECTION}.{name}: has no effect with policy {options.policy!r}; "
                f"leave it out or choose {' or '.join(sorted(users))}"
            )
    return options


def _refuse_unknown(given: object, model: type[BaseModel], *, name: str) -> None:
    known = list(model.model_fields)
    if not isinstance(given, Mapping):
        raise UserError(
            f"setting {name}: must be a mapping of settings ({', '.join(known)}), "
            f"got {shown(given)}"
        )
    for key in given:
        if key not in known:
            close = get_close_matches(str(key), known, n=1)
            hint = f"is {close[0]!r} meant?" if close else f"choose from {', '.join(known)}"
            raise UserError(f"setting {name}.{key}: unknown; {hint}")
    for key, field in model.model_fields.items():
        if field.is_required() and key not in given:
            raise UserError(f"setting {name}.{key}: must be given")


def check_head(options: HvdOptions, *, has_head: bool, num_speculative_tokens: int) -> None:
    """Refuse what asks for more of a head than the engine has.

    Raises:
        UserError: naming the setting, and what to type.
    """
    if options.policy == "eagle3" and not has_head:
        raise UserError(
            f"setting {SECTION}.policy: 'eagle3' needs a head: --speculative-config with method "
            "eagle3"
        )
    if "eagle3_tokens" not in options.model_fields_set:
        return
    if not has_head:
        raise UserError(
            f"setting {SECTION}.eagle3_tokens: has no effect without a head; leave it out, or give "
            "--speculative-config the method eagle3"
        )
    if options.eagle3_tokens > num_speculative_tokens:
        raise UserError(
            f"setting {SECTION}.eagle3_tokens: {options.eagle3_tokens} is more than the "
            f"num_speculative_tokens of --speculative-config, {num_speculative_tokens}"
        )


def read_control(value: object) -> Control:
    """What a request asks for; `auto` where it says nothing.

    Raises:
        UserError: the value is unknown.
    """
    if value is None:
        return Control.AUTO
    names = [control.value for control in Control]
    if not isinstance(value, str) or value not in names:
        raise UserError(f"{SECTION}: unknown value {_shown(value)}; choose from {', '.join(names)}")
    return Control(value)


def _shown(value: object) -> str:
    """A value as its sender knows it: vLLM's front end makes numbers of truth values."""
    words: dict[float, str] = {0: "0 or false", 1: "1 or true"}
    return words.get(value, shown(value)) if isinstance(value, int | float) else shown(value)


assert set(POLICIES) == set(get_args(PluginPolicy))
