"""The wide loss of EAGLE-3 training, fused with the output projection.

Soft cross-entropy against the target's distribution restricted to the draft vocabulary (EAGLE-3,
section 3). Written plainly, a row's logits are read and written half a dozen times and the loss
is bound by memory; here each chunk of rows stays in the processor's cache from the projection to
the gradient, and nothing as wide as the vocabulary is kept.

Shapes: N rows, V draft vocabulary, H width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

ROWS_PER_CHUNK = 128


@torch.no_grad()
def target_probs(final_NH: Tensor, target_head_VH: Tensor) -> Tensor:
    """The target's distribution over the draft vocabulary, NV, in the head's dtype."""
    probs = [
        F.linear(chunk, target_head_VH).float().softmax(-1).to(target_head_VH.dtype)
        for chunk in torch.split(final_NH, ROWS_PER_CHUNK)
    ]
    return torch.cat(probs)


class _FusedSoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        head_VH: Tensor,
        probs_MV: Tensor,
        row_N: Tensor,
        weight_N: Tensor,
        bias_V: Tensor,
    ) -> Tensor:
        grad_NH = torch.empty_like(hidden_NH)
        needs_head = ctx.needs_input_grad[1]
        grad_VH = torch.zeros_like(head_VH, dtype=torch.float32) if needs_head else None
        total = torch.zeros((), device=hidden_NH.device)
        for start in range(0, hidden_NH.shape[0], ROWS_PER_CHUNK):
            chunk = slice(start, start + ROWS_PER_CHUNK)
            weight_C1 = weight_N[chunk, None]
            probs_CV = probs_MV[row_N[chunk]].float()
            logits_CV = F.linear(hidden_NH[chunk], head_VH).float().add_(bias_V)
            log_probs_CV = logits_CV.log_softmax(-1)
            total += -(weight_C1[:, 0] * torch.linalg.vecdot(probs_CV, log_probs_CV)).sum()
            error_CV = log_probs_CV.exp_().sub_(probs_CV).mul_(weight_C1).to(head_VH.dtype)
            grad_NH[chunk] = error_CV @ head_VH
            if grad_VH is not None:
                grad_VH += (error_CV.T @ hidden_NH[chunk]).float()
        ctx.save_for_backward(grad_NH, *([] if grad_VH is None else [grad_VH.to(head_VH.dtype)]))
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_NH, *rest = ctx.saved_tensors
        scale = grad_outputs[0]
        return grad_NH * scale, rest[0] * scale if rest else None, None, None, None, None


def soft_cross_entropy(
    hidden_NH: Tensor,
    head_VH: Tensor,
    probs_MV: Tensor,
    row_N: Tensor,
    weight_N: Tensor,
    *,
    bias_V: Tensor | None = None,
) -> Tensor:
    """Sum over rows of weight * cross-entropy; row n's target is `probs_MV[row_N[n]]`.

    `bias_V` is added to the logits: the correction for classes that stand for others.
    """
    bias_V = hidden_NH.new_zeros((), dtype=torch.float32) if bias_V is None else bias_V
    apply: Callable[..., Tensor] = _FusedSoftCrossEntropy.apply
    return apply(hidden_NH, head_VH, probs_MV, row_N, weight_N, bias_V)


@dataclass(frozen=True)
class SampledClasses:
    """The part of the draft vocabulary that one batch's loss looks at."""

    index_C: Tensor
    bias_C: Tensor

    def take(self, probs_MV: Tensor) -> Tensor:
        """The target's probabilities of these classes, renormalised."""
        probs_MC = probs_MV[:, self.index_C]
        return probs_MC / probs_MC.sum(-1, keepdim=True).clamp_min(1e-6)


@torch.no_grad()
def sample_classes(probs_MV: Tensor, *, num_likely: int, num_random: int) -> SampledClasses:
    """The classes likeliest over the batch, and a random few that stand for all others.

    The random ones carry log(others / num_random) in the logits, so that the normaliser of a row
    is estimated without bias (importance sampling): the gradient that pushes the unlikely down is
    kept at a fraction of the width.
    """
    vocab = probs_MV.shape[-1]
    if num_likely + num_random >= vocab:
        everything_V = torch.arange(vocab, device=probs_MV.device)
        return SampledClasses(everything_V, torch.zeros_like(everything_V, dtype=torch.float32))
    order_V = probs_MV.float().sum(0).argsort(descending=True)
    likely, others = order_V[:num_likely], order_V[num_likely:]
    chosen = others[torch.randperm(len(others), device=others.device)[:num_random]]
    bias = torch.zeros(num_likely + num_random, device=probs_MV.device)
    bias[num_likely:] = math.log(len(others) / num_random)
    return SampledClasses(torch.cat((likely, chosen)), bias)
