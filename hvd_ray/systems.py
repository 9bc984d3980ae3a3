"""Systems: the named combinations of drafters and policy that are compared and served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from hvd_ray.config import POLICY_NAMES, SYSTEM_ALIASES, Config, split_system
from hvd_ray.decode import Decoder
from hvd_ray.drafting.base import Drafter, ModelDrafter
from hvd_ray.drafting.ngram import NgramDrafter
from hvd_ray.drafting.suffix import SuffixDrafter
from hvd_ray.engines.base import Engine, TieredEngine
from hvd_ray.errors import NotSupportedError, UserError
from hvd_ray.payoff.cost import CostTable
from hvd_ray.payoff.cost_policy import CostPolicy, SurvivalEstimator
from hvd_ray.payoff.policy import (
    AlwaysCache,
    AlwaysModel,
    MatchRule,
    NeverDraft,
    PayoffEstimator,
    Policy,
    ScoreRule,
    ThresholdPolicy,
)
from hvd_ray.shipped import shipped_folder
from hvd_ray.text import HFTextCodec, TextCodec
from hvd_ray.types import VERIFICATION_NAMES, VerificationName
from hvd_ray.verify.break_even import BreakEven, refuse_unless_it_pays
from hvd_ray.verify.exact import FullVerifier, Verifier
from hvd_ray.verify.slim_file import SEARCH, SlimFile, read_slim

if TYPE_CHECKING:
    from hvd_ray.drafting.eagle3 import Eagle3Head
    from hvd_ray.engines.torch_engine import TorchEngine
    from hvd_ray.verify.gate import Gate, LearnedGate
    from hvd_ray.verify.gate_file import GateCard

SYSTEMS: tuple[str, ...] = POLICY_NAMES
"""Those that the target verifies alone; `POLICY+VERIFICATION` and short names are systems too."""


class Need(StrEnum):
    """What a system may need besides a target."""

    PREDICTOR = "a payoff predictor"
    SURVIVAL = "a payoff predictor with a survival curve"
    COSTS = "a cost table"
    HEAD = "an EAGLE-3 head"
    SLIM = "a slim model"
    GATE = "a learned gate"


NEEDS: Mapping[str, frozenset[Need]] = MappingProxyType(
    {
        "eagle3": frozenset({Need.HEAD}),
        "eagle3_tree": frozenset({Need.HEAD}),
        "hvd_tau": frozenset({Need.PREDICTOR}),
        "hvd_cost": frozenset({Need.SURVIVAL, Need.COSTS}),
    }
)
_VERIFICATION_NEEDS: Mapping[str, frozenset[Need]] = MappingProxyType(
    {"full": frozenset(), "tiered_learned": frozenset({Need.SLIM, Need.GATE})}
)
GATED = frozenset({"tiered", "tiered_learned"})
"""Verifications that are refused where they cost more than they save."""
HYBRIDS = frozenset({"rule_score", "rule_match", "hvd_tau", "hvd_cost"})
"""Systems that fall back to the model drafter where there is one, and to plain decoding else."""
MODEL_ONLY = frozenset({"eagle3", "eagle3_tree"})


@dataclass(frozen=True, slots=True)
class Parts:
    """What systems are built from besides engine and text codec; None: not at hand."""

    estimator: PayoffEstimator | None = None
    costs: CostTable | None = None
    head: Eagle3Head | None = None
    tiers: TieredEngine | None = None
    """The engine with a slim model."""
    gate: LearnedGate | None = None
    break_even: Mapping[str, BreakEven] = field(default_factory=dict)
    """By verification, where it was measured."""

    def has(self, need: Need) -> bool:
        at_hand = {
            Need.PREDICTOR: self.estimator is not None,
            Need.SURVIVAL: _as_survival(self.estimator) is not None,
            Need.COSTS: self.costs is not None,
            Need.HEAD: self.head is not None,
            Need.SLIM: self.tiers is not None,
            Need.GATE: self.gate is not None,
        }
        return at_hand[need]


def needs_of(system: str) -> frozenset[Need]:
    """What a system needs besides a target."""
    policy, verification = split_system(system)
    own = NEEDS.get(policy, frozenset())
    return own | _VERIFICATION_NEEDS.get(verification, frozenset({Need.SLIM}))


def uses_predictor(system: str) -> bool:
    """Whether a predictor decides, which can make use of longer drafts."""
    return bool(needs_of(system) & {Need.PREDICTOR, Need.SURVIVAL})


NO_PARTS = Parts()
_HOW_TO_GET: Mapping[Need, str] = MappingProxyType(
    {
        Need.PREDICTOR: "train one with `hvd train`",
        Need.SURVIVAL: "train one with `hvd train --kind survival`",
        Need.COSTS: "measure one with `hvd calibrate`",
        Need.HEAD: "name one with drafting.eagle3.head=FOLDER, see `hvd drafter train`",
        Need.SLIM: SEARCH,
        Need.GATE: "train one with `hvd slim gate`",
    }
)


def build_policy(system: str, config: Config, parts: Parts = NO_PARTS) -> Policy:
    """The policy of a system.

    Raises:
        UserError: the system is unknown, or needs a part that is not at hand.
    """
    check_system(system)
    for need in sorted(needs_of(system)):
        if not parts.has(need):
            raise UserError(f"system {system!r} needs {need}: {_HOW_TO_GET[need]}")
    system, _ = split_system(system)
    if system == "greedy":
        return NeverDraft()
    if system in ("ngram", "suffix"):
        return AlwaysCache()
    if system in MODEL_ONLY:
        return AlwaysModel()
    if system == "rule_score":
        return ScoreRule(config.policy.model_draft_tokens)
    if system == "rule_match":
        return MatchRule(config.policy.min_match)
    assert parts.estimator is not None
    if system == "hvd_tau":
        return ThresholdPolicy(parts.estimator, config.policy.tau)
    estimator = _as_survival(parts.estimator)
    assert estimator is not None
    assert parts.costs is not None
    return CostPolicy(estimator, parts.costs, config.drafting.eagle3.num_tokens)


def _as_survival(estimator: object) -> SurvivalEstimator | None:
    if isinstance(estimator, SurvivalEstimator) and estimator.has_survival:
        return estimator
    return None


def build_cache_drafter(system: str, config: Config) -> Drafter | None:
    """A fresh, empty cache drafter for a system; None where it uses none."""
    system, _ = split_system(system)
    if system in {"greedy", *MODEL_ONLY}:
        return None
    if system == "ngram":
        return NgramDrafter(config.drafting.ngram)
    suffix = config.drafting.suffix
    return SuffixDrafter(suffix if uses_predictor(system) else suffix.for_rules())


def build_model_drafter(
    system: str, config: Config, *, engine: Engine, parts: Parts = NO_PARTS
) -> ModelDrafter | None:
    """A model drafter for a system that uses one, where a head is at hand.

    Raises:
        NotSupportedError: it drafts trees and the engine cannot verify them.
    """
    system, _ = split_system(system)
    if parts.head is None or system not in HYBRIDS | MODEL_ONLY:
        return None
    from hvd_ray.drafting.eagle3_drafter import Eagle3Drafter
    from hvd_ray.drafting.eagle3_tree import TreeShape

    settings, capabilities = config.drafting.eagle3, engine.capabilities
    tree = None
    if system == "eagle3_tree":
        if not capabilities.has_trees:
            raise NotSupportedError(
                f"system 'eagle3_tree': the {capabilities.name} engine cannot verify trees with "
                "this model's attention; use 'eagle3', whose drafts are chains"
            )
        tree = TreeShape(settings.tree.depth, settings.tree.width, settings.tree.total)
    return Eagle3Drafter(
        parts.head, capabilities.vocab_size, settings.num_tokens, settings.is_sampled, tree
    )


def build_decoder(
    system: str, *, engine: Engine, codec: TextCodec, config: Config, parts: Parts = NO_PARTS
) -> Decoder:
    """A decoder with a cold cache; keeping it keeps the cache warm.

    Raises:
        UserError: the system is unknown, or needs a part that is not at hand.
    """
    policy = build_policy(system, config, parts)
    verifier = build_verifier(system, config, engine=engine, parts=parts)
    if split_system(system)[1] != "full":
        assert parts.tiers is not None
        engine = parts.tiers
    cache_drafter = build_cache_drafter(system, config)
    model_drafter = build_model_drafter(system, config, engine=engine, parts=parts)
    return Decoder(engine, codec, policy, cache_drafter, model_drafter, lambda _: verifier)


def build_verifier(
    system: str, config: Config, *, engine: Engine, parts: Parts = NO_PARTS
) -> Verifier:
    """Who checks what a system drafts.

    Raises:
        UserError: tiers cannot pay here, or would look at drafts that were sampled.
    """
    _, found = split_system(system)
    verification: VerificationName = found  # type: ignore[assignment]
    if verification == "full":
        return FullVerifier(engine)
    assert parts.tiers is not None
    settings = config.tiers
    if verification == "nested":
        from hvd_ray.verify.nested import NestedVerifier

        return NestedVerifier(parts.tiers, settings.num_tentative, settings.is_sampled)
    if verification in GATED:
        return _tiered(verification, config, parts.tiers, parts)
    from hvd_ray.verify.cascades import CascadeVerifier

    return CascadeVerifier(parts.tiers, verification, settings.alpha, settings.num_tentative)


def _tiered(
    verification: VerificationName, config: Config, tiers: TieredEngine, parts: Parts
) -> Verifier:
    import numpy as np

    from hvd_ray.verify.audit import Audit
    from hvd_ray.verify.gate import RatioGate
    from hvd_ray.verify.tiers import TieredVerifier

    settings = config.tiers
    refuse_gated(config, parts.break_even.get(verification), has_head=parts.head is not None)
    gate: Gate = RatioGate(settings.theta_accept, settings.theta_escalate)
    if verification == "tiered_learned":
        assert parts.gate is not None
        gate = parts.gate
    return TieredVerifier(
        tiers,
        gate,
        Audit(max_miss_rate=settings.max_miss_rate),
        loss_budget=settings.loss_budget,
        audit_share=settings.audit_share,
        name=verification,
        random=np.random.default_rng(config.seed),
    )


def refuse_gated(
    config: Config,
    measured: BreakEven | None,
    *,
    has_head: bool,
    instead: str = "a system verified in full or by nested",
) -> None:
    """Refuse tiers that should not run here; asked as soon as costs are known.

    Raises:
        UserError: they cannot pay, or would look at drafts that were sampled.
    """
    refuse_unless_it_pays(measured, is_forced=config.tiers.is_forced, instead=instead)
    if config.drafting.eagle3.is_sampled and has_head:
        raise UserError("drafting.eagle3.is_sampled=true biases tiers, which look at the draft")


def check_system(system: str) -> None:
    """Refuse what its name alone rules out.

    Raises:
        UserError: the name is no system; it lists those that are.
        NotSupportedError: a tree would have to go through a slim model.
    """
    policy, verification = split_system(system)
    if policy not in POLICY_NAMES or verification not in VERIFICATION_NAMES:
        names = ", ".join((*SYSTEMS, *SYSTEM_ALIASES))
        raise UserError(
            f"system {system!r}: unknown; choose from {names}, or POLICY+VERIFICATION such as "
            "hvd_cost+nested"
        )
    if policy == "eagle3_tree" and verification != "full":
        raise NotSupportedError(f"trees behind {verification}: draft chains, eagle3+{verification}")


def load_engine(config: Config) -> tuple[TorchEngine, HFTextCodec]:
    """The target and its tokenizer, fetched first where that is possible and needed.

    Raises:
        UserError: the model cannot be found or loaded.
    """
    from hvd_ray.engines.torch_engine import TorchEngine, quiet_libraries
    from hvd_ray.fetch import resolve_model

    quiet_libraries()
    model = resolve_model(config.model)
    codec = HFTextCodec(model.path_or_id)
    engine = TorchEngine.load(model.path_or_id, dtype=config.dtype, num_threads=config.num_threads)
    return engine, codec


def head_folder(config: Config) -> Path:
    """Where the head of the configuration, or the one that ships for the target, lies.

    Raises:
        UserError: none was named and none ships.
    """
    named = config.drafting.eagle3.head
    if named is not None:
        return Path(named)
    shipped = shipped_folder(config.model, "eagle3")
    if shipped is None:
        raise UserError(f"no EAGLE-3 head ships for {config.model!r}: {_HOW_TO_GET[Need.HEAD]}")
    return shipped


def load_head(config: Config, engine: TorchEngine) -> tuple[Eagle3Head, TorchEngine]:
    """The head for a target, and the engine that hands out the hidden states it reads.

    Raises:
        UserError: there is no head, or it does not fit the target.
    """
    from dataclasses import replace

    from hvd_ray.drafting.eagle3 import Eagle3Head
    from hvd_ray.drafting.eagle3_checkpoint import load_head as read_head
    from hvd_ray.drafting.eagle3_checkpoint import target_shape

    head = read_head(
        head_folder(config), target=target_shape(engine.model), dtype=engine.model.dtype
    )
    head = Eagle3Head(head.config, head.weights.on(engine.model.device))
    capabilities = replace(engine.capabilities, has_hidden=True)
    layers = head.config.aux_layer_ids
    return head, replace(engine, capabilities=capabilities, hidden_layers=layers)


def slim_path(config: Config) -> Path:
    """Where the slim model of the configuration, or the one that ships for the target, lies.

    Raises:
        UserError: none was named and none ships.
    """
    if config.tiers.slim is not None:
        return Path(config.tiers.slim)
    shipped = shipped_folder(config.model, "slim")
    if shipped is None:
        raise UserError(
            f"no slim model ships for {config.model!r}: {SEARCH}, and name it with tiers.slim=FILE"
        )
    return shipped / "slim.json"


def find_slim(config: Config) -> SlimFile:
    """The slim model of the configuration, for this very target.

    Raises:
        UserError: there is none, or it does not fit the target.
    """
    from hvd_ray.fetch import model_fingerprint, resolve_model

    fingerprint = model_fingerprint(resolve_model(config.model).path_or_id)
    return read_slim(slim_path(config), model=fingerprint)


def find_gate(config: Config) -> tuple[LearnedGate, GateCard]:
    """The learned gate beside the slim model.

    Raises:
        UserError: there is none, or it is another slim model's.
    """
    from hvd_ray.verify.gate_file import read_gate

    folder = slim_path(config).parent
    return read_gate(folder, slim=find_slim(config), theta=config.tiers.theta_learned)
