"""What the systems of a run need besides the target: found before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_ray.config import Config, split_system
from hvd_ray.engines.base import Engine
from hvd_ray.errors import UserError
from hvd_ray.parts.costs import break_even, find_costs
from hvd_ray.parts.payoff import PayoffSource, find_payoff
from hvd_ray.payoff.cost_file import CostFile
from hvd_ray.systems import (
    GATED,
    HYBRIDS,
    SYSTEMS,
    Need,
    Parts,
    find_gate,
    find_slim,
    head_folder,
    load_head,
    needs_of,
    refuse_gated,
)
from hvd_ray.text import TextCodec
from hvd_ray.verify.break_even import BreakEven
from hvd_ray.verify.slim_file import SlimFile

if TYPE_CHECKING:
    from hvd_ray.engines.torch_engine import TorchEngine
    from hvd_ray.verify.gate import LearnedGate
    from hvd_ray.verify.gate_file import GateCard


@dataclass(frozen=True, slots=True)
class Sources:
    """Where predictor, cost table and head come from; each raises UserError where there is none."""

    payoff: Callable[[Config], PayoffSource] = find_payoff
    costs: Callable[[Config], CostFile] = find_costs
    head: Callable[[Config], Path] = head_folder
    slim: Callable[[Config], SlimFile] = find_slim
    gate: Callable[[Config], tuple[LearnedGate, GateCard]] = find_gate


@dataclass(slots=True)
class FoundParts:
    """What was found, not loaded yet."""

    payoff: PayoffSource | None = None
    costs: CostFile | None = None
    head: Path | None = None
    slim: SlimFile | None = None
    gate: tuple[LearnedGate, GateCard] | None = None
    missing: dict[Need, str] = field(default_factory=dict)
    """Why a part is not at hand, and what to type."""

    @property
    def facts(self) -> dict[str, Any]:
        """For the provenance of a result."""
        facts: dict[str, Any] = dict(self.payoff.facts) if self.payoff else {}
        if self.costs is not None:
            facts["costs"] = self.costs.model_dump(mode="json", exclude={"provenance"})
        facts["eagle3_head"] = "/".join(self.head.parts[-2:]) if self.head else None
        if self.slim is not None:
            facts["slim"] = self.slim.model_dump(mode="json", exclude={"provenance", "escalation"})
        return facts

    def load(self, engine: Engine, codec: TextCodec, config: Config) -> tuple[Parts, Engine]:
        """The parts, and the engine to use with them: a head reads its hidden states."""
        vocab_size = engine.capabilities.vocab_size
        estimator = self.payoff.estimator(codec, vocab_size=vocab_size) if self.payoff else None
        costs = self.costs.table() if self.costs else None
        head = None
        if self.head is not None:
            head, engine = load_head(config, torch_engine(engine))
        parts = Parts(estimator, costs, head)
        return (parts if self.slim is None else self._with_tiers(parts, engine, config)), engine

    def _with_tiers(self, parts: Parts, engine: Engine, config: Config) -> Parts:
        from hvd_ray.engines.torch_tiers import torch_tiers

        assert self.slim is not None
        return replace(
            parts,
            tiers=torch_tiers(torch_engine(engine), self.slim.layers),
            gate=self.gate[0] if self.gate else None,
            break_even=self.break_even(config),
        )

    def break_even(self, config: Config) -> Mapping[str, BreakEven]:
        """What is known of the slim model's costs here, by verification."""
        slim, settings = self.slim, config.tiers
        assert slim is not None
        escalated = {"tiered": slim.escalation.at(settings.theta_escalate)}
        if self.gate is not None:
            escalated["tiered_learned"] = self.gate[1].escalation.at(settings.theta_learned)
        known = {name: break_even(self.costs, slim, share) for name, share in escalated.items()}
        return {name: found for name, found in known.items() if found}


def torch_engine(engine: Engine) -> TorchEngine:
    """The engine, for what only transformers models have."""
    from hvd_ray.engines.torch_engine import TorchEngine

    assert isinstance(engine, TorchEngine), "heads and rivals are for the torch engine only"
    return engine


def find_parts(
    asked: Sequence[str] | None,
    config: Config,
    sources: Sources,
    *,
    instead: str = "a system verified in full or by nested",
) -> tuple[tuple[str, ...], FoundParts, list[str]]:
    """The systems that can be measured, their parts, and what is left out and why.

    Args:
        asked: None: all that can be built.
        config: of the run.
        sources: where parts come from.
        instead: what to use where tiers cannot pay, in the words in which they were asked for.

    Raises:
        UserError: a part was named, or a system that needs it was asked for, and there is none;
            or a system cannot pay here.
    """
    wanted = tuple(SYSTEMS if asked is None else asked)
    found = _search(wanted, config, sources, is_asked=asked is not None)
    lacking = _lacking(wanted, found)
    notes = [f"{system} left out: {why}" for system, why in lacking.items()]
    kept = [system for system in wanted if system not in lacking]
    for verification in sorted({split_system(system)[1] for system in kept} & GATED):
        known = found.break_even(config).get(verification)
        refuse_gated(config, known, has_head=found.head is not None, instead=instead)
    return tuple(kept), found, notes


def _lacking(wanted: Sequence[str], found: FoundParts) -> dict[str, str]:
    """Why not, of each system that something was not found for."""
    first = {
        system: next((need for need in sorted(needs_of(system)) if need in found.missing), None)
        for system in wanted
    }
    return {system: found.missing[need] for system, need in first.items() if need is not None}


def _refuse_lacking(wanted: Sequence[str], found: FoundParts) -> None:
    for system, why in _lacking(wanted, found).items():
        raise UserError(f"system {system!r}: {why}")


def _search(
    wanted: Sequence[str], config: Config, sources: Sources, *, is_asked: bool
) -> FoundParts:
    """What there is; of systems that were asked for the first thing that is not is an error.

    Costs come first: no other part is as often absent, nor found to be absent as quickly.
    """
    found = FoundParts()
    needs = {need for system in wanted for need in needs_of(system)}
    policies = {split_system(system)[0] for system in wanted}
    if needs & {Need.COSTS, Need.SLIM}:
        is_named = config.policy.costs is not None
        found.costs = _try(sources.costs, config, found, Need.COSTS, is_named=is_named)
        if is_asked:
            _refuse_lacking(wanted, found)
    if needs & {Need.PREDICTOR, Need.SURVIVAL}:
        is_named = config.policy.predictor is not None
        found.payoff = _try(sources.payoff, config, found, Need.PREDICTOR, is_named=is_named)
        _judge_survival(found)
    if Need.SLIM in needs:
        is_named = config.tiers.slim is not None
        found.slim = _try(sources.slim, config, found, Need.SLIM, is_named=is_named)
    if Need.GATE in needs:
        found.gate = _try(sources.gate, config, found, Need.GATE, is_named=False)
    if Need.HEAD in needs or HYBRIDS & policies:
        is_named = config.drafting.eagle3.head is not None
        found.head = _try(sources.head, config, found, Need.HEAD, is_named=is_named)
    if is_asked:
        _refuse_lacking(wanted, found)
    return found


def _try(  # type: ignore[no-untyped-def]
    find, config: Config, found: FoundParts, need: Need, *, is_named: bool
):
    """What `find` finds; what was named explicitly must be found."""
    try:
        return find(config)
    except UserError as error:
        if is_named:
            raise
        found.missing[need] = str(error)
        return None


def _judge_survival(found: FoundParts) -> None:
    if found.payoff is None:
        found.missing[Need.SURVIVAL] = found.missing[Need.PREDICTOR]
    elif not found.payoff.has_survival:
        found.missing[Need.SURVIVAL] = (
            "the predictor gives no survival curve; train one with `hvd train --kind survival`"
        )
