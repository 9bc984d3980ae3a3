"""The fused loss equals the plain one, in value and gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from hvd_ray.drafting.eagle3_loss import sample_classes, soft_cross_entropy, target_probs


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


def test_all_classes_are_taken_where_there_are_few() -> None:
    classes = sample_classes(torch.rand(3, 12), num_likely=8, num_random=8)
    assert classes.index_C.tolist() == list(range(12))
    assert not classes.bias_C.any()


def test_sampled_normaliser_estimates_the_full_one() -> None:
    torch.manual_seed(0)
    hidden_NH, head_VH = 0.3 * torch.randn(6, 8), torch.randn(400, 8)
    probs_NV = torch.randn(6, 400).mul(3).softmax(-1)
    logits_NV = hidden_NH @ head_VH.T
    full_N = logits_NV.exp().sum(-1)
    estimates = []
    for _ in range(400):
        classes = sample_classes(probs_NV, num_likely=100, num_random=30)
        assert len(set(classes.index_C.tolist())) == 130
        estimates.append((logits_NV[:, classes.index_C] + classes.bias_C).exp().sum(-1))
    torch.testing.assert_close(torch.stack(estimates).mean(0), full_N, rtol=0.03, atol=0.0)


def test_likely_classes_are_those_of_the_batch() -> None:
    probs_NV = torch.zeros(2, 10)
    probs_NV[0, 3], probs_NV[1, 7] = 0.9, 0.8
    classes = sample_classes(probs_NV, num_likely=2, num_random=1)
    assert set(classes.index_C[:2].tolist()) == {3, 7}
    torch.testing.assert_close(classes.take(probs_NV).sum(-1), torch.ones(2))
