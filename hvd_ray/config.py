"""The one configuration tree: YAML file, then `key=value` overrides; unknown keys are refused."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hvd_ray.errors import UserError

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
Dtype = Literal["float32", "bfloat16"]
DEFAULT_MODEL = "smollm2-135m"
LISTED_IN = "hvd_ray/config.py"

Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Settings = TypeVar("Settings", bound=BaseModel)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SuffixConfig(_Section):
    """The suffix cache; defaults are those of the HVD paper (papers: 2606.01019, 2411.04975)."""

    max_tree_depth: Annotated[int, Field(ge=2, le=512)] = 64
    """Bounds match plus draft, in tokens."""
    max_draft_tokens: Positive = 64
    max_spec_factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """The most draft tokens for each matched token."""
    min_token_prob: Probability = 0.1
    max_cached_tokens: Positive = 500_000
    """Cap on finished outputs kept for later requests, over all scopes."""


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
    """A folder, `models:/NAME@ALIAS`, or None for the registered champion."""
    costs: str | None = None
    """A cost table's file, or None for the one that `hvd calibrate` measured here."""
    model_draft_tokens: Positive = 4
    """What the cache's score must reach under `rule_score`."""
    min_match: Positive = 5
    """What the match must reach under `rule_match`."""


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
    tracking: TrackingConfig = TrackingConfig()
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 42


_NOT_YAML = (yaml.YAMLError, ValueError, AttributeError, RecursionError)
"""What the YAML reader raises for hostile text: bad dates and tags, nesting without end."""

_USED_BY: dict[str, tuple[str, ...]] = {
    "policy.tau": ("hvd_tau",),
    "policy.predictor": ("hvd_tau", "hvd_cost"),
    "policy.costs": ("hvd_cost",),
    "policy.model_draft_tokens": ("rule_score",),
    "policy.min_match": ("rule_match",),
    "drafting.eagle3.is_sampled": ("eagle3", "rule_score", "rule_match", "hvd_tau", "hvd_cost"),
    "drafting.eagle3.tree": ("eagle3_tree",),
}


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
        UserError: the file is absent or no mapping, a key is unknown, a value is out of range.

    Warns:
        UserWarning: a setting was given that no policy uses that will run.
    """
    tree = read_settings(path, overrides)
    config = validated(Config, tree)
    _warn_of_idle_settings(tree, config.policy.name, policies)
    return config


def read_settings(path: Path | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """A YAML file's tree with `section.key=value` overrides applied in order; not validated.

    Raises:
        UserError: the file is absent or no mapping, or an override is malformed.
    """
    tree = _read_yaml(path) if path else {}
    for override in overrides:
        _apply(tree, override)
    return tree


def validated(model: type[Settings], tree: dict[str, Any], *, where: str = LISTED_IN) -> Settings:
    """A tree of settings as its model; `where` says which file lists what is allowed.

    Raises:
        UserError: a key is unknown or a value is out of range; one line that names the key.
    """
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise UserError(_one_line(error, where)) from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"config {path}: cannot be read ({error})") from None
    except _NOT_YAML as error:
        where = str(error).replace("\n", " ")
        raise UserError(f"config {path}: not valid YAML ({where})") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"config {path}: expected a mapping of settings, got {type(tree).__name__}")
    return tree


def _apply(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise UserError(f"setting {override!r}: expected key=value, e.g. policy.tau=4")
    try:
        value = yaml.safe_load(text)
    except _NOT_YAML:
        raise UserError(f"setting {override!r}: {text!r} is not a value") from None
    *sections, leaf = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise UserError(f"setting {override!r}: {section} is a value, not a section")
    tree[leaf] = value


def _one_line(error: ValidationError, where: str) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"setting {key}: unknown; the settings are listed in {where}"
    return f"setting {key}: {first['msg']}, got {first['input']!r}"


def _warn_of_idle_settings(
    tree: dict[str, Any], name: str, policies: Collection[str] | None
) -> None:
    running = (name,) if policies is None else policies
    idle = [
        key
        for key, users in _USED_BY.items()
        if _is_given(tree, key) and not set(users) & set(running)
    ]
    if policies is not None and _is_given(tree, "policy.name"):
        idle.append("policy.name")
    reason = f"policy.name={name}" if policies is None else ", ".join(policies)
    for key in idle:
        message = f"setting {key} has no effect with {reason}"
        warnings.warn(message, UserWarning, stacklevel=3)


def _is_given(tree: dict[str, Any], key: str) -> bool:
    for part in key.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return False
        tree = tree[part]
    return True
