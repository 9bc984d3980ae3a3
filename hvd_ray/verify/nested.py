"""Nested verification: draft -> slim model -> target, lossless by two exact steps.

The slim model verifies the draft as if it were the target, and may go on by itself, until some
*tentative* tokens stand that are distributed as its own; the target then verifies these, with the
slim model as their proposal. Exact because each step is (2211.17192, theorem 1, applied twice).

By default both steps use the position's own random numbers: the slim model takes the token that
it would sample with them, the target the one that *it* would, and tokens stand while the two agree.
The output is then token for token that of plain decoding with the same seed. With `is_sampled` the
outer step is textbook speculative sampling instead: accept with probability min(1, q / q'), else
sample (q - q')+. That keeps more tentative tokens at a temperature, and equals plain decoding in
distribution only. Greedy decoding is the same either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import cast

import numpy as np
import torch

from hvd_ray.engines.base import TieredCache, TieredEngine
from hvd_ray.types import NO_DRAFT, Draft, Int32Array, Source, Verdict
from hvd_ray.verify.exact import VerifyState, choose_tokens, output_with, wanted_logprobs

# Shapes: T verified rows, K tentative tokens, V vocabulary.


@dataclass(frozen=True, slots=True)
class Tentative:
    """What the slim model puts before the target."""

    token_ids: tuple[int, ...] = ()
    logits_KV: torch.Tensor | None = None
    """The slim model's rows behind them; None without tokens."""
    num_passes: int = 0


def tentative_run(
    engine: TieredEngine, draft: Draft, state: VerifyState, *, num_tokens: int
) -> Tentative:
    """The slim model's verification of a draft, continued by itself to `num_tokens` if it is short.

    Never longer than the room left, and never past an end of sequence: both are decided without
    looking at a token that is then dropped. Rows of rejected tokens are gone from its cache.
    """
    room = state.context.room
    token_ids: tuple[int, ...] = ()
    rows: list[torch.Tensor] = []
    num_passes = 0
    while len(token_ids) < room and (draft.token_ids or len(token_ids) < num_tokens):
        logits_TV = slim_logits(engine, draft, state, token_ids)
        emitted = choose_tokens(logits_TV, draft, state, token_ids)[: room - len(token_ids)]
        rows.append(logits_TV[: len(emitted)])
        token_ids += emitted
        num_passes += 1
        engine.truncate(state.cache, len(state.context.token_ids) + len(token_ids) - 1)
        draft = NO_DRAFT
        if token_ids[-1] in state.distribution.eos_token_ids:
            break
    return Tentative(token_ids, torch.cat(rows) if rows else None, num_passes)


def slim_logits(
    engine: TieredEngine, draft: Draft, state: VerifyState, ahead: Sequence[int] = ()
) -> torch.Tensor:
    """One slim pass over what it has not read, the tokens ahead and the draft; K + 1 rows."""
    cache = tiered(state)
    rows = uncached_rows(state, (*ahead, *draft.token_ids), start=cache.slim_length)
    return engine.forward_slim(rows, cache, num_logits=len(draft) + 1).logits_TV


def tiered(state: VerifyState) -> TieredCache:
    """The request's cache, which a tiered engine has made."""
    return cast(TieredCache, state.cache)


def uncached_rows(state: VerifyState, ahead: Sequence[int], *, start: int) -> Int32Array:
    """Committed tokens and those ahead, from position `start` on."""
    committed = state.context.token_ids
    following = np.asarray(ahead, dtype=np.int32)
    if start <= len(committed):
        return np.concatenate([committed.view(start), following])
    return following[start - len(committed) :]


Choice = Callable[[Tentative, torch.Tensor, VerifyState], tuple[int, ...]]
"""The tokens to emit, from what is tentative and the target's K + 1 rows over it."""


@dataclass(frozen=True, slots=True)
class NestedVerifier:
    """Every token is checked by the full target, a whole run of tentative tokens at a time."""

    engine: TieredEngine
    num_tentative: int = 4
    """The slim model goes on by itself until so many tokens are tentative; 0: it only thins
    drafts, and a cycle without a draft is plain decoding."""
    is_sampled: bool = False

    def verify(self, draft: Draft, state: VerifyState) -> Verdict:
        started = perf_counter()
        state.verification = "nested"
        run = tentative_run(self.engine, draft, state, num_tokens=self.num_tentative)
        return outer_verdict(self.engine, draft, run, state, self._choose, started)

    def finish(self, state: VerifyState) -> None:
        """Nothing was left for later."""

    def _choose(
        self, run: Tentative, logits_TV: torch.Tensor, state: VerifyState
    ) -> tuple[int, ...]:
        proposal = None
        if self.is_sampled and not state.distribution.sampling.is_greedy:
            proposal = slim_probs(run, state).cpu().numpy()
        tentative = Draft(Source.NONE, run.token_ids, proposal_probs_KV=proposal)
        return choose_tokens(logits_TV, tentative, state)


def slim_probs(run: Tentative, state: VerifyState) -> torch.Tensor:
    """float64, [K, V]: what each tentative token was sampled from."""
    if run.logits_KV is None:
        return torch.zeros(0, state.distribution.vocab_size, dtype=torch.float64)
    output_ids = output_with(state.context, run.token_ids)
    first = state.context.num_generated
    rows = [
        state.distribution.probs(logits_V, output_ids[: first + row])
        for row, logits_V in enumerate(run.logits_KV)
    ]
    return torch.stack(rows)


def outer_verdict(
    engine: TieredEngine,
    draft: Draft,
    run: Tentative,
    state: VerifyState,
    choose: Choice,
    started: float,
) -> Verdict:
    """The target's pass over the tentative run, and the verdict on draft and run."""
    rows = uncached_rows(state, run.token_ids, start=state.cache.length)
    forward = engine.forward(rows, state.cache, num_logits=len(run.token_ids) + 1)
    emitted = choose(run, forward.logits_TV, state)
    return Verdict(
        accepted=num_equal(draft.token_ids, emitted),
        token_ids=emitted,
        logprobs=wanted_logprobs(forward.logits_TV, emitted, state),
        hidden=forward.hidden_TD,
        verify_us=(perf_counter() - started) * 1e6,
        slim_passes=run.num_passes,
    )


def num_equal(draft_ids: Sequence[int], emitted: Sequence[int]) -> int:
    """Draft tokens that stand at the head of what is emitted."""
    pairs = enumerate(zip(draft_ids, emitted, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(draft_ids), len(emitted)))
