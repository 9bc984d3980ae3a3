"""Tiered verification (VIA-SD, 2606.12243): some tokens are never seen by the target. Lossy.

One slim pass over the draft, then a plan from left to right: tokens that the gate accepts may
stand; at the first that it does not, the block ends with the slim model's own token, or, where the
gate escalates it, the whole block goes to the target. The target's pass also reads what was
committed without it, so its keys and values are its own at every position, and checks the block
exactly from its first token. A cycle without a draft is the target's: there is nothing a gate
could judge.

The plan is made before a token is drawn, from prefix, draft and what is left of the loss budget.
At a temperature each token of a block that is not the target's is then the slim model's sample with
the position's random numbers, up to the first that is not the draft's. So the law of every token is
exactly the slim model's or exactly the target's, and nothing drawn for the block decides which.
(Greedy decoding is as published: an accepted draft token stands even where the slim model's
arg max is another.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from time import perf_counter

import numpy as np
import torch

from hvd_ray.engines.base import TieredEngine
from hvd_ray.types import Draft, Verdict, VerificationName
from hvd_ray.verify.audit import Audit, LossLedger, Trust
from hvd_ray.verify.exact import (
    VerifyState,
    accept_while_equal,
    choose_tokens,
    output_with,
    own_token,
    wanted_logprobs,
)
from hvd_ray.verify.gate import Gate, GateRows, Judgement, Tier
from hvd_ray.verify.nested import num_equal, slim_logits, uncached_rows

# Shapes: K draft tokens, T = K + 1 rows, V vocabulary, A audited tokens.


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """How far a block may go without the target; nothing in it depends on a token drawn."""

    rows: GateRows
    num_accepted: int = 0
    """Draft tokens that the gate accepts."""
    losses: tuple[float, ...] = ()
    """Of each token that may stand, the chance that the target would not have chosen it. Empty:
    the target is asked."""


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
    """Expected wrong tokens that a request may hold; never exceeded."""
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
        plan = plan_block(self.gate, gate_rows(draft, logits_TV, state), state)
        plan = self._within_budget(plan, state)
        if self.audit.trust is Trust.PROBATION:
            return self._on_probation(draft, plan, state, started)
        self.num_blocks += 1
        if not plan.losses:
            self.num_escalated += 1
            return self._full(draft, state, started, slim_passes=1)
        return self._commit(draft, plan, logits_TV, state, started)

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
        return not state.ledger.is_closed and state.ledger.spent < self.loss_budget

    def _within_budget(self, plan: BlockPlan, state: VerifyState) -> BlockPlan:
        """The plan up to where it might exceed what is left to lose.

        Where not even its first token fits, the target is asked and the account is closed: later
        slim passes would be paid for nothing.
        """
        assert state.ledger is not None
        left = self.loss_budget - state.ledger.spent
        num_covered = sum(total <= left for total in accumulate(plan.losses))
        state.ledger.is_closed = bool(plan.losses) and num_covered == 0
        return replace(plan, losses=plan.losses[:num_covered])

    def _commit(
        self,
        draft: Draft,
        plan: BlockPlan,
        logits_TV: torch.Tensor,
        state: VerifyState,
        started: float,
    ) -> Verdict:
        assert state.ledger is not None
        emitted = unchecked_tokens(plan, state)
        state.ledger.spent += sum(plan.losses[: len(emitted)])
        state.verification = self.name
        return Verdict(
            accepted=num_equal(draft.token_ids, emitted),
            token_ids=emitted,
            logprobs=wanted_logprobs(logits_TV, emitted, state),
            verify_us=(perf_counter() - started) * 1e6,
            full_passes=0,
            slim_passes=1,
        )

    def _on_probation(
        self, draft: Draft, plan: BlockPlan, state: VerifyState, started: float
    ) -> Verdict:
        """The target decides; what would have passed is compared with what it chose."""
        verdict = self._full(draft, state, started, slim_passes=1)
        if plan.losses:
            unchecked = unchecked_tokens(plan, state)
            num_right = num_equal(unchecked, verdict.token_ids)
            num_seen = min(num_right + 1, len(unchecked))
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


def plan_block(gate: Gate, rows: GateRows, state: VerifyState) -> BlockPlan:
    """Follow the draft as far as the gate lets it go without the target.

    The first token that is not accepted ends the block, so no later one is judged: as published
    for greedy decoding, and the same at a temperature.
    """
    judged = gate.judge(rows)
    ends = (row for row, tier in enumerate(judged.tiers) if tier is not Tier.ACCEPT)
    num_accepted = next(ends, len(judged.tiers))
    is_whole = num_accepted == len(judged.tiers)
    if not is_whole and judged.tiers[num_accepted] is Tier.FULL:
        return BlockPlan(rows)
    losses = (*judged.draft_loss[:num_accepted], *judged.own_loss[num_accepted:])
    if not state.distribution.sampling.is_greedy:
        losses = sample_losses(rows, judged)
    num_tokens = num_accepted + int(judged.keeps_bonus or not is_whole)
    return BlockPlan(rows, num_accepted, losses[:num_tokens])


def sample_losses(rows: GateRows, judged: Judgement) -> tuple[float, ...]:
    """T chances that a sample of the slim model is not the target's choice.

    The gate knows of two tokens at a row, the draft's and the most likely one; every other counts
    as wrong. The sample itself is not looked at: the plan must not depend on it.
    """
    losses = []
    for row, own in enumerate(rows.own_ids):
        right = {own: 1 - judged.own_loss[row]}
        if row < len(rows.draft):
            right[rows.draft.token_ids[row]] = 1 - judged.draft_loss[row]
        probs_V = rows.probs_TV[row]
        losses.append(1 - sum(float(probs_V[token]) * prob for token, prob in right.items()))
    return tuple(losses)


def unchecked_tokens(plan: BlockPlan, state: VerifyState) -> tuple[int, ...]:
    """The tokens of a block that the target does not see."""
    rows, drafted, num_tokens = plan.rows, plan.rows.draft.token_ids, len(plan.losses)
    if state.distribution.sampling.is_greedy:
        planned = (*drafted[: plan.num_accepted], *rows.own_ids[plan.num_accepted :])
        return planned[:num_tokens]
    first = state.context.num_generated
    return accept_while_equal(
        drafted[: num_tokens - 1],
        lambda row: state.random.sample(rows.probs_TV[row], first + row),
    )


def gate_rows(draft: Draft, logits_TV: torch.Tensor, state: VerifyState) -> GateRows:
    """The slim model's distributions and arg maxima over a draft, as the request samples."""
    output_ids = output_with(state.context, draft.token_ids)
    first = state.context.num_generated
    befores = [output_ids[: first + row] for row in range(len(logits_TV))]
    rows = zip(logits_TV, befores, strict=True)
    own = [int(state.distribution.logits(*row).argmax()) for row in rows]
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
