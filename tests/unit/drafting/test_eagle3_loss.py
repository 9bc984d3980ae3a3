"""The fused loss equals the plain one, in value and gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from hvd_ray.drafting.eagle3_loss import soft_cross_entropy, target_probs


@pytest.mark.parametrize("num_rows", [1, 7, 300])
def test_fused_loss_equals_plain_loss(num_rows: int) -> None:
    rng = torch.Generator().manual_seed(num_rows)
    hidden_NH = torch.randn(num_rows, 16, generator=rng, requires_grad=True)
    head_VH = torch.randn(50, 16, generator=rng, requires_grad=True)
    probs_MV = torch.randn(9, 50, generator=rng).softmax(-1)
    row_N = torch.randint(9, (num_rows,), generator=rng)
    weight_N = torch.rand(num_rows, generator=rng)

    fused = soft_cross_entropy(hidden_NH, head_VH, probs_MV, row_N, weight_N)
    fused_grads = torch.autograd.grad(3 * fused, (hidden_NH, head_VH))
    log_probs_NV = F.linear(hidden_NH, head_VH).log_softmax(-1)
    plain = -(weight_N * (probs_MV[row_N] * log_probs_NV).sum(-1)).sum()
    plain_grads = torch.autograd.grad(3 * plain, (hidden_NH, head_VH))

    torch.testing.assert_close(fused, plain)
    torch.testing.assert_close(fused_grads, plain_grads, atol=1e-4, rtol=1e-4)


def test_a_frozen_projection_gets_no_gradient() -> None:
    hidden_NH = torch.randn(4, 8, requires_grad=True)
    head_VH = torch.randn(12, 8)
    loss = soft_cross_entropy(
        hidden_NH, head_VH, torch.full((4, 12), 1 / 12), torch.arange(4), torch.ones(4)
    )
    torch.autograd.backward(loss)
    assert hidden_NH.grad is not None
    assert head_VH.grad is None


def test_target_probs_are_rows_of_a_softmax() -> None:
    final_NH, head_VH = torch.randn(200, 8), torch.randn(12, 8)
    probs_NV = target_probs(final_NH, head_VH)
    torch.testing.assert_close(probs_NV, (final_NH @ head_VH.T).softmax(-1))
