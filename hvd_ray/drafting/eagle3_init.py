"""Where a head starts: from the target's own layers, which a random start takes hours to reach.

The hidden half of the projections, the MLP and the norms are those of the target's last layer;
the embedding half is that of its first layer, which reads embeddings too. `fc` passes the
highest state through. The output projection holds the target's rows of the draft vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hvd_ray.drafting.eagle3 import Eagle3Config, Eagle3Weights
from hvd_ray.errors import UserError

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")


def default_aux_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """The layers whose input the head reads unless told otherwise (vLLM's default too)."""
    return (2, num_layers // 2, num_layers - 3)


def draft_vocabulary(
    outputs: Iterable[Sequence[int]], *, size: int, vocab_size: int, always: Sequence[int] = ()
) -> Tensor:
    """The target ids to draft, ascending: `always`, then the most frequent, then the lowest."""
    counts = Counter(token for output in outputs for token in output)
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    chosen = dict.fromkeys([*always, *ranked])
    return torch.tensor(sorted(list(chosen)[:size]))


def config_for_target(
    model: Any, *, draft_vocab_size: int, aux_layer_ids: Sequence[int] | None = None
) -> Eagle3Config:
    """The head's shape for a transformers model.

    Raises:
        UserError: the model's architecture is not one that the head is written for.
    """
    config = model.config
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise UserError(
            f"no EAGLE-3 head for targets of type {config.model_type!r}: expected one of "
            f"{', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    head_dim = getattr(config, "head_dim", None)
    return Eagle3Config(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=head_dim or config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=config.hidden_size,
        aux_layer_ids=tuple(aux_layer_ids or default_aux_layer_ids(config.num_hidden_layers)),
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_parameters["rope_theta"],
        max_position_embeddings=config.max_position_embeddings,
    )


@torch.no_grad()
def weights_from_target(model: Any, config: Eagle3Config, vocabulary_V: Tensor) -> Eagle3Weights:
    """float32 weights that start as the target's first and last layers (see the module)."""
    layers = model.model.layers
    first, last = layers[0], layers[-1]
    half = [_qkv(layer.self_attn) for layer in (first, last)]
    fc_HA = torch.zeros(config.hidden_size, config.aux_size)
    fc_HA[:, -config.target_hidden_size :] = torch.eye(config.hidden_size)
    return Eagle3Weights(
        embed_UH=model.model.embed_tokens.weight.detach(),
        fc_HA=fc_HA,
        qkv_PI=torch.cat(half, dim=1),
        o_HQ=_copy(last.self_attn.o_proj.weight),
        gate_up_GH=torch.cat((_copy(last.mlp.gate_proj.weight), _copy(last.mlp.up_proj.weight))),
        down_HF=_copy(last.mlp.down_proj.weight),
        input_norm_H=_copy(first.input_layernorm.weight),
        hidden_norm_H=_copy(last.input_layernorm.weight),
        post_attention_norm_H=_copy(last.post_attention_layernorm.weight),
        norm_H=_copy(model.model.norm.weight),
        lm_head_VH=_copy(model.lm_head.weight[vocabulary_V]),
        draft_to_target_V=vocabulary_V,
    )


def _qkv(attention: Any) -> Tensor:
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    return torch.cat([_copy(part.weight) for part in parts])


def _copy(weight: Tensor) -> Tensor:
    return weight.detach().float().clone()
