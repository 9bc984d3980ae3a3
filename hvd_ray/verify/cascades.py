"""Speculative cascades (2405.19261): the target runs on every block and is heeded where it pays.

The output is exactly a known mixture of slim model and target, so the loss is bounded, but no pass
of the target is saved beyond those that speculation saves. Each rule says at which rows the
decoder *defers* to the target; the mixture is then sampled by speculative sampling with the slim
model as the proposal. q' is the slim model, q the target:

- Chow: defer where max q' < 1 - alpha. The target is not even looked at.
- Diff: defer where max q' < max q - alpha.
- OPT: defer where max q' < max q - alpha * TV(q', q).
- Token-v3: token by token, a token v is the slim model's to give where q(v) >= (1 - alpha) max q.

For greedy decoding, the confidences are those of temperature 1 and the tokens arg maxima.

Shapes: V vocabulary, T verified rows, K tentative tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from types import MappingProxyType
from typing import Protocol

import torch

from hvd_ray.engines.base import TieredEngine
from hvd_ray.types import Draft, Verdict, VerificationName
from hvd_ray.verify.exact import (
    FullVerifier,
    VerifyState,
    accept_sampled,
    accept_while_equal,
    output_with,
)
from hvd_ray.verify.nested import Tentative, outer_verdict, slim_probs, tentative_run


class Deferral(Protocol):
    """Which tokens of the slim model stand at a row; shape [V], the same for all or not."""

    def __call__(
        self, slim_V: torch.Tensor, full_V: torch.Tensor, alpha: float
    ) -> torch.Tensor: ...


def chow(slim_V: torch.Tensor, full_V: torch.Tensor, alpha: float) -> torch.Tensor:
    return (slim_V.max() >= 1 - alpha).expand_as(full_V)


def diff(slim_V: torch.Tensor, full_V: torch.Tensor, alpha: float) -> torch.Tensor:
    return (slim_V.max() >= full_V.max() - alpha).expand_as(full_V)


def opt(slim_V: torch.Tensor, full_V: torch.Tensor, alpha: float) -> torch.Tensor:
    distance = (slim_V - full_V).abs().sum() / 2
    return (slim_V.max() >= full_V.max() - alpha * distance).expand_as(full_V)


def token_v3(slim_V: torch.Tensor, full_V: torch.Tensor, alpha: float) -> torch.Tensor:
    del slim_V
    return full_V >= (1 - alpha) * full_V.max()


DEFERRALS: Mapping[VerificationName, Deferral] = MappingProxyType(
    {
        "cascade_chow": chow,
        "cascade_diff": diff,
        "cascade_opt": opt,
        "cascade_token_v3": token_v3,
    }
)


def mixture(slim_V: torch.Tensor, full_V: torch.Tensor, stands_V: torch.Tensor) -> torch.Tensor:
    """What a cascade samples from: q' where its tokens stand, q in place of the others."""
    deferred = (slim_V * ~stands_V).sum()
    return slim_V * stands_V + deferred * full_V


@dataclass(frozen=True, slots=True)
class CascadeVerifier:
    """Tentative tokens of the slim model, under a deferral rule instead of equality."""

    engine: TieredEngine
    name: VerificationName
    alpha: float = 0.1
    num_tentative: int = 4

    def verify(self, draft: Draft, state: VerifyState) -> Verdict:
        started = perf_counter()
        if not state.allows_loss:
            return FullVerifier(self.engine).verify(draft, state)
        state.verification = self.name
        run = tentative_run(self.engine, draft, state, num_tokens=self.num_tentative)
        return outer_verdict(self.engine, draft, run, state, self._choose, started)

    def finish(self, state: VerifyState) -> None:
        """Nothing was left for later."""

    def _choose(
        self, run: Tentative, logits_TV: torch.Tensor, state: VerifyState
    ) -> tuple[int, ...]:
        if state.distribution.sampling.is_greedy:
            return self._greedily(run, logits_TV, state)
        slim_KV = slim_probs(run, state)
        full_TV = [self._probs(logits_TV, row, run, state) for row in range(len(logits_TV))]

        def blended(row: int) -> torch.Tensor:
            if row == len(slim_KV):
                return full_TV[row]
            stands_V = DEFERRALS[self.name](slim_KV[row], full_TV[row], self.alpha)
            return mixture(slim_KV[row], full_TV[row], stands_V)

        return accept_sampled(run.token_ids, slim_KV, blended, state.proposal_random.random)

    def _greedily(
        self, run: Tentative, logits_TV: torch.Tensor, state: VerifyState
    ) -> tuple[int, ...]:
        output_ids, first = output_with(state.context, run.token_ids), state.context.num_generated

        def choose(row: int) -> int:
            before = output_ids[: first + row]
            full_V = state.distribution.logits(logits_TV[row], before)
            if row == len(run.token_ids) or run.logits_KV is None:
                return int(full_V.argmax())
            slim_V = state.distribution.logits(run.logits_KV[row], before)
            stands_V = DEFERRALS[self.name](slim_V.softmax(0), full_V.softmax(0), self.alpha)
            token = run.token_ids[row]
            return token if bool(stands_V[token]) else int(full_V.argmax())

        return accept_while_equal(run.token_ids, choose)

    def _probs(
        self, logits_TV: torch.Tensor, row: int, run: Tentative, state: VerifyState
    ) -> torch.Tensor:
        before = output_with(state.context, run.token_ids[:row])
        return state.distribution.probs(logits_TV[row], before)
