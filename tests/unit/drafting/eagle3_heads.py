"""Small random heads and states for the tests beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from hvd_ray.drafting.eagle3 import Eagle3Config, Eagle3Head, Eagle3Weights
from hvd_ray.drafting.eagle3_responses import Response
from hvd_ray.drafting.eagle3_states import ResponseStates
from hvd_ray.engines.torch_engine import TorchEngine

SMALL = Eagle3Config(
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=64,
    draft_vocab_size=40,
    target_hidden_size=32,
    aux_layer_ids=(1, 2, 3),
    max_position_embeddings=128,
)


def random_head(
    *,
    variant: Callable[[Eagle3Config], Eagle3Config] = lambda config: config,
    config: Eagle3Config = SMALL,
    seed: int = 0,
) -> Eagle3Head:
    """A float32 head with random weights of a size that keeps activations near one."""
    config = variant(config)
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng) / shape[-1] ** 0.5

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.3 * torch.randn(size, generator=rng)

    hidden, inner = config.hidden_size, config.intermediate_size
    joint = config.query_size + 2 * config.kv_size
    ids = torch.randperm(config.vocab_size, generator=rng)[: config.draft_vocab_size]
    weights = Eagle3Weights(
        embed_UH=torch.randn(config.vocab_size, hidden, generator=rng),
        fc_HA=draw(hidden, config.aux_size),
        qkv_PI=draw(joint, 2 * hidden),
        o_HQ=draw(hidden, config.query_size),
        gate_up_GH=draw(2 * inner, hidden),
        down_HF=draw(hidden, inner),
        input_norm_H=norm(hidden),
        hidden_norm_H=norm(hidden),
        post_attention_norm_H=norm(hidden),
        norm_H=norm(hidden),
        lm_head_VH=draw(config.draft_vocab_size, hidden),
        draft_to_target_V=ids.sort().values,
        qkv_bias_P=norm(joint) if config.attention_bias else None,
        q_norm_D=norm(config.head_dim) if config.has_qk_norm else None,
        k_norm_D=norm(config.head_dim) if config.has_qk_norm else None,
        input_norm_A=norm(config.aux_size) if config.norm_before_fc else None,
        fc_norm_A=norm(config.aux_size) if config.fc_norm else None,
    )
    return Eagle3Head(config, weights)


def random_states(
    head: Eagle3Head, *, num_prompt: int, num_output: int, seed: int = 1
) -> ResponseStates:
    """Random tokens with random states, of the shapes a target would give."""
    rng = torch.Generator().manual_seed(seed + num_prompt)
    config = head.config
    tokens = torch.randint(config.vocab_size, (num_prompt + num_output,), generator=rng)
    num_rows = num_output + 1
    return ResponseStates(
        response=Response(
            prompt_id=f"p{seed}",
            family="code",
            workload="toy",
            temperature=0.0,
            prompt_token_ids=tuple(tokens[:num_prompt].tolist()),
            output_token_ids=tuple(tokens[num_prompt:].tolist()),
        ),
        token_ids_T=tokens,
        aux_TA=torch.randn(len(tokens), config.aux_size, generator=rng),
        final_RH=torch.randn(num_rows, config.target_hidden_size, generator=rng),
        greedy_R=torch.randint(config.vocab_size, (num_rows,), generator=rng),
    )


def head_of_words(
    target: TorchEngine, words: Sequence[int], *, layers: tuple[int, ...], **changes: Any
) -> Eagle3Head:
    """A random head for a target that may say a few words only, so that it is often right."""
    config = target.model.config
    head = random_head(
        variant=lambda base: replace(
            base,
            vocab_size=config.vocab_size,
            draft_vocab_size=len(words),
            target_hidden_size=config.hidden_size,
            aux_layer_ids=layers,
            **changes,
        )
    )
    return Eagle3Head(head.config, replace(head.weights, draft_to_target_V=torch.tensor(words)))
