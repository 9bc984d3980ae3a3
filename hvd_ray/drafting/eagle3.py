"""The EAGLE-3 head: one decoder layer that drafts from the target's hidden states.

Source: EAGLE-3, arXiv 2503.01840, section 3. The head at position t reads the target's *feature*
f_t (three hidden states of the target, fused by `fc`) beside the embedding of the token after it,
x_{t+1}, and predicts x_{t+2}. In a chain its own output stands in for the next feature.

Shapes: T rows, S rows in the KV cache, A width of the concatenated target states, H width of the
head, V draft vocabulary, h query heads, n key-value heads, D width of a head.

The forward pass is written by hand over plain tensors: at batch 1 on a CPU a step is a few
dispatches and the reading of the weights, and training runs the same functions under autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q_ThD, k_TnD, v_TnD), rotated -> context_TQ; what the rows may see is the callee's affair."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """Shape and variant of a head, named as the checkpoints name them."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    aux_layer_ids: tuple[int, ...]
    """The target layers whose *input* is read; the number of layers names the last output."""
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 2048
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    attention_bias: bool = False
    has_qk_norm: bool = False
    """Query and key are normed per head (Qwen3)."""
    rope_scaling: Mapping[str, Any] | None = None
    """Rotary scaling as in the checkpoint ("linear" or "llama3"); None for the plain table."""

    @property
    def query_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_key_value_heads * self.head_dim

    @property
    def head_splits(self) -> tuple[int, int]:
        """Where keys and values begin among the heads of the joint projection."""
        first = self.num_attention_heads
        return (first, first + self.num_key_value_heads)

    @property
    def aux_size(self) -> int:
        return len(self.aux_layer_ids) * self.target_hidden_size


@dataclass(frozen=True, kw_only=True)
class Eagle3Weights:
    """The tensors of a head; projections that share an input are one matrix.

    `embed_UH` has a row for each of the target's U tokens and may be the target's own tensor.
    """

    embed_UH: Tensor
    fc_HA: Tensor
    qkv_PI: Tensor  # P = query + key + value sizes; I = 2H, embedding half first
    o_HQ: Tensor
    gate_up_GH: Tensor
    down_HF: Tensor
    input_norm_H: Tensor
    hidden_norm_H: Tensor
    post_attention_norm_H: Tensor
    norm_H: Tensor
    lm_head_VH: Tensor
    draft_to_target_V: Tensor  # int64, the target's id of each draft id
    qkv_bias_P: Tensor | None = None
    q_norm_D: Tensor | None = None
    k_norm_D: Tensor | None = None
    input_norm_A: Tensor | None = None  # `norm_before_fc`
    fc_norm_A: Tensor | None = None  # `fc_norm`: one norm for each state, concatenated

    def to(self, dtype: torch.dtype) -> Eagle3Weights:
        """The same weights in another floating type; ids keep theirs."""
        cast = {
            name: tensor.to(dtype).contiguous()
            for name, tensor in self.named().items()
            if tensor.is_floating_point()
        }
        return replace(self, **cast)

    def on(self, device: torch.device) -> Eagle3Weights:
        """The same weights on another device."""
        return replace(self, **{name: each.to(device) for name, each in self.named().items()})

    def named(self) -> dict[str, Tensor]:
        """Every tensor that is present, by field name."""
        present = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in present.items() if tensor is not None}


class Eagle3KV:
    """Keys and values of one request: rows are appended and cut, storage doubles as needed."""

    def __init__(
        self,
        config: Eagle3Config,
        *,
        capacity: int = 512,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        shape = (config.num_key_value_heads, max(1, capacity), config.head_dim)
        self._keys_nSD = torch.empty(shape, dtype=dtype, device=device)
        self._values_nSD = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0

    def append(self, k_TnD: Tensor, v_TnD: Tensor) -> None:
        end = self.length + k_TnD.shape[0]
        if end > self._keys_nSD.shape[1]:
            self._grow(end)
        self._keys_nSD[:, self.length : end] = k_TnD.transpose(0, 1)
        self._values_nSD[:, self.length : end] = v_TnD.transpose(0, 1)
        self.length = end

    def truncate(self, length: int) -> None:
        """Forget every row from `length` on."""
        assert 0 <= length <= self.length, (length, self.length)
        self.length = length

    def keep(self, start: int, rows: Tensor) -> None:
        """Of the rows from `start` on keep `rows` (offsets, ascending): an accepted tree path."""
        index = rows + start
        end = start + len(rows)
        self._keys_nSD[:, start:end] = self._keys_nSD[:, index]
        self._values_nSD[:, start:end] = self._values_nSD[:, index]
        self.length = end

    def rows(self) -> tuple[Tensor, Tensor]:
        """Views of the keys and values, each nSD."""
        return self._keys_nSD[:, : self.length], self._values_nSD[:, : self.length]

    def _grow(self, needed: int) -> None:
        capacity = max(needed, 2 * self._keys_nSD.shape[1])
        for name in ("_keys_nSD", "_values_nSD"):
            old = getattr(self, name)
            new = old.new_empty((old.shape[0], capacity, old.shape[2]))
            new[:, : self.length] = old[:, : self.length]
            setattr(self, name, new)


class Eagle3Head:
    """The head's forward pass over `weights`; it holds no request's state."""

    def __init__(self, config: Eagle3Config, weights: Eagle3Weights) -> None:
        self.config = config
        self.weights = weights
        self._rope_cos_sin: tuple[Tensor, Tensor] | None = None

    def with_weights(self, weights: Eagle3Weights) -> Eagle3Head:
        """The same head over other weights, sharing the rotary table."""
        other = Eagle3Head(self.config, weights)
        if self.dtype == other.dtype:
            other._rope_cos_sin = self._rope_cos_sin
        return other

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.fc_HA.dtype

    @property
    def device(self) -> torch.device:
        return self.weights.fc_HA.device

    def new_kv(self, capacity: int = 512) -> Eagle3KV:
        return Eagle3KV(self.config, capacity=capacity, dtype=self.dtype, device=self.device)

    def combine(self, aux_TA: Tensor) -> Tensor:
        """Fuse the target's concatenated states into the first feature, TH."""
        weights, eps = self.weights, self.config.rms_norm_eps
        if weights.input_norm_A is not None:
            aux_TA = rms_norm(aux_TA, weights.input_norm_A, eps)
        if weights.fc_norm_A is not None:
            aux_TAH = aux_TA.view(*aux_TA.shape[:-1], -1, self.config.target_hidden_size)
            norm_AH = weights.fc_norm_A.view(aux_TAH.shape[-2:])
            normed = F.rms_norm(aux_TAH, aux_TAH.shape[-1:], None, eps) * norm_AH
            aux_TA = normed.flatten(-2)
        return F.linear(aux_TA, weights.fc_HA)

    def embed(self, token_ids_T: Tensor) -> Tensor:
        return F.embedding(token_ids_T, self.weights.embed_UH)

    def extend(
        self,
        kv: Eagle3KV,
        token_ids_T: Tensor,
        feature_TH: Tensor,
        *,
        positions_T: Tensor | None = None,
        mask_TS: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run rows through the layer, append them to `kv`; returns (normed_TH, feature_TH).

        Row t pairs a feature with the token *after* it. Rows see all of `kv` and each other
        causally, or by `mask_TS` (boolean, S counts the rows just appended) for a tree. The
        first result feeds `logits`; the second is the next step's feature.
        """
        end = None
        if positions_T is None:
            end = kv.length + len(token_ids_T)
            positions_T = torch.arange(kv.length, end, device=self.device)

        def attend(q_ThD: Tensor, k_TnD: Tensor, v_TnD: Tensor) -> Tensor:
            kv.append(k_TnD, v_TnD)
            return attend_cached(q_ThD, kv, mask_TS=mask_TS)

        return self.layer(self.embed(token_ids_T), feature_TH, positions_T, attend, end=end)

    def layer(
        self,
        embed_TH: Tensor,
        feature_TH: Tensor,
        positions_T: Tensor,
        attend: Attend,
        *,
        end: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The decoder layer; `attend` decides what a row sees. Returns (normed_TH, feature_TH).

        `end` is one beyond the last position, where it is known: reading it from the tensor waits
        for a GPU.
        """
        input_TI, residual_TH = self.layer_input(embed_TH, feature_TH)
        q_ThD, k_TnD, v_TnD = self.project(input_TI, positions_T, end=end)
        return self.layer_output(attend(q_ThD, k_TnD, v_TnD), residual_TH)

    def layer_output(self, context_TQ: Tensor, residual_TH: Tensor) -> tuple[Tensor, Tensor]:
        """What follows attention: output projection, MLP and the last norm."""
        weights, eps = self.weights, self.config.rms_norm_eps
        residual_TH = residual_TH + F.linear(context_TQ, weights.o_HQ)
        hidden_TH = rms_norm(residual_TH, weights.post_attention_norm_H, eps)
        gate_TF, up_TF = F.linear(hidden_TH, weights.gate_up_GH).chunk(2, dim=-1)
        residual_TH = residual_TH + F.linear(F.silu(gate_TF) * up_TF, weights.down_HF)
        normed_TH = rms_norm(residual_TH, weights.norm_H, eps)
        return normed_TH, normed_TH if self.config.norm_output else residual_TH

    def layer_input(self, embed_TH: Tensor, feature_TH: Tensor) -> tuple[Tensor, Tensor]:
        """The 2H-wide input of the projections and the residual."""
        weights, eps = self.weights, self.config.rms_norm_eps
        hidden_TH = rms_norm(feature_TH, weights.hidden_norm_H, eps)
        embed_TH = rms_norm(embed_TH, weights.input_norm_H, eps)
        residual_TH = hidden_TH if self.config.norm_before_residual else feature_TH
        return torch.cat((embed_TH, hidden_TH), dim=-1), residual_TH

    def project(
        self, input_TI: Tensor, positions_T: Tensor, *, end: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values; `end` as in `layer`."""
        config, weights = self.config, self.weights
        flat_TP = F.linear(input_TI, weights.qkv_PI, weights.qkv_bias_P)
        heads = flat_TP.view(len(flat_TP), -1, config.head_dim)
        first_key, first_value = config.head_splits
        rotated, v_TnD = heads[:, :first_value], heads[:, first_value:]
        if weights.q_norm_D is not None and weights.k_norm_D is not None:
            q_ThD = rms_norm(rotated[:, :first_key], weights.q_norm_D, config.rms_norm_eps)
            k_TnD = rms_norm(rotated[:, first_key:], weights.k_norm_D, config.rms_norm_eps)
            rotated = torch.cat((q_ThD, k_TnD), dim=1)
        # Both at once: half the dispatches.
        rotated = self.rotate(rotated, positions_T, end or int(positions_T.max()) + 1)
        return rotated[:, :first_key], rotated[:, first_key:], v_TnD

    def logits(self, normed_TH: Tensor) -> Tensor:
        """Logits over the draft vocabulary, TV."""
        return F.linear(normed_TH, self.weights.lm_head_VH)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """The target's token ids of draft ids."""
        return self.weights.draft_to_target_V[draft_ids]

    def rotate(self, x_ThD: Tensor, positions_T: Tensor, end: int) -> Tensor:
        """Rotary embedding, halves rotated (the layout of Llama and Qwen checkpoints); all
        positions are below `end`."""
        cos_SD, sin_SD = self._rope(end)
        cos_T1D, sin_T1D = cos_SD[positions_T].unsqueeze(1), sin_SD[positions_T].unsqueeze(1)
        first, second = x_ThD.chunk(2, dim=-1)
        turned_ThD = torch.cat((-second, first), dim=-1)
        return x_ThD * cos_T1D + turned_ThD * sin_T1D

    def _rope(self, num_positions: int) -> tuple[Tensor, Tensor]:
        if self._rope_cos_sin is None or self._rope_cos_sin[0].shape[0] < num_positions:
            # A whole context at once: growing row by row would rebuild it at every step.
            num_positions = max(num_positions, self.config.max_position_embeddings)
            angle = torch.arange(num_positions).float()[:, None] * rope_frequencies(self.config)
            angle_SD = torch.cat((angle, angle), dim=-1)
            self._rope_cos_sin = (
                angle_SD.cos().to(self.device, self.dtype),
                angle_SD.sin().to(self.device, self.dtype),
            )
        return self._rope_cos_sin


def rope_frequencies(config: Eagle3Config) -> Tensor:
    """Radians a position, for each pair of a head's dimensions."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequency = torch.pow(torch.tensor(config.rope_theta), -half)
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    factor = float(scaling["factor"])
    if (scaling.get("rope_type") or scaling.get("type")) == "linear":
        return frequency / factor
    # Llama 3.1: long waves are stretched, short ones kept, and those between are blended.
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    blended: Tensor = frequency * (kept + (1 - kept) / factor)
    return blended


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension."""
    normed: Tensor = F.rms_norm(x, weight.shape, weight, eps)
    return normed


def attend_cached(q_ThD: Tensor, kv: Eagle3KV, *, mask_TS: Tensor | None = None) -> Tensor:
    """Attention of the last T rows of `kv` over all of it: causal, or by a boolean mask."""
    k_nSD, v_nSD = kv.rows()
    num_rows, num_heads, head_dim = q_ThD.shape
    num_groups = k_nSD.shape[0]
    if num_rows == 1 and mask_TS is None:
        # One row sees everything: the heads of a group become rows and no mask is needed.
        q_ngD = q_ThD.view(num_groups, num_heads // num_groups, head_dim)
        context = F.scaled_dot_product_attention(q_ngD[None], k_nSD[None], v_nSD[None])
        return context.reshape(1, num_heads * head_dim)
    # A prompt from its first row on needs no mask of its square, with which a GPU would also write
    # out all scores: for 8,000 tokens 4 GB and more.
    is_causal = mask_TS is None and num_rows == kv.length
    if mask_TS is None and not is_causal:
        row_S = torch.arange(kv.length, device=q_ThD.device)
        mask_TS = row_S[None, :] <= row_S[-num_rows:, None]
    q_1hTD = q_ThD.transpose(0, 1)[None]
    context_1hTD = F.scaled_dot_product_attention(
        q_1hTD, k_nSD[None], v_nSD[None], attn_mask=mask_TS, is_causal=is_causal, enable_gqa=True
    )
    return context_1hTD[0].transpose(0, 1).reshape(num_rows, num_heads * head_dim)
