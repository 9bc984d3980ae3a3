"""Systems: the named combinations of drafter and policy that are compared and served."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvd_ray.config import POLICY_NAMES, Config
from hvd_ray.decode import Decoder
from hvd_ray.drafting.base import Drafter
from hvd_ray.drafting.ngram import NgramDrafter
from hvd_ray.drafting.suffix import SuffixDrafter
from hvd_ray.engines.base import Engine
from hvd_ray.errors import UserError
from hvd_ray.payoff.policy import (
    AlwaysCache,
    MatchRule,
    NeverDraft,
    PayoffEstimator,
    Policy,
    ScoreRule,
    ThresholdPolicy,
)
from hvd_ray.text import HFTextCodec, TextCodec

if TYPE_CHECKING:
    from hvd_ray.engines.torch_engine import TorchEngine

SYSTEMS: tuple[str, ...] = POLICY_NAMES
NEEDS_PREDICTOR: frozenset[str] = frozenset({"hvd_tau"})


def build_policy(system: str, config: Config, estimator: PayoffEstimator | None = None) -> Policy:
    """The policy of a system.

    Raises:
        UserError: the system is unknown, or needs a predictor and none was given.
    """
    check_system(system)
    if system == "greedy":
        return NeverDraft()
    if system in ("ngram", "suffix"):
        return AlwaysCache()
    if system == "rule_score":
        return ScoreRule(config.policy.model_draft_tokens)
    if system == "rule_match":
        return MatchRule(config.policy.min_match)
    if estimator is None:
        raise UserError(f"system {system!r} needs a payoff predictor: train one with `hvd train`")
    return ThresholdPolicy(estimator, config.policy.tau)


def build_cache_drafter(system: str, config: Config) -> Drafter | None:
    """A fresh, empty drafter for a system; None where it drafts nothing."""
    if system == "greedy":
        return None
    if system == "ngram":
        return NgramDrafter(config.drafting.ngram)
    return SuffixDrafter(config.drafting.suffix)


def build_decoder(
    system: str,
    *,
    engine: Engine,
    codec: TextCodec,
    config: Config,
    estimator: PayoffEstimator | None = None,
) -> Decoder:
    """A decoder with a cold cache; keeping it keeps the cache warm.

    Raises:
        UserError: the system is unknown, or needs a predictor and none was given.
    """
    policy = build_policy(system, config, estimator)
    return Decoder(engine, codec, policy, build_cache_drafter(system, config))


def check_system(system: str) -> None:
    """Refuse a name that is no system, listing those that are."""
    if system not in SYSTEMS:
        raise UserError(f"system {system!r}: unknown; choose from {', '.join(SYSTEMS)}")


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
