"""From the target's logits to its sampling distribution, row by row.

Row i of a verified draft sees the prefix and `draft[:i]`, so penalties, `min_tokens` and biases
act on every verified row exactly as they would step by step. The order is vLLM's: bias and
minimum length, penalties, temperature, min-p, top-k, top-p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hvd_ray.errors import UserError
from hvd_ray.types import Int32Array, SamplingParams, TokenLogprobs

# Shapes: V vocabulary; K candidates of a truncated distribution.

_NUCLEUS_GUESS = 256


@dataclass(slots=True)
class RowDistribution:
    """The target's distribution of one request, at any row.

    Raises:
        UserError: a token id in the sampling parameters is not in the vocabulary.
    """

    sampling: SamplingParams
    prompt_token_ids: Int32Array
    eos_token_ids: tuple[int, ...]
    vocab_size: int

    def __post_init__(self) -> None:
        for name in ("logit_bias", "stop_token_ids"):
            for token in getattr(self.sampling, name):
                if token >= self.vocab_size:
                    raise UserError(
                        f"sampling: {name} names token {token}, but the vocabulary has "
                        f"{self.vocab_size} tokens"
                    )

    @property
    def is_plain(self) -> bool:
        """Whether the logits need no change before the arg max."""
        sampling = self.sampling
        return not (sampling.needs_history or sampling.logit_bias or sampling.min_tokens)

    def logits(self, logits_V: torch.Tensor, output_ids: Int32Array) -> torch.Tensor:
        """Bias, minimum length and penalties applied to one row; the input is left alone.

        Args:
            logits_V: float, the row's logits.
            output_ids: int32, all output tokens before this row, drafted ones included.

        Raises:
            UserError: no token is left that may come next.
        """
        if self.is_plain:
            return logits_V
        logits_V = logits_V.clone()
        for token, bias in self.sampling.logit_bias.items():
            logits_V[token] += bias
        if len(output_ids) < self.sampling.min_tokens:
            forbidden = [*self.eos_token_ids, *self.sampling.stop_token_ids]
            logits_V[forbidden] = -torch.inf
            if not bool(torch.isfinite(logits_V).any()):
                raise UserError("sampling: min_tokens and the stop tokens forbid every token")
        if self.sampling.needs_history:
            self._penalise(logits_V, output_ids)
        return logits_V

    def probs(self, logits_V: torch.Tensor, output_ids: Int32Array) -> torch.Tensor:
        """The sampling distribution of one row, in float64, shape [V]; sums to one.

        A temperature of zero gives a one-hot distribution at the arg max.
        """
        logits_V = self.logits(logits_V, output_ids)
        if self.sampling.is_greedy:
            one_hot_V = torch.zeros_like(logits_V, dtype=torch.float64)
            one_hot_V[int(logits_V.argmax())] = 1.0
            return one_hot_V
        scaled_V = (logits_V.double() - logits_V.max()) / self.sampling.temperature
        probs_V = torch.softmax(scaled_V, dim=-1)
        probs_V = self._truncate(probs_V)
        return probs_V / probs_V.sum()

    def _penalise(self, logits_V: torch.Tensor, output_ids: Int32Array) -> None:
        sampling = self.sampling
        seen, counts = np.unique(output_ids, return_counts=True)
        if sampling.repetition_penalty != 1:
            either = torch.from_numpy(np.union1d(seen, self.prompt_token_ids).astype(np.int64))
            values = logits_V[either]
            factor = sampling.repetition_penalty
            logits_V[either] = torch.where(values > 0, values / factor, values * factor)
        if len(seen):
            of_output = torch.from_numpy(seen.astype(np.int64))
            counts_K = torch.from_numpy(counts).to(logits_V)
            values = logits_V[of_output] - sampling.frequency_penalty * counts_K
            logits_V[of_output] = values - sampling.presence_penalty

    def _truncate(self, probs_V: torch.Tensor) -> torch.Tensor:
        """Zero what min-p, then top-k, then top-p rule out; the arg max always stays."""
        sampling = self.sampling
        if sampling.min_p > 0:
            floor = sampling.min_p * probs_V.max()
            probs_V = torch.where(probs_V >= floor, probs_V, 0.0)
        if 0 < sampling.top_k < self.vocab_size:
            kth = torch.topk(probs_V, sampling.top_k).values[-1]
            probs_V = torch.where(probs_V >= kth, probs_V, 0.0)
        if sampling.top_p < 1:
            probs_V = _nucleus(probs_V, sampling.top_p)
        return probs_V


def _nucleus(probs_V: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the most likely tokens up to and with the one that reaches `top_p` of the mass.

    Most rows are decided by their first few hundred tokens, so the full sort is a fall-back.
    """
    wanted = top_p * probs_V.sum()
    size = min(_NUCLEUS_GUESS, len(probs_V))
    values_K, indices_K = torch.topk(probs_V, size)
    if values_K.sum() < wanted:
        values_K, indices_K = torch.sort(probs_V, descending=True, stable=True)
    before_K = values_K.cumsum(0) - values_K
    kept = indices_K[before_K < wanted]
    nucleus_V = torch.zeros_like(probs_V)
    nucleus_V[kept] = probs_V[kept]
    return nucleus_V


def token_logprobs(
    logits_TV: torch.Tensor, token_ids: Sequence[int], num_top: int
) -> tuple[TokenLogprobs, ...]:
    """The target's own log-probabilities of emitted tokens, before any sampling change.

    Args:
        logits_TV: raw logits, one row for each token.
        token_ids: the T emitted tokens.
        num_top: how many of the most likely tokens to list.
    """
    logprobs_TV = torch.log_softmax(logits_TV[: len(token_ids)].float(), dim=-1)
    chosen_T = logprobs_TV[torch.arange(len(token_ids)), list(token_ids)]
    ranks_T = (logprobs_TV > chosen_T[:, None]).sum(dim=-1) + 1
    top = torch.topk(logprobs_TV, num_top, dim=-1) if num_top else None
    return tuple(
        TokenLogprobs(
            float(chosen_T[row]),
            int(ranks_T[row]),
            tuple(zip(top.indices[row].tolist(), top.values[row].tolist(), strict=True))
            if top
            else (),
        )
        for row in range(len(token_ids))
    )
