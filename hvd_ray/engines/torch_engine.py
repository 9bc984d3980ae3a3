"""The reference engine: a transformers causal LM with a KV cache that rolls back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from hvd_ray.config import Dtype
from hvd_ray.engines.base import EngineCapabilities, Forward, KVCache
from hvd_ray.engines.tree import tree_attention
from hvd_ray.errors import NotSupportedError, UserError
from hvd_ray.targets.loading import load_model, read_model_config
from hvd_ray.types import Int32Array

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Shapes: T rows of a pass, V vocabulary, D width, H key-value heads, S cached positions.

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PREFILL_ROWS = 512
_MASKED_ATTENTION = ("sdpa", "eager")
"""Implementations that take a mask of our own."""
_MAX_CAUSE_CHARS = 200
_SLIM_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model types whose layers are attention and MLP with a norm before each, and nothing else."""


class _GrowingLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped
    """Keys and values in a buffer that doubles, so that a row costs its own copy only.

    transformers' own layer copies the whole cache for every pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized: bool = False
        self.length = 0
        self._keys_HSD = torch.empty(0)
        self._values_HSD = torch.empty(0)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        end = self.length + key_states.shape[-2]
        self._reserve(end, key_states, value_states)
        self._keys_HSD[..., self.length : end, :] = key_states
        self._values_HSD[..., self.length : end, :] = value_states
        self.length = end
        return self._keys_HSD[..., :end, :], self._values_HSD[..., :end, :]

    def get_seq_length(self) -> int:
        return self.length

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)

    def keep(self, start: int, rows: torch.Tensor) -> None:
        end = start + len(rows)
        for states_HSD in (self._keys_HSD, self._values_HSD):
            states_HSD[..., start:end, :] = states_HSD[..., start + rows, :]
        self.length = end

    def _reserve(self, end: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        if not self.is_initialized:
            self.dtype, self.device = keys.dtype, keys.device
            self._keys_HSD, self._values_HSD = keys[..., :0, :], values[..., :0, :]
            self.is_initialized = True
        if end > self._keys_HSD.shape[-2]:
            capacity = max(256, 2 * end)
            self._keys_HSD = self._grown(self._keys_HSD, capacity)
            self._values_HSD = self._grown(self._values_HSD, capacity)

    def _grown(self, states: torch.Tensor, capacity: int) -> torch.Tensor:
        *heads, _, width = states.shape
        grown = states.new_empty(*heads, capacity, width)
        grown[..., : self.length, :] = states[..., : self.length, :]
        return grown


class TorchCache:
    """One request's keys and values."""

    def __init__(self, num_layers: int) -> None:
        self.growing = [_GrowingLayer() for _ in range(num_layers)]
        self.layers = Cache(layers=list(self.growing))

    @property
    def length(self) -> int:
        return self.growing[0].length

    def truncate(self, length: int) -> None:
        for layer in self.growing:
            layer.truncate(length)

    def keep(self, start: int, rows: torch.Tensor) -> None:
        for layer in self.growing:
            layer.keep(start, rows)


@dataclass(frozen=True, slots=True)
class TorchEngine:
    """Runs a transformers model on one device; requests are interleaved pass by pass.

    Build it with `load` (a folder or hub id) or `from_model` (a model at hand).
    """

    model: PreTrainedModel
    capabilities: EngineCapabilities
    hidden_layers: tuple[int, ...] = ()
    """Layers whose *input* is handed to a model drafter, concatenated (EAGLE-3, 2503.01840)."""

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: Dtype = "bfloat16",
        num_threads: int | None = None,
        hidden_layers: tuple[int, ...] = (),
    ) -> TorchEngine:
        """Load a model folder or hub id.

        Args:
            path: a transformers folder, or a hub id where the hub can be reached.
            dtype: of weights, activations and cache.
            num_threads: torch's threads on a CPU; None leaves torch's own choice.
            hidden_layers: layers whose input `forward` hands out.

        Raises:
            UserError: the model cannot be loaded.
            NotSupportedError: its cache cannot be rolled back, or it keeps none.
        """
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        _refuse_unless_croppable(read_model_config(path))
        model = load_model(path, dtype=_DTYPES[dtype])
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return cls.from_model(model.to(device), hidden_layers=hidden_layers)

    @classmethod
    def from_model(
        cls, model: PreTrainedModel, *, hidden_layers: tuple[int, ...] = ()
    ) -> TorchEngine:
        """Wrap a model that is already built.

        Raises:
            UserError: its configuration does not say how large it is, or what ends a text.
            NotSupportedError: its cache cannot be rolled back, or it keeps none.
        """
        _refuse_unless_croppable(model.config)
        config = model.config.get_text_config()
        _size(config, "num_hidden_layers")
        capabilities = EngineCapabilities(
            name="torch",
            vocab_size=_size(config, "vocab_size"),
            context_length=_size(config, "max_position_embeddings"),
            eos_token_ids=_eos_token_ids(model),
            dtype=str(model.dtype).removeprefix("torch."),
            has_hidden=bool(hidden_layers),
            has_trees=config._attn_implementation in _MASKED_ATTENTION,
            can_slim=config.model_type in _SLIM_TYPES and config._attn_implementation == "sdpa",
        )
        engine = cls(model.eval(), capabilities, hidden_layers)
        _refuse_unless_cached(engine)
        return engine

    def new_cache(self) -> TorchCache:
        return TorchCache(self.model.config.get_text_config().num_hidden_layers)

    def forward(
        self,
        token_ids: Int32Array,
        cache: KVCache,
        *,
        num_logits: int,
        parents: Sequence[int] = (),
    ) -> Forward:
        """One pass; a long prompt is read in pieces, of which only the last yields logits."""
        assert isinstance(cache, TorchCache)
        assert num_logits > len(parents), "every row of a tree is judged, and the one before it"
        hidden: list[torch.Tensor] = []
        ends = [*range(_PREFILL_ROWS, len(token_ids) - num_logits, _PREFILL_ROWS), len(token_ids)]
        start = 0
        for end in ends:
            tree = parents if end == len(token_ids) else ()
            logits_TV = self._pass(token_ids[start:end], cache, num_logits, hidden, tree)
            start = end
        return Forward(logits_TV.float(), torch.cat(hidden) if hidden else None)

    @torch.inference_mode()
    def _pass(
        self,
        token_ids: Int32Array,
        cache: TorchCache,
        num_logits: int,
        hidden: list[torch.Tensor],
        parents: Sequence[int],
    ) -> torch.Tensor:
        ids_BT = torch.from_numpy(token_ids.astype(np.int64))[None].to(self.model.device)
        output = self.model(
            ids_BT,
            past_key_values=cache.layers,
            use_cache=True,
            logits_to_keep=min(num_logits, len(token_ids)),
            output_hidden_states=bool(self.hidden_layers),
            **self._tree(parents, num_rows=len(token_ids), num_cached=cache.length),
        )
        if self.hidden_layers:
            states = [output.hidden_states[layer][0] for layer in self.hidden_layers]
            hidden.append(torch.cat(states, dim=-1))
        logits_TV: torch.Tensor = output.logits[0]
        return logits_TV

    def _tree(
        self, parents: Sequence[int], *, num_rows: int, num_cached: int
    ) -> dict[str, torch.Tensor]:
        """Mask and positions of a tree as the model takes them; nothing for a chain."""
        if not parents:
            return {}
        mask_TS, positions_T = tree_attention(parents, num_rows=num_rows, num_cached=num_cached)
        hidden = torch.finfo(self.model.dtype).min
        # Additive, which both of torch's own attentions understand.
        added_TS = torch.zeros(mask_TS.shape, dtype=self.model.dtype).masked_fill(~mask_TS, hidden)
        device = self.model.device
        return {
            "attention_mask": added_TS[None, None].to(device),
            "position_ids": positions_T[None].to(device),
        }

    @torch.inference_mode()
    def keep(self, cache: KVCache, start: int, rows: Sequence[int]) -> None:
        assert isinstance(cache, TorchCache)
        if list(rows) == list(range(len(rows))):  # they stand where they belong
            cache.truncate(start + len(rows))
        else:
            cache.keep(start, torch.tensor(rows, device=self.model.device))

    def truncate(self, cache: KVCache, length: int) -> None:
        assert isinstance(cache, TorchCache)
        cache.truncate(length)


def _refuse_unless_croppable(config: PretrainedConfig) -> None:
    """Sliding windows and recurrent states cannot be rolled back after a rejected draft."""
    layers = DynamicCache(config=config.get_text_config()).layers
    odd = {type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer}
    if odd:
        raise NotSupportedError(
            f"model type {config.model_type!r} keeps {', '.join(sorted(odd))} caches, which cannot "
            "forget a rejected draft; use a model with full attention in every layer"
        )


def _refuse_unless_cached(engine: TorchEngine) -> None:
    """A model with a state of its own may take a cache, leave it empty, and read every pass without
    what came before, in silence: RWKV does."""
    token_ids, cache = np.zeros(2, dtype=np.int32), engine.new_cache()
    try:
        engine.forward(token_ids, cache, num_logits=1)
        engine.forward(token_ids[:1], cache, num_logits=1)
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        cause = next(iter(str(error).splitlines()), type(error).__name__)
        raise NotSupportedError(
            f"model type {engine.model.config.model_type!r}: two tokens and one more after them "
            f"cannot be read ({cause[:_MAX_CAUSE_CHARS]})"
        ) from error
    lengths = {layer.length for layer in cache.growing}
    if lengths != {3}:
        held = ", ".join(str(length) for length in sorted(lengths))
        raise NotSupportedError(
            f"model type {engine.model.config.model_type!r} reads past its cache (3 tokens read, "
            f"its layers hold {held}), so a pass would not see the text before it; use a model "
            "with full attention in every layer"
        )


def _size(config: PretrainedConfig, name: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int) or value < 1:
        raise UserError(f"model {config._name_or_path}: {name} is {value!r}, expected 1 or more")
    return value


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """The generation config's, since chat models end turns on tokens of their own."""
    ids = model.generation_config.eos_token_id if model.generation_config else None
    if ids is None:
        ids = model.config.get_text_config().eos_token_id
    listed = () if ids is None else tuple(ids) if isinstance(ids, list | tuple) else (ids,)
    if not all(isinstance(token, int) for token in listed):
        raise UserError(f"model {model.config._name_or_path}: eos_token_id is {ids!r}, no token id")
    return listed


def quiet_libraries() -> None:
    """Keep transformers' own bars and notices off a terminal that shows ours."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
