"""The one configuration tree: YAML file, then `key=value` overrides; unknown keys are refused."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hvd_ray.errors import UserError, own_words, shown
from hvd_ray.settings_yaml import read_yaml_file, read_yaml_value
from hvd_ray.types import VERIFICATION_NAMES, VerificationName

PolicyName = Literal[
    "greedy",
    "ngram",
    "suffix",
    "eagle3",
    "eagle3_tree",
    "rule_score",
    "rule_match",
    "hvd_tau",
    "hvd_cost",
]
POLICY_NAMES: tuple[PolicyName, ...] = get_args(PolicyName)
SYSTEM_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "nested": "suffix+nested",
        "tiered": "suffix+tiered",
        "tiered_learned": "suffix+tiered_learned",
        "self_spec": "greedy+nested",
        "cascade_chow": "greedy+cascade_chow",
        "cascade_diff": "greedy+cascade_diff",
        "cascade_opt": "greedy+cascade_opt",
        "cascade_token_v3": "greedy+cascade_token_v3",
    }
)
"""Short names for a policy and who verifies what it drafts; with `greedy` the slim model drafts."""
Dtype = Literal["float32", "bfloat16"]
DEFAULT_MODEL = "smollm2-135m"
LISTED_IN = "hvd_ray/config.py"

Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Settings = TypeVar("Settings", bound=BaseModel)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SuffixConfig(_Section):
    """The suffix cache (papers: 2606.01019, 2411.04975).

    The papers draft one token for each matched one. Where a predictor knows how much of a draft
    is worth a pass, longer drafts bring more; where every draft is verified, they cost more than
    they bring. So there are two factors.
    """

    max_tree_depth: Annotated[int, Field(ge=2, le=512)] = 64
    """Bounds match plus draft, in tokens."""
    max_draft_tokens: Positive = 64
    max_spec_factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 4.0
    """The most draft tokens for each matched token, in labels and where a predictor decides."""
    rule_spec_factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """The same for systems without a predictor: `suffix` and the rules, as published."""
    min_token_prob: Probability = 0.1
    max_cached_tokens: Positive = 500_000
    """Cap on finished outputs kept for later requests, over all scopes."""

    def for_rules(self) -> SuffixConfig:
        """These settings for a system without a predictor."""
        return self.model_copy(update={"max_spec_factor": self.rule_spec_factor})


class NgramConfig(_Section):
    """Prompt look-up: the last earlier place where the longest suffix n-gram stood."""

    min_match: Positive = 2
    max_match: Positive = 5
    max_draft_tokens: Positive = 10


class Eagle3TreeConfig(_Section):
    """Trees of `eagle3_tree`; a pass verifies every node, so a tree pays where rows are cheap."""

    depth: Annotated[int, Field(ge=1, le=32)] = 5
    """The most tokens on a path."""
    width: Annotated[int, Field(ge=1, le=32)] = 4
    """Nodes expanded at each level, and children of each."""
    total: Annotated[int, Field(ge=1, le=256)] = 16
    """Nodes in all, the most likely ones."""


class Eagle3Config(_Section):
    """The model drafter (EAGLE-3, 2503.01840)."""

    head: str | None = None
    """A head's folder; None: the one that ships for the target, if one does."""
    num_tokens: Annotated[int, Field(ge=1, le=64)] = 4
    """Length of a chain."""
    is_sampled: bool = False
    """Sample drafts of requests with a temperature, instead of taking the head's arg max."""
    tree: Eagle3TreeConfig = Eagle3TreeConfig()


class DraftingConfig(_Section):
    suffix: SuffixConfig = SuffixConfig()
    ngram: NgramConfig = NgramConfig()
    eagle3: Eagle3Config = Eagle3Config()


class PolicyConfig(_Section):
    name: PolicyName = "hvd_tau"
    tau: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 6.0
    """Threshold of `hvd_tau` on the predicted payoff, in tokens."""
    predictor: str | None = None
    """A folder, `models:/NAME@ALIAS`, or None for the registered champion, else what ships."""
    costs: str | None = None
    """A cost table's file, or None for the one that `hvd calibrate` measured here."""
    model_draft_tokens: Positive = 4
    """What the cache's score must reach under `rule_score`."""
    min_match: Positive = 5
    """What the match must reach under `rule_match`."""


class TiersConfig(_Section):
    """Verification by a slim model of the target, in front of the target or in its place."""

    slim: str | None = None
    """A file that `hvd slim search` has written; None: the one that ships for the target."""
    num_tentative: Annotated[int, Field(ge=0, le=64)] = 4
    """Tokens that the slim model puts before the target at least; 0: it only thins drafts."""
    is_sampled: bool = False
    """`nested` at a temperature: textbook speculative sampling, which keeps more of the slim
    model's tokens, instead of the very tokens of plain decoding with the same seed."""
    theta_accept: Probability = 0.9
    """`tiered`: a draft token stands where q'(v) / max q' reaches it."""
    theta_escalate: Probability = 0.5
    """`tiered`: below it the target is asked; between the two the slim model's own token stands."""
    theta_learned: Probability = 0.95
    """`tiered_learned`: the chance of being the target's choice that a token must have."""
    alpha: Probability = 0.1
    """Cascades: how much confidence may be given away for speed."""
    loss_budget: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Expected wrong tokens in an answer at most; what follows is verified in full."""
    max_miss_rate: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Upper bound on the audited rate of wrong tokens; above it (99.5 % confidence to begin with,
    95 % later) everything is verified in full. 1: never fall back."""
    audit_share: Probability = 1.0
    """Share of the requests whose unchecked tokens the target reads later."""
    is_forced: bool = False
    """Run `tiered` even where it cannot pay here, to study it."""

    @model_validator(mode="after")
    def _thresholds_leave_a_middle_band(self) -> TiersConfig:
        if self.theta_accept <= self.theta_escalate:
            given = f"{self.theta_accept:g} and {self.theta_escalate:g}"
            raise ValueError(f"theta_accept must exceed theta_escalate, got {given}")
        return self


class TrackingConfig(_Section):
    uri: str | None = None
    """An MLflow tracking URI; None: a SQLite file under HVD_HOME."""
    experiment: str = "hvd_ray"


class Config(_Section):
    model: str = DEFAULT_MODEL
    """An embedded model's name, a local folder or a hub id."""
    dtype: Dtype = "bfloat16"
    num_threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Threads of the torch engine; None: as many as cores."""
    drafting: DraftingConfig = DraftingConfig()
    policy: PolicyConfig = PolicyConfig()
    verification: VerificationName = "full"
    """Who checks tokens; `tiered` and cascades change answers and serve only requests that allow
    it."""
    tiers: TiersConfig = TiersConfig()
    tracking: TrackingConfig = TrackingConfig()
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 42


Tree = TypeVar("Tree", bound=Config)

_MAX_WORDS_CHARS = 600
"""Of what a validator says: enough for a list of names, not for a value that was put into it."""

_USED_BY: dict[str, tuple[str, ...]] = {
    "policy.tau": ("hvd_tau",),
    "policy.predictor": ("hvd_tau", "hvd_cost"),
    "policy.costs": ("hvd_cost",),
    "policy.model_draft_tokens": ("rule_score",),
    "policy.min_match": ("rule_match",),
    "drafting.eagle3.is_sampled": ("eagle3", "rule_score", "rule_match", "hvd_tau", "hvd_cost"),
    "drafting.eagle3.tree": ("eagle3_tree",),
}
_TIERED = ("tiered", "tiered_learned")
_CASCADES = tuple(name for name in VERIFICATION_NAMES if name.startswith("cascade"))
_WITH_RUN = ("nested", *_CASCADES)
_USED_BY_VERIFICATION: dict[str, tuple[str, ...]] = {
    "tiers.slim": (*_TIERED, *_WITH_RUN),
    "tiers.num_tentative": _WITH_RUN,
    "tiers.is_sampled": ("nested",),
    "tiers.theta_accept": ("tiered",),
    "tiers.theta_escalate": ("tiered",),
    "tiers.theta_learned": ("tiered_learned",),
    "tiers.alpha": _CASCADES,
    "tiers.loss_budget": _TIERED,
    "tiers.max_miss_rate": _TIERED,
    "tiers.audit_share": _TIERED,
    "tiers.is_forced": _TIERED,
}


def split_system(system: str) -> tuple[str, str]:
    """Policy and verification of a system's name, `POLICY` or `POLICY+VERIFICATION` or short."""
    policy, _, verification = SYSTEM_ALIASES.get(system, system).partition("+")
    return policy, verification or "full"


def configured_system(config: Config) -> str:
    """The system that `policy.name` and `verification` name."""
    return f"{config.policy.name}+{config.verification}"


def load_config(
    path: Path | None = None,
    overrides: Sequence[str] = (),
    *,
    policies: Collection[str] | None = None,
) -> Config:
    """Read a YAML file, apply `section.key=value` overrides and validate the whole.

    Args:
        path: the file; None: the defaults.
        overrides: applied in order, the last one wins.
        policies: those that will run where a command chooses them itself; None: `policy.name`.

    Raises:
        UserError: the file is absent or no mapping, a key is unknown or given twice, a value is
            out of range.

    Warns:
        UserWarning: a setting was given that no policy uses that will run.
    """
    return load_config_as(Config, path, overrides, policies=policies)


def load_config_as(
    model: type[Tree],
    path: Path | None = None,
    overrides: Sequence[str] = (),
    *,
    policies: Collection[str] | None = None,
    where: str = LISTED_IN,
) -> Tree:
    """`load_config` for a tree with sections of a command's own; `where` says what lists them."""
    tree = read_settings(path, overrides)
    config = validated(model, tree, where=where)
    _warn_of_idle_settings(tree, config, policies)
    return config


def read_settings(path: Path | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """A YAML file's tree with `section.key=value` overrides applied in order; not validated.

    Raises:
        UserError: the file is absent, no mapping or gives a key twice, or an override is malformed
            or replaces a section of which one before it has set a key.
    """
    tree = _read_tree(path) if path else {}
    given: dict[str, str] = {}
    for override in overrides:
        key = _apply(tree, override)
        lost = next((word for name, word in given.items() if name.startswith(f"{key}.")), None)
        if lost is not None:
            raise UserError(
                f"setting {shown(override)}: takes {shown(lost)} back, which stands before it; put "
                "the section first, or give its keys one by one"
            )
        given[key] = override
    return tree


def validated(
    model: type[Settings], tree: dict[str, Any], *, where: str = LISTED_IN, section: str = ""
) -> Settings:
    """A tree of settings as its model.

    Args:
        model: what is allowed.
        tree: what was given.
        where: the file that lists what is allowed, to be named.
        section: what the user wrote the tree under.

    Raises:
        UserError: a key is unknown or a value is out of range; one line that names the key.
    """
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise UserError(_one_line(error, where, section)) from None


def _read_tree(path: Path) -> dict[str, Any]:
    tree = read_yaml_file(path)
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"config {path}: expected a mapping of settings, got {type(tree).__name__}")
    return tree


def _apply(tree: dict[str, Any], override: str) -> str:
    """Put an override into the tree; its key."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise UserError(f"setting {shown(override)}: expected key=value, e.g. policy.tau=4")
    value = read_yaml_value(text, setting=shown(override))
    *sections, leaf = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise UserError(f"setting {shown(override)}: {section} is a value, not a section")
    tree[leaf] = value
    return key


def _one_line(error: ValidationError, where: str, section: str) -> str:
    first = error.errors()[0]
    key = ".".join(str(part)[:80] for part in (section, *first["loc"]) if part != "")
    if first["type"] == "extra_forbidden":
        return f"setting {key}: unknown; the settings are listed in {where}"
    if first["type"] in ("model_type", "dict_type", "model_attributes_type"):
        return f"setting {key}: a section; expected {key}.NAME=value, got {shown(first['input'])}"
    words = own_words(first["msg"])[:_MAX_WORDS_CHARS]
    if first["type"] == "value_error" and isinstance(first["input"], dict):
        return f"setting {key}: {words}"  # on a section as a whole, and naming the values at odds
    return f"setting {key}: {words}, got {shown(first['input'])}"


def _warn_of_idle_settings(
    tree: dict[str, Any], config: Config, policies: Collection[str] | None
) -> None:
    running = (configured_system(config),) if policies is None else policies
    idle = list(_idle(tree, [split_system(system) for system in running]))
    if policies is not None:
        idle += [key for key in ("policy.name", "verification") if _is_given(tree, key)]
    name = f"policy.name={config.policy.name}"
    full = "" if config.verification == "full" else f" and verification={config.verification}"
    reason = name + full if policies is None else ", ".join(policies)
    for key in idle:
        message = f"setting {key} has no effect with {reason}"
        warnings.warn(message, UserWarning, stacklevel=4)


def _is_given(tree: dict[str, Any], key: str) -> bool:
    for part in key.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return False
        tree = tree[part]
    return True


def _idle(tree: dict[str, Any], running: Sequence[tuple[str, str]]) -> Iterator[str]:
    policies, verifications = ({pair[part] for pair in running} for part in (0, 1))
    for key, users in _USED_BY.items():
        if _is_given(tree, key) and not policies & set(users):
            yield key
    for key, users in _USED_BY_VERIFICATION.items():
        if _is_given(tree, key) and not verifications & set(users):
            yield key
