"""The decoders of a replica, one for each `hvd` mode, over drafters that they share.

What one request taught the cache, the next one of its scope can draft, whatever their modes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from hvd_ray.config import Config, PolicyConfig
from hvd_ray.decode import Decoder
from hvd_ray.drafting.base import Drafter, ModelDrafter
from hvd_ray.drafting.suffix import RuleDrafter, SuffixDrafter
from hvd_ray.engines.base import Engine
from hvd_ray.errors import NotSupportedError, UserError
from hvd_ray.parts.find import FoundParts, Sources, find_parts
from hvd_ray.payoff.policy import AlwaysCache, AlwaysModel, NeverDraft
from hvd_ray.serving.calls import Mode
from hvd_ray.serving.checks import Check, find_checks
from hvd_ray.serving.settings import ServeConfig
from hvd_ray.systems import (
    HYBRIDS,
    NEEDS,
    Need,
    Parts,
    build_cache_drafter,
    build_model_drafter,
    build_policy,
    needs_of,
    uses_predictor,
)
from hvd_ray.text import TextCodec
from hvd_ray.types import VerificationName, tenant_of

if TYPE_CHECKING:
    from hvd_ray.drafting.eagle3 import Eagle3Head

PREFERRED = ("hvd_cost", "suffix")
"""What `auto` is where nobody named a policy: the first of these that can be built."""


def is_lesser(name: str, *, than: str) -> bool:
    """Whether a policy that nobody named stands behind another such one."""
    return PREFERRED.index(name) > PREFERRED.index(than)


def resolve_configured(config: Config) -> Path:
    """The folder of the predictor that a configuration names, or of the target's champion.

    Raises:
        UserError: there is none.
    """
    from hvd_ray.tracking import resolve_predictor

    return resolve_predictor(config=config)


def is_vacant_there(config: Config) -> bool:
    """Whether the configured registry is there and calls no predictor of the target champion.

    Raises:
        UserError: it cannot be used.
    """
    from hvd_ray.tracking.promotion import is_vacant

    return is_vacant(config=config)


@dataclass(frozen=True, slots=True)
class Stage:
    """What stays for a replica's life: the target, the drafters and what they remember."""

    config: Config
    engine: Engine
    codec: TextCodec
    reading: Engine
    """The same target, handing out the hidden states that a head reads."""
    cache: SuffixDrafter
    head: Eagle3Head | None
    model_drafter: ModelDrafter | None
    checks: Mapping[VerificationName, Check] = field(default_factory=dict)
    """Who else than the target in full may verify."""
    sources: Sources = field(default_factory=Sources)
    resolve: Callable[[Config], Path] = resolve_configured
    """Where the predictor of a configuration lies now."""
    is_vacant: Callable[[Config], bool] = is_vacant_there
    """Whether the champion's alias was taken away, which an absent registry cannot tell."""

    def with_policy(self, policy: PolicyConfig) -> Config:
        return self.config.model_copy(update={"policy": policy})

    def predictor_folder(self, policy: PolicyConfig) -> Path | None:
        """Where the predictor lies that a policy would be asked for; None: there is none.

        Raises:
            UserError: one was named and cannot be had.
        """
        try:
            return self.resolve(self.with_policy(policy))
        except UserError:
            if policy.predictor is not None:
                raise
            return None


@dataclass(frozen=True, slots=True)
class Lineup:
    """The decoders that serve now."""

    verified: Mapping[VerificationName, Mapping[Mode, Decoder]]
    policy: str
    tau: float | None
    predictor: str | None
    notes: tuple[str, ...] = ()
    """Why a better policy was not taken, and what to doubt of the one that was."""

    @property
    def decoders(self) -> Mapping[Mode, Decoder]:
        """Those whose drafts the target verifies alone."""
        return self.verified["full"]


def set_stage(
    config: ServeConfig,
    *,
    engine: Engine,
    codec: TextCodec,
    sources: Sources | None = None,
    resolve: Callable[[Config], Path] = resolve_configured,
) -> Stage:
    """Drafters for a target; with the head that ships or is named, if it is there.

    Raises:
        UserError: a head was named and cannot be used.
    """
    sources = sources or Sources()
    cache = SuffixDrafter(config.drafting.suffix, owner_of=tenant_of)
    head, reading = _load_head(config, engine, codec, sources)
    parts = Parts(head=head)
    model_drafter = build_model_drafter("eagle3", config, engine=reading, parts=parts)
    checks = find_checks(config, engine=reading, codec=codec, head=head, sources=sources)
    return Stage(
        config, engine, codec, reading, cache, head, model_drafter, checks, sources, resolve
    )


def _load_head(
    config: Config, engine: Engine, codec: TextCodec, sources: Sources
) -> tuple[Eagle3Head | None, Engine]:
    try:
        folder = sources.head(config)
    except UserError:
        if config.drafting.eagle3.head is not None:
            raise
        return None, engine
    parts, reading = FoundParts(head=folder).load(engine, codec, config)
    return parts.head, reading


def line_up(stage: Stage, policy: PolicyConfig, *, is_named: bool) -> Lineup:
    """Decoders for a policy; with `is_named` that one, else the best that can be built.

    Raises:
        UserError: the policy, or a predictor or cost table that was named, cannot be had.
    """
    config = stage.with_policy(policy)
    name, parts, found, notes = _choose(stage, config, is_named=is_named)
    if name == "eagle3_tree":
        raise NotSupportedError(
            "policy.name=eagle3_tree: serving shares one drafter of chains among all modes; "
            "use eagle3"
        )
    decoders: dict[Mode, Decoder] = {
        "off": Decoder(stage.engine, stage.codec, NeverDraft()),
        "cache": Decoder(stage.engine, stage.codec, AlwaysCache(), RuleDrafter(stage.cache)),
        "auto": _auto(stage, name, config, parts),
    }
    if stage.model_drafter is not None:
        decoders["eagle3"] = Decoder(
            stage.reading, stage.codec, AlwaysModel(), stage.cache, stage.model_drafter
        )
    tau = policy.tau if name == "hvd_tau" else None
    uses_payoff = bool(NEEDS.get(name)) and found.payoff is not None
    predictor = found.payoff.reference if uses_payoff and found.payoff else None
    verified = {
        "full": decoders,
        **{name: _checked(decoders, check) for name, check in stage.checks.items()},
    }
    return Lineup(MappingProxyType(verified), name, tau, predictor, notes)


def _checked(decoders: Mapping[Mode, Decoder], check: Check) -> dict[Mode, Decoder]:
    """The same decoders, verified otherwise; one verifier for all, as its audit is."""
    return {
        mode: replace(decoder, engine=check.engine, make_verifier=lambda _: check.verifier)
        for mode, decoder in decoders.items()
    }


def _auto(stage: Stage, name: str, config: Config, parts: Parts) -> Decoder:
    policy = build_policy(name, config, parts)
    cache: Drafter | None = build_cache_drafter(name, config)
    if isinstance(cache, SuffixDrafter) or name == "eagle3":
        cache = stage.cache if uses_predictor(name) else RuleDrafter(stage.cache)
    if stage.model_drafter is None or name not in HYBRIDS | {"eagle3"}:
        return Decoder(stage.engine, stage.codec, policy, cache)
    return Decoder(stage.reading, stage.codec, policy, cache, stage.model_drafter)


def _choose(
    stage: Stage, config: Config, *, is_named: bool
) -> tuple[str, Parts, FoundParts, tuple[str, ...]]:
    """The policy's name and its parts, and what to know of the choice."""
    asked = [config.policy.name] if is_named else None
    names, found, notes = find_parts(asked, config, stage.sources)
    found.head = None  # it is on the stage already
    parts = replace(found.load(stage.engine, stage.codec, config)[0], head=stage.head)
    name = names[0] if is_named else next(name for name in PREFERRED if name in names)
    better = () if is_named else PREFERRED[: PREFERRED.index(name)]
    told = [note for note in notes if note.split(" ", 1)[0] in better]
    if Need.COSTS in needs_of(name) and found.costs is not None and found.costs.disturbance:
        told.append(f"its cost table {found.costs.disturbance}: {found.costs.again}")
    return name, parts, found, tuple(told)
