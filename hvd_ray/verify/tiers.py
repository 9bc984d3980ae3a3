"""Tiered verification (VIA-SD, 2606.12243): some tokens are never seen by the target. Lossy.

One slim pass over the draft, then a walk from left to right: a token that the gate accepts stands,
one that it rewrites becomes the slim model's own and ends the block, one that it escalates sends
the whole block to the target. That pass also reads what was committed without it, so the target's
keys and values are its own at every position, and checks the block exactly from its first token.
A cycle without a draft is the target's: there is nothing a gate could judge.

At a temperature the slim model's own token is its sample with the position's random numbers; the
gate judges the *draft* token, which is a function of the prefix. Below `theta_escalate` the token
is the target's sample, otherwise the slim model's, whether it equals the draft or not. So every
token is distributed exactly as the slim model's or exactly as the target's, and which of the two is
decided by the prefix alone. (Greedy decoding is as published: an accepted draft token stands even
where the slim model's arg max is another.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import torch

from hvd_ray.engines.base import TieredEngine
from hvd_ray.types import Draft, Verdict, VerificationName
from hvd_ray.verify.audit import Audit, LossLedger, Trust
from hvd_ray.verify.exact import (
    VerifyState,
    choose_tokens,
    output_with,
    own_token,
    wanted_logprobs,
)
from hvd_ray.verify.gate import Gate, GateRows, Tier
from hvd_ray.verify.nested import num_equal, slim_logits, uncached_rows

# Shapes: K draft tokens, T = K + 1 rows, V vocabulary, A audited tokens.


@dataclass(frozen=True, slots=True)
class BlockWalk:
    """How far a block goes without the target."""

    token_ids: tuple[int, ...]
    loss: float
    """Expected number of them that the target would not have chosen."""
    is_escalated: bool


@dataclass(slots=True)
class TieredVerifier:
    """Commits what the gate passes, asks the target for the rest.

    A request that does not allow loss, or has spent its budget, is verified in full; so is every
    request while the audit withholds its trust.
    """

    engine: TieredEngine
    gate: Gate
    audit: Audit = field(default_factory=Audit)
    loss_budget: float = 1.0
    """Expected wrong tokens that a request may hold."""
    audit_share: float = 1.0
    """Share of the requests whose unchecked tokens are all read later."""
    name: VerificationName = "tiered"
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    num_escalated: int = 0
    num_blocks: int = 0

    def verify(self, draft: Draft, state: VerifyState) -> Verdict:
        started = perf_counter()
        assert not draft.is_sampled, "a gate looks at the draft; a sampled one would be biased"
        if not draft.token_ids or not self._may_skip(state):
            return self._full(draft, state, started)
        logits_TV = slim_logits(self.engine, draft, state)
        walk = walk_block(self.gate, draft, logits_TV, state)
        if self.audit.trust is Trust.PROBATION:
            return self._on_probation(draft, walk, state, started)
        self.num_blocks += 1
        if walk.is_escalated:
            self.num_escalated += 1
            return self._full(draft, state, started, slim_passes=1)
        return self._commit(draft, walk, logits_TV, state, started)

    def finish(self, state: VerifyState) -> None:
        """Read what an audited request's last tokens were worth."""
        if self._num_unread(state):
            rows = uncached_rows(state, (), start=state.cache.length)[:-1]
            forward = self.engine.forward(rows, state.cache, num_logits=self._num_unread(state))
            self._count(forward.logits_TV, state)

    def _may_skip(self, state: VerifyState) -> bool:
        if not state.allows_loss or self.audit.trust is Trust.WITHDRAWN:
            return False
        if state.ledger is None:
            state.ledger = LossLedger(is_audited=self.random.random() < self.audit_share)
        return state.ledger.spent < self.loss_budget

    def _commit(
        self,
        draft: Draft,
        walk: BlockWalk,
        logits_TV: torch.Tensor,
        state: VerifyState,
        started: float,
    ) -> Verdict:
        assert state.ledger is not None
        state.ledger.spent += walk.loss
        state.verification = self.name
        return Verdict(
            accepted=num_equal(draft.token_ids, walk.token_ids),
            token_ids=walk.token_ids,
            logprobs=wanted_logprobs(logits_TV, walk.token_ids, state),
            verify_us=(perf_counter() - started) * 1e6,
            full_passes=0,
            slim_passes=1,
        )

    def _on_probation(
        self, draft: Draft, walk: BlockWalk, state: VerifyState, started: float
    ) -> Verdict:
        """The target decides; what would have passed is compared with what it chose."""
        verdict = self._full(draft, state, started, slim_passes=1)
        if not walk.is_escalated:
            num_right = num_equal(walk.token_ids, verdict.token_ids)
            num_seen = min(num_right + 1, len(walk.token_ids))
            self.audit.add(num_tokens=num_seen, num_missed=num_seen - num_right)
        return verdict

    def _full(
        self, draft: Draft, state: VerifyState, started: float, *, slim_passes: int = 0
    ) -> Verdict:
        """The target's exact verification of a whole block, and the audit of what lies before."""
        num_rows, num_unread = len(draft) + 1, self._num_unread(state)
        rows = uncached_rows(state, draft.token_ids, start=state.cache.length)
        forward = self.engine.forward(rows, state.cache, num_logits=num_rows + num_unread)
        if num_unread:
            self._count(forward.logits_TV[:num_unread], state)
        logits_TV = forward.logits_TV[-num_rows:]
        emitted = choose_tokens(logits_TV, draft, state)
        return Verdict(
            accepted=num_equal(draft.token_ids, emitted),
            token_ids=emitted,
            logprobs=wanted_logprobs(logits_TV, emitted, state),
            hidden=forward.hidden_TD,
            verify_us=(perf_counter() - started) * 1e6,
            slim_passes=slim_passes,
        )

    def _num_unread(self, state: VerifyState) -> int:
        """Committed output tokens that an audit wants and the target has not judged yet.

        The target has judged the token after the last one that it has read.
        """
        if state.ledger is None or not state.ledger.is_audited:
            return 0
        context = state.context
        return len(context.token_ids) - max(state.cache.length + 1, context.prompt_len)

    def _count(self, logits_AV: torch.Tensor, state: VerifyState) -> None:
        """Compare the last A committed tokens with what the target would have chosen there."""
        output_ids = state.context.token_ids.view(state.context.prompt_len)
        first = len(output_ids) - len(logits_AV)
        num_missed = sum(
            own_token(logits_V, output_ids[: first + row], state) != output_ids[first + row]
            for row, logits_V in enumerate(logits_AV)
        )
        self.audit.add(num_tokens=len(logits_AV), num_missed=int(num_missed))


def walk_block(gate: Gate, draft: Draft, logits_TV: torch.Tensor, state: VerifyState) -> BlockWalk:
    """Follow the draft as far as the gate lets it go without the target."""
    rows = gate_rows(draft, logits_TV, state)
    judged = gate.judge(rows)
    is_greedy = state.distribution.sampling.is_greedy
    emitted: list[int] = []
    loss = 0.0
    for row, (token, tier) in enumerate(zip(draft.token_ids, judged.tiers, strict=True)):
        if tier is Tier.FULL:
            return BlockWalk((), 0.0, is_escalated=True)
        own = rows.own_ids[row]
        stands = tier is Tier.ACCEPT if is_greedy else own == token
        emitted.append(token if stands else own)
        loss += (judged.draft_loss if stands else judged.own_loss)[row]
        if not stands:
            return BlockWalk(tuple(emitted), loss, is_escalated=False)
    if judged.keeps_bonus:
        emitted.append(rows.own_ids[-1])
        loss += judged.own_loss[-1]
    return BlockWalk(tuple(emitted), loss, is_escalated=False)


def gate_rows(draft: Draft, logits_TV: torch.Tensor, state: VerifyState) -> GateRows:
    """The slim model's distributions and own tokens over a draft, as the request samples."""
    output_ids = output_with(state.context, draft.token_ids)
    first = state.context.num_generated
    befores = [output_ids[: first + row] for row in range(len(logits_TV))]
    own = [
        own_token(row_V, before, state) for row_V, before in zip(logits_TV, befores, strict=True)
    ]
    return GateRows(draft, _confidence(logits_TV, befores, state), tuple(own))


def _confidence(
    logits_TV: torch.Tensor, befores: Sequence[np.ndarray], state: VerifyState
) -> torch.Tensor:
    """[T, V]: the request's sampling distribution; for a greedy one, that of temperature 1."""
    distribution = state.distribution
    if distribution.sampling.is_greedy and distribution.is_plain:
        return torch.softmax(logits_TV, dim=-1)
    pairs = zip(logits_TV, befores, strict=True)
    if distribution.sampling.is_greedy:
        return torch.stack([torch.softmax(distribution.logits(*pair), dim=-1) for pair in pairs])
    return torch.stack([distribution.probs(*pair) for pair in pairs])
