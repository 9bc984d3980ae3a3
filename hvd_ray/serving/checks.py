"""Verifications that requests of a deployment may choose beside `full`: a slim model's help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from hvd_ray.engines.base import Engine, TieredEngine
from hvd_ray.parts.find import FoundParts, Sources, find_parts
from hvd_ray.serving.calls import Audited
from hvd_ray.serving.settings import ServeConfig
from hvd_ray.systems import GATED, build_verifier
from hvd_ray.text import TextCodec
from hvd_ray.types import VerificationName
from hvd_ray.verify.audit import Trust
from hvd_ray.verify.exact import Verifier
from hvd_ray.verify.tiers import TieredVerifier

if TYPE_CHECKING:
    from hvd_ray.drafting.eagle3 import Eagle3Head


@dataclass(frozen=True, slots=True)
class Check:
    """A target with its slim model and who verifies with them; for a replica's life, so that an
    audit's trust outlives a change of policy."""

    engine: TieredEngine
    verifier: Verifier

    @property
    def audited(self) -> Audited | None:
        """What its audit has found so far; None where nothing goes unchecked."""
        if not isinstance(self.verifier, TieredVerifier):
            return None
        audit = self.verifier.audit
        return Audited(
            audit.num_tokens,
            audit.num_missed,
            audit.upper_bound,
            int(audit.trust is Trust.TRUSTED),
        )


def find_checks(
    config: ServeConfig,
    *,
    engine: Engine,
    codec: TextCodec,
    head: Eagle3Head | None,
    sources: Sources,
) -> Mapping[VerificationName, Check]:
    """What `serving.verification` allows, built.

    Raises:
        UserError: a slim model or gate cannot be had, or it cannot pay here.
    """
    found: dict[VerificationName, Check] = {}
    for name in _allowed(config):
        parts = replace(_find(name, config, sources).load(engine, codec, config)[0], head=head)
        verifier = build_verifier(f"greedy+{name}", config, engine=engine, parts=parts)
        assert parts.tiers is not None
        found[name] = Check(parts.tiers, verifier)
    return MappingProxyType(found)


def refuse_checks(config: ServeConfig, sources: Sources) -> None:
    """Refuse, before a model is loaded, what `find_checks` would refuse.

    Raises:
        UserError: as there.
    """
    for name in _allowed(config):
        _find(name, config, sources)


def _allowed(config: ServeConfig) -> list[VerificationName]:
    return [name for name in config.serving.verification if name != "full"]


def _find(name: VerificationName, config: ServeConfig, sources: Sources) -> FoundParts:
    kept = ",".join(one for one in config.serving.verification if one not in GATED)
    instead = f"serving.verification=[{kept or 'nested'}]"
    return find_parts([f"greedy+{name}"], config, sources, instead=instead)[1]
