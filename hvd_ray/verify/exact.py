"""Lossless verification as pure functions, and the verifier that feeds them target passes.

Definitions. A *draft* of K tokens is verified by K + 1 rows of target logits: row i is the
target's view of position i given the prefix and `draft[:i]`. *Accepted* tokens are those the
target would have produced itself, counted to the first difference. The *bonus token* is the
target's own token at the row after the last accepted one. A cycle emits accepted + 1 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import numpy as np
import torch

from hvd_ray.context import DecodeContext
from hvd_ray.engines.base import Engine, KVCache
from hvd_ray.randomness import RandomStream, pick
from hvd_ray.types import Draft, Int32Array, TokenLogprobs, Verdict, VerificationName
from hvd_ray.verify.audit import LossLedger
from hvd_ray.verify.sampling import RowDistribution, token_logprobs

# Shapes: T = K + 1 verified rows, K draft length, V vocabulary, D width of the hidden states.

Choose = Callable[[int, tuple[int, ...]], int]
"""The target's own token at a row (0: after the prefix, 1 + i: after draft token i), given the
tokens that were accepted before it."""


@dataclass(slots=True)
class VerifyState:
    """What verification keeps for one request."""

    context: DecodeContext
    cache: KVCache
    distribution: RowDistribution
    random: RandomStream
    proposal_random: np.random.Generator
    """Numbers for accepting and replacing tokens of *sampled* drafts."""
    allows_loss: bool = False
    """Whether the request lets a slim model commit tokens that the target has not seen."""
    ledger: LossLedger | None = None
    """What such tokens have cost so far; None before the first."""
    verification: VerificationName = "full"
    """What has checked the request's tokens so far; the weakest that was used."""


class Verifier(Protocol):
    """Decides which draft tokens stand."""

    def verify(self, draft: Draft, state: VerifyState) -> Verdict:
        """Run the target over the uncached tokens and the draft.

        The cache may hold rejected rows afterwards; the caller truncates it once it knows what
        is committed.
        """
        ...

    def finish(self, state: VerifyState) -> None:
        """The request has ended and been answered; what was left for later is done now."""
        ...


def accept_while_equal(draft_ids: Sequence[int], choose: Callable[[int], int]) -> tuple[int, ...]:
    """Follow the target's own choices until one differs from the draft.

    `choose(i)` is the target's token at row i given `draft[:i]`: its arg max, or a sample from its
    distribution p. For a deterministic draft this *is* exact speculative sampling: a sample from p
    equals the drafted token x with probability p(x), and given that it differs it is distributed
    as p without x, renormalised (2211.17192, theorem 1, with a one-hot proposal).

    Returns:
        The accepted tokens and the bonus token.
    """
    emitted: list[int] = []
    for row in range(len(draft_ids) + 1):
        emitted.append(choose(row))
        if row == len(draft_ids) or emitted[row] != draft_ids[row]:
            break
    return tuple(emitted)


def accept_in_tree(
    draft_ids: Sequence[int], parents: Sequence[int], choose: Choose
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Follow the target's own choices down a tree until one is no child of the last.

    Where a tree's tokens were not sampled, this is exact for the same reason as in a chain: every
    token that stands is the target's own choice, whatever was drafted beside it.

    Returns:
        The accepted tokens and the bonus token; the indices of the accepted tokens in the draft.
    """
    child_of = {
        (parent, token): index
        for index, (parent, token) in enumerate(zip(parents, draft_ids, strict=True))
    }
    emitted: tuple[int, ...] = ()
    path: tuple[int, ...] = ()
    node: int | None = -1
    while node is not None:
        emitted += (choose(node + 1, emitted),)
        node = child_of.get((node, emitted[-1]))
        path += () if node is None else (node,)
    return emitted, path


def accept_sampled(
    draft_ids: Sequence[int],
    proposal_probs_KV: torch.Tensor,
    target_probs: Callable[[int], torch.Tensor],
    uniform: Callable[[], float],
) -> tuple[int, ...]:
    """Speculative sampling of a draft that was sampled from known distributions q.

    Accept x with probability min(1, p(x) / q(x)); at the first rejection sample the residual
    (p - q)+, renormalised; after K acceptances sample p (2211.17192, algorithm 1).

    Args:
        draft_ids: the K tokens, token i sampled from row i of `proposal_probs_KV`.
        proposal_probs_KV: q at each draft position.
        target_probs: p at row i given `draft[:i]`, shape [V].
        uniform: independent numbers in [0, 1).
    """
    for row, token in enumerate(draft_ids):
        probs_V, proposal_V = target_probs(row), proposal_probs_KV[row]
        if uniform() * float(proposal_V[token]) >= float(probs_V[token]):
            residual_V = (probs_V - proposal_V).clamp(min=0)
            return (*draft_ids[:row], pick(residual_V, uniform()))
    return (*draft_ids, pick(target_probs(len(draft_ids)), uniform()))


@dataclass(frozen=True, slots=True)
class FullVerifier:
    """Every token is checked by the full target; lossless."""

    engine: Engine

    def verify(self, draft: Draft, state: VerifyState) -> Verdict:
        started = perf_counter()
        context = state.context
        uncached = context.token_ids.view(state.cache.length)
        rows = np.concatenate([uncached, np.asarray(draft.token_ids, dtype=np.int32)])
        forward = self.engine.forward(
            rows, state.cache, num_logits=len(draft) + 1, parents=draft.parents
        )
        logits_TV, hidden_TD = forward.logits_TV, forward.hidden_TD
        if draft.parents:
            emitted, path = accept_in_tree(
                draft.token_ids, draft.parents, _chooser(logits_TV, state)
            )
            self.engine.keep(state.cache, state.cache.length - len(draft), path)
            logits_TV = logits_TV[[0, *(1 + node for node in path)]]
            hidden_TD = _on_path(hidden_TD, len(uncached), path)
        else:
            emitted = choose_tokens(logits_TV, draft, state)
        return Verdict(
            accepted=len(emitted) - 1,
            token_ids=emitted,
            logprobs=wanted_logprobs(logits_TV, emitted, state),
            hidden=hidden_TD,
            verify_us=(perf_counter() - started) * 1e6,
        )

    def finish(self, state: VerifyState) -> None:
        """Nothing was left for later."""


def wanted_logprobs(
    logits_TV: torch.Tensor, emitted: Sequence[int], state: VerifyState
) -> tuple[TokenLogprobs, ...]:
    """The target's own log-probabilities of the emitted tokens, if the request wants them."""
    num_top = state.distribution.sampling.logprobs
    return () if num_top is None else token_logprobs(logits_TV, emitted, num_top)


def choose_tokens(
    logits_TV: torch.Tensor, draft: Draft, state: VerifyState, ahead: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """The accepted tokens of a chain and the bonus token, by the model behind `logits_TV`.

    Args:
        logits_TV: one row more than the draft has tokens.
        draft: starts after the committed tokens and those `ahead`.
        state: of the request.
        ahead: tokens taken for granted that are not committed yet.
    """
    sampling = state.distribution.sampling
    if draft.proposal_probs_KV is not None and not sampling.is_greedy:
        probs = _row_probs(logits_TV, state)
        return accept_sampled(
            draft.token_ids,
            torch.from_numpy(draft.proposal_probs_KV).to(logits_TV.device),
            lambda row: probs(row, (*ahead, *draft.token_ids[:row])),
            state.proposal_random.random,
        )
    choose = _chooser(logits_TV, state)
    return accept_while_equal(
        draft.token_ids, lambda row: choose(row, (*ahead, *draft.token_ids[:row]))
    )


def _chooser(logits_TV: torch.Tensor, state: VerifyState) -> Choose:
    """The target's own choice at a row: its arg max, or a sample by the position's numbers."""
    distribution, sampling = state.distribution, state.distribution.sampling
    if sampling.is_greedy and distribution.is_plain:
        best_T = logits_TV.argmax(dim=-1).tolist()
        return lambda row, _before: int(best_T[row])
    if sampling.is_greedy:
        return lambda row, before: int(
            distribution.logits(logits_TV[row], output_with(state.context, before)).argmax()
        )
    probs, num_generated = _row_probs(logits_TV, state), state.context.num_generated
    return lambda row, before: state.random.sample(probs(row, before), num_generated + len(before))


def _row_probs(
    logits_TV: torch.Tensor, state: VerifyState
) -> Callable[[int, tuple[int, ...]], torch.Tensor]:
    """The target's distribution at a row, given the draft tokens before it."""
    return lambda row, before: state.distribution.probs(
        logits_TV[row], output_with(state.context, before)
    )


def _on_path(
    hidden_TD: torch.Tensor | None, num_before: int, path: tuple[int, ...]
) -> torch.Tensor | None:
    """The rows before a tree and those of its accepted path, as if it had been a chain."""
    if hidden_TD is None:
        return None
    return hidden_TD[[*range(num_before), *(num_before + node for node in path)]]


def own_token(logits_V: torch.Tensor, output_ids: Int32Array, state: VerifyState) -> int:
    """The token that a model with these logits takes after `output_ids`: its arg max, or the
    sample that belongs to the position."""
    if state.distribution.sampling.is_greedy:
        return int(state.distribution.logits(logits_V, output_ids).argmax())
    probs_V = state.distribution.probs(logits_V, output_ids)
    return state.random.sample(probs_V, len(output_ids))


def output_with(context: DecodeContext, token_ids: Sequence[int]) -> Int32Array:
    """The committed output and what may follow it."""
    output = context.token_ids.view(context.prompt_len)
    return np.concatenate([output, np.asarray(token_ids, dtype=np.int32)])
