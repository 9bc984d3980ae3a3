"""vLLM's verification of sampled requests on a CPU, as the plugin has mended it: the target's law.

Drafts of the plugin are deterministic, so vLLM accepts a token with the target's probability of it
and else draws from the rest; what comes out must follow the target, whatever was drafted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

pytest.importorskip("vllm")

from hvd_ray.vllm_plugin import compat

LOGITS_RV = torch.tensor([[2.0, 1.5, 1.0, 0.5, 0.0, -1.0], [0.0, 0.3, 2.2, 0.1, 1.9, 0.7]])
BONUS_V = torch.tensor([0.2, 1.2, 0.1, 0.9, 0.0, 0.4])
DRAFT = (1, 4)
KINDS = ((0.7, 3, 1.0), (1.3, 6, 1.0), (1.0, 6, 0.8), (0.0, 6, 1.0))
"""Temperature, top_k and top_p of the batch's requests, by turns; the last is greedy."""
NUM_EACH = 6000

# Shapes: R rows of a draft, V vocabulary, N requests.


@pytest.fixture
def mended(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.sample import rejection_sampler

    for name in ("expand_batch_to_tokens", "apply_sampling_constraints"):
        monkeypatch.setattr(rejection_sampler, name, getattr(rejection_sampler, name))
    compat.mend_cpu_sampling()


def sampling(num: int) -> Any:
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    kinds = [KINDS[i % len(KINDS)] for i in range(num)]
    none = torch.zeros(num)
    return SamplingMetadata(
        temperature=torch.tensor([k[0] for k in kinds]),
        all_greedy=False,
        all_random=False,
        top_p=torch.tensor([k[2] for k in kinds]),
        top_k=torch.tensor([k[1] for k in kinds], dtype=torch.int32),
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none,
        output_token_ids=[[] for _ in range(num)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def verify(num: int) -> np.ndarray:
    """What vLLM makes of the draft for `num` requests; -1 behind the end, [N, R + 1]."""
    _use_kernels_of_the_cpu()
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    rows = len(DRAFT) + 1
    metadata = SpecDecodeMetadata.make_dummy([list(DRAFT)] * num, torch.device("cpu"))
    places = torch.arange(num * rows, dtype=torch.int32).view(num, rows)
    metadata.target_logits_indices = places[:, :-1].reshape(-1)
    metadata.bonus_logits_indices = places[:, -1].contiguous()
    logits = torch.cat((LOGITS_RV, BONUS_V[None])).repeat(num, 1)
    torch.manual_seed(0)
    said = RejectionSampler(Sampler())(metadata, None, logits, sampling(num))
    return np.asarray(said.sampled_token_ids)


def _use_kernels_of_the_cpu() -> None:
    """As a worker does when it starts, where there is no Triton for CPUs."""
    from vllm.triton_utils import HAS_TRITON
    from vllm.triton_utils.dispatcher import KernelOverride
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample import rejection_sampler

    for name in ("rejection_greedy_sample", "rejection_random_sample", "sample_recovered_tokens"):
        owner = getattr(rejection_sampler, f"_{name}")
        if not HAS_TRITON and not isinstance(owner.kernel, KernelOverride):
            implementation = getattr(cpu_triton_utils, f"_{name}_kernel_impl")
            owner.kernel = KernelOverride(owner.kernel, implementation)


def law(logits_V: torch.Tensor, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """The probabilities that a request of this kind asks for."""
    if temperature == 0:
        return np.eye(len(logits_V))[int(logits_V.argmax())]
    probs_V = (logits_V.double() / temperature).softmax(0).numpy()
    order = np.argsort(-probs_V)
    probs_V[order[top_k:]] = 0
    probs_V /= probs_V.sum()
    before = np.cumsum(probs_V[order]) - probs_V[order]
    probs_V[order[before >= top_p]] = 0
    return probs_V / probs_V.sum()


def follows(tokens: np.ndarray, probs_V: np.ndarray) -> bool:
    counts = np.bincount(tokens, minlength=len(probs_V))
    if counts[probs_V == 0].any():
        return False
    known = probs_V > 0
    if known.sum() == 1:
        return True
    return bool(chisquare(counts[known], probs_V[known] * len(tokens)).pvalue > 1e-3)


@pytest.mark.usefixtures("mended")
def test_what_is_emitted_follows_the_target_whatever_was_drafted() -> None:
    emitted = verify(NUM_EACH * len(KINDS))
    for place, kind in enumerate(KINDS):
        of_kind = emitted[place :: len(KINDS)]
        assert follows(of_kind[:, 0], law(LOGITS_RV[0], *kind)), kind
        second = of_kind[of_kind[:, 0] == DRAFT[0], 1]
        third = of_kind[(of_kind[:, 0] == DRAFT[0]) & (of_kind[:, 1] == DRAFT[1]), 2]
        assert (of_kind[of_kind[:, 0] != DRAFT[0], 1] == -1).all()
        for tokens, logits_V in ((second, LOGITS_RV[1]), (third, BONUS_V)):
            assert not len(tokens) or follows(tokens, law(logits_V, *kind)), kind


def test_the_check_sees_vllms_own_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that get a temperature of their own making, as without the plugin, are found out."""
    from vllm.v1.sample import rejection_sampler

    def without(logits: Any, *_: Any) -> Any:
        return logits

    monkeypatch.setattr(rejection_sampler, "apply_sampling_constraints", without)
    emitted = verify(NUM_EACH * len(KINDS))
    kind = KINDS[0]
    assert not follows(emitted[:: len(KINDS), 0], law(LOGITS_RV[0], *kind))
