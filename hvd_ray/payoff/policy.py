"""Policies: which draft, of which length, is worth a pass of the target now.

Every policy sees the committed prefix and the cache's draft, which is a function of that prefix,
and never a sampled model draft; so dropping or cutting a draft cannot change the distribution of
the output (DESIGN, "Exactness").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hvd_ray.context import DecodeContext
from hvd_ray.types import NO_DRAFT, Decision, Draft, Source


@dataclass(frozen=True, slots=True)
class Candidates:
    """What could be verified in this cycle."""

    cache: Draft = NO_DRAFT
    """The cache's draft, empty when it has none."""
    model_source: Source | None = None
    """The model drafter at hand, whose draft is made only when a policy asks for it."""
    model_limit: int = 0
    """The most tokens that the model drafter may draft here."""
    draft_us: float = 0.0
    """Time of the look-up."""
    model_entry_ms: float = 0.0
    """What the model drafter must do first for this request, and then no more: read its prompt."""


class Policy(Protocol):
    """Decides source and draft length for a cycle; a pure function of its arguments."""

    def decide(self, candidates: Candidates, context: DecodeContext) -> Decision: ...


class PayoffEstimator(Protocol):
    """Expected accepted length of a non-empty cache draft, in tokens."""

    def expected_length(self, draft: Draft, context: DecodeContext) -> float: ...


def _cache(draft: Draft, reason: str) -> Decision:
    if not draft.token_ids:
        return Decision(Source.NONE, 0, reason="no cache draft")
    return Decision(draft.source, len(draft), reason=reason)


def _model_or_none(candidates: Candidates, reason: str) -> Decision:
    if candidates.model_source is None or candidates.model_limit == 0:
        return Decision(Source.NONE, 0, reason=reason)
    return Decision(candidates.model_source, candidates.model_limit, reason=reason)


@dataclass(frozen=True, slots=True)
class NeverDraft:
    """Plain decoding."""

    def decide(self, candidates: Candidates, context: DecodeContext) -> Decision:  # noqa: ARG002
        return Decision(Source.NONE, 0, reason="drafting is off")


@dataclass(frozen=True, slots=True)
class AlwaysCache:
    """Verify the cache's draft whenever there is one."""

    def decide(self, candidates: Candidates, context: DecodeContext) -> Decision:  # noqa: ARG002
        return _cache(candidates.cache, "always the cache")


@dataclass(frozen=True, slots=True)
class AlwaysModel:
    """Verify the model drafter's draft in every cycle."""

    def decide(self, candidates: Candidates, context: DecodeContext) -> Decision:  # noqa: ARG002
        return _model_or_none(candidates, "always the model drafter")


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """The cache's draft iff its score reaches the model draft's length (arctic-inference)."""

    model_draft_tokens: int = 4

    def decide(self, candidates: Candidates, context: DecodeContext) -> Decision:  # noqa: ARG002
        draft = candidates.cache
        if draft.token_ids and draft.score >= self.model_draft_tokens:
            return _cache(draft, f"score {draft.score:.1f} >= {self.model_draft_tokens}")
        return _model_or_none(candidates, f"score {draft.score:.1f} < {self.model_draft_tokens}")


@dataclass(frozen=True, slots=True)
class MatchRule:
    """The cache's draft iff at least `min_match` tokens matched (SAM-Decoding, 2411.10666)."""

    min_match: int = 5

    def decide(self, candidates: Candidates, context: DecodeContext) -> Decision:  # noqa: ARG002
        draft = candidates.cache
        if draft.token_ids and draft.match_len >= self.min_match:
            return _cache(draft, f"match {draft.match_len} >= {self.min_match}")
        return _model_or_none(candidates, f"match {draft.match_len} < {self.min_match}")


@dataclass(frozen=True, slots=True)
class ThresholdPolicy:
    """`hvd_tau`: the cache's draft iff its predicted payoff exceeds tau (HVD, 2606.01019).

    Below tau the model drafter takes over; where there is none, the target decodes plainly.
    """

    estimator: PayoffEstimator
    tau: float = 6.0

    def decide(self, candidates: Candidates, context: DecodeContext) -> Decision:
        draft = candidates.cache
        if not draft.token_ids:
            return _model_or_none(candidates, "no cache draft")
        payoff = self.estimator.expected_length(draft, context)
        if payoff > self.tau:
            decision = _cache(draft, f"payoff {payoff:.1f} > tau {self.tau:g}")
        else:
            decision = _model_or_none(candidates, f"payoff {payoff:.1f} <= tau {self.tau:g}")
        return Decision(decision.source, decision.length, payoff, self.tau, decision.reason)


def is_rule(policy: Policy | None) -> bool:
    """Whether it takes the cache's drafts as they were published (`SuffixConfig.for_rules`)."""
    return isinstance(policy, AlwaysCache | ScoreRule | MatchRule)
