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
from hvd_ray.types import Draft, Int32Array, Verdict
from hvd_ray.verify.sampling import RowDistribution, token_logprobs

# Shapes: T = K + 1 verified rows, K draft length, V vocabulary.


@dataclass(slots=True)
class VerifyState:
    """What verification keeps for one request."""

    context: DecodeContext
    cache: KVCache
    distribution: RowDistribution
    random: RandomStream
    proposal_random: np.random.Generator
    """Numbers for accepting and replacing tokens of *sampled* drafts."""


class Verifier(Protocol):
    """Decides which draft tokens stand."""

    def verify(self, draft: Draft, state: VerifyState) -> Verdict:
        """Run the target over the uncached tokens and the draft.

        The cache may hold rejected rows afterwards; the caller truncates it once it knows what
        is committed.
        """
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
        forward = self.engine.forward(rows, state.cache, num_logits=len(draft) + 1)
        emitted = _choose_tokens(forward.logits_TV, draft, state)
        num_top = state.distribution.sampling.logprobs
        logprobs = () if num_top is None else token_logprobs(forward.logits_TV, emitted, num_top)
        return Verdict(
            accepted=len(emitted) - 1,
            token_ids=emitted,
            logprobs=logprobs,
            hidden=forward.hidden_TD,
            verify_us=(perf_counter() - started) * 1e6,
        )


def _choose_tokens(logits_TV: torch.Tensor, draft: Draft, state: VerifyState) -> tuple[int, ...]:
    distribution, sampling = state.distribution, state.distribution.sampling
    if sampling.is_greedy and distribution.is_plain:
        best_T = logits_TV.argmax(dim=-1).tolist()
        return accept_while_equal(draft.token_ids, best_T.__getitem__)
    num_generated = state.context.num_generated
    output_ids = _output_and_draft(state.context, draft)

    def best(row: int) -> int:
        row_logits_V = distribution.logits(logits_TV[row], output_ids[: num_generated + row])
        return int(row_logits_V.argmax())

    def probs(row: int) -> torch.Tensor:
        return distribution.probs(logits_TV[row], output_ids[: num_generated + row])

    if sampling.is_greedy:
        return accept_while_equal(draft.token_ids, best)
    if draft.proposal_probs_KV is not None:
        proposal_KV = torch.from_numpy(draft.proposal_probs_KV)
        return accept_sampled(draft.token_ids, proposal_KV, probs, state.proposal_random.random)
    return accept_while_equal(
        draft.token_ids, lambda row: pick(probs(row), state.random.uniform(num_generated + row))
    )


def _output_and_draft(context: DecodeContext, draft: Draft) -> Int32Array:
    output = context.token_ids.view(context.prompt_len)
    return np.concatenate([output, np.asarray(draft.token_ids, dtype=np.int32)])
