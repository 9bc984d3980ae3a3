"""Slim models on the torch engine: a prefix of the target's layers, or a mask of sublayers.

A *prefix* shares its keys and values with the target exactly; the target's pass resumes from the
hidden states at which the slim model left off, so its layers are computed once. A *mask* reads
other hidden states from its first gap on, so it keeps keys and values of its own, and the target
reads everything itself.

Shapes: T rows of a pass, D width, A width of the states handed out, V vocabulary, S cached rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from hvd_ray.engines.base import EngineCapabilities, Forward, KVCache, TieredEngine
from hvd_ray.engines.slim import SlimLayers
from hvd_ray.engines.torch_engine import TorchCache, TorchEngine
from hvd_ray.errors import NotSupportedError, UserError
from hvd_ray.types import Int32Array

PIECE_ROWS = 512
NO_TREES = "a tree cannot go through a slim model; its capabilities say so"


def torch_tiers(engine: TorchEngine, slim: SlimLayers) -> TieredEngine:
    """The engine with a slim model beside its target.

    Raises:
        NotSupportedError: the target's layers cannot be run one by one.
        UserError: the slim model is of a target with another number of layers.
    """
    if not engine.capabilities.can_slim:
        raise NotSupportedError(
            f"slim models of a target of type {engine.model.config.model_type!r}; "
            "have it verify in full"
        )
    num_layers = engine.model.config.get_text_config().num_hidden_layers
    if slim.num_layers != num_layers:
        raise UserError(
            f"slim model: made for {slim.num_layers} layers, the target has {num_layers}"
        )
    assert list(engine.hidden_layers) == sorted(engine.hidden_layers)
    if slim.exit_layer is None:
        return MaskTiers(engine, slim)
    return PrefixTiers(engine, slim.exit_layer)


@dataclass(frozen=True, slots=True)
class LayerWalk:
    """Runs some of a model's layers over some rows, by the model's own modules."""

    model: Any
    taps: tuple[int, ...] = ()
    """Layers whose input is kept for a model drafter."""

    @property
    def _stack(self) -> Any:
        return self.model.base_model

    def embed(self, token_ids: Int32Array) -> torch.Tensor:
        ids_BT = torch.from_numpy(token_ids.astype(np.int64))[None].to(self.model.device)
        embedded_BTD: torch.Tensor = self._stack.embed_tokens(ids_BT)
        return embedded_BTD

    def run(
        self,
        hidden_BTD: torch.Tensor,
        cache: TorchCache,
        *,
        past: int,
        layers: range,
        skipped: SlimLayers | None = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The hidden states after `layers`, and those entering the tapped ones among them.

        Args:
            hidden_BTD: the states entering the first of the layers.
            cache: grows by T in each layer whose attention is run.
            past: positions before the rows, which each such layer holds already.
            layers: consecutive.
            skipped: what to leave out of them.
        """
        num_rows = hidden_BTD.shape[1]
        position_BT = torch.arange(past, past + num_rows, device=hidden_BTD.device)[None]
        rotary = self._stack.rotary_emb(hidden_BTD, position_ids=position_BT)
        mask = _causal_mask(num_rows, past, hidden_BTD.device)
        tapped = []
        for index in layers:
            tapped += [hidden_BTD[0]] * self.taps.count(index)
            layer = self._stack.layers[index]
            if skipped is None or index not in skipped.skipped_attention:
                attended, _ = layer.self_attn(
                    hidden_states=layer.input_layernorm(hidden_BTD),
                    attention_mask=mask,
                    position_embeddings=rotary,
                    past_key_values=cache.layers,
                )
                hidden_BTD = hidden_BTD + attended
            if skipped is None or index not in skipped.skipped_mlp:
                hidden_BTD = hidden_BTD + layer.mlp(layer.post_attention_layernorm(hidden_BTD))
        return hidden_BTD, tapped

    def last_output(self, hidden_BTD: torch.Tensor) -> list[torch.Tensor]:
        """The states behind all layers, where they are tapped: normed, as transformers has them."""
        wanted = self.taps.count(len(self._stack.layers))
        return [self._stack.norm(hidden_BTD)[0]] * wanted

    def logits(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        logits_TV: torch.Tensor = self.model.lm_head(self._stack.norm(hidden_BTD))[0]
        return logits_TV.float()


def _causal_mask(num_rows: int, past: int, device: torch.device) -> torch.Tensor | None:
    """Which of S = past + T positions each of T rows may see; None where that is all of them."""
    if num_rows == 1:
        return None
    seen_TS = torch.ones(num_rows, past + num_rows, dtype=torch.bool, device=device)
    return seen_TS.tril(past)[None, None]


def _pieces(count: int, *, most_at_end: int) -> Iterator[slice]:
    """Long prompts are read in pieces; the last holds every row whose logits are wanted."""
    ends = [*range(PIECE_ROWS, count - most_at_end, PIECE_ROWS), count]
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        yield slice(start, end)


@dataclass(slots=True)
class MaskCache:
    """The target's keys and values, and the slim model's own."""

    target: TorchCache
    slim: TorchCache
    slim_length: int = 0

    @property
    def length(self) -> int:
        return self.target.length


@dataclass(frozen=True, slots=True)
class MaskTiers:
    """A slim model that skips sublayers anywhere."""

    engine: TorchEngine
    slim: SlimLayers

    @property
    def capabilities(self) -> EngineCapabilities:
        return replace(self.engine.capabilities, has_trees=False)

    def new_cache(self) -> MaskCache:
        return MaskCache(self.engine.new_cache(), self.engine.new_cache())

    def forward(
        self,
        token_ids: Int32Array,
        cache: KVCache,
        *,
        num_logits: int,
        parents: Sequence[int] = (),
    ) -> Forward:
        assert isinstance(cache, MaskCache)
        assert not parents, NO_TREES
        return self.engine.forward(token_ids, cache.target, num_logits=num_logits)

    def keep(self, cache: KVCache, start: int, rows: Sequence[int]) -> None:
        del cache, start, rows
        raise AssertionError(NO_TREES)

    @torch.inference_mode()
    def forward_slim(self, token_ids: Int32Array, cache: KVCache, *, num_logits: int) -> Forward:
        assert isinstance(cache, MaskCache)
        walk = LayerWalk(self.engine.model)
        layers = range(self.slim.num_layers)
        for piece in _pieces(len(token_ids), most_at_end=num_logits):
            rows_BTD = walk.embed(token_ids[piece])
            past = cache.slim_length
            hidden_BTD, _ = walk.run(
                rows_BTD, cache.slim, past=past, layers=layers, skipped=self.slim
            )
            cache.slim_length += hidden_BTD.shape[1]
        return Forward(walk.logits(hidden_BTD[:, -num_logits:]))

    def truncate(self, cache: KVCache, length: int) -> None:
        assert isinstance(cache, MaskCache)
        self.engine.truncate(cache.target, length)
        cache.slim.truncate(length)
        cache.slim_length = min(cache.slim_length, length)


@dataclass(slots=True)
class PrefixCache:
    """One set of keys and values: the lower layers may be ahead of the upper ones."""

    shared: TorchCache
    slim_length: int = 0
    exited: list[torch.Tensor] = field(default_factory=list)
    """BTD states after the lower layers, of the positions that the upper ones have not read."""
    tapped: list[torch.Tensor] = field(default_factory=list)
    """TA states for a model drafter from the lower layers, of the same positions."""
    exited_ids: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.slim_length - len(self.exited_ids)


@dataclass(frozen=True, slots=True)
class PrefixTiers:
    """A slim model that leaves after the first layers; the target goes on from there."""

    engine: TorchEngine
    exit_layer: int

    @property
    def capabilities(self) -> EngineCapabilities:
        return replace(self.engine.capabilities, has_trees=False)

    @property
    def _walk(self) -> LayerWalk:
        return LayerWalk(self.engine.model, self.engine.hidden_layers)

    @property
    def _upper(self) -> range:
        return range(self.exit_layer, self.engine.model.config.get_text_config().num_hidden_layers)

    def new_cache(self) -> PrefixCache:
        return PrefixCache(self.engine.new_cache())

    @torch.inference_mode()
    def forward_slim(self, token_ids: Int32Array, cache: KVCache, *, num_logits: int) -> Forward:
        assert isinstance(cache, PrefixCache)
        hidden_BTD = self._read_lower(token_ids, cache, num_logits)
        return Forward(self._walk.logits(hidden_BTD[:, -num_logits:]))

    def _read_lower(self, token_ids: Int32Array, cache: PrefixCache, num_last: int) -> torch.Tensor:
        """Run the lower layers and keep where they left off; the last piece's states."""
        for piece in _pieces(len(token_ids), most_at_end=num_last):
            hidden_BTD, tapped = self._walk.run(
                self._walk.embed(token_ids[piece]),
                cache.shared,
                past=cache.slim_length,
                layers=range(self.exit_layer),
            )
            cache.slim_length += hidden_BTD.shape[1]
            cache.exited.append(hidden_BTD)
            if tapped:
                cache.tapped.append(torch.cat(tapped, dim=-1))
        cache.exited_ids += token_ids.tolist()
        return hidden_BTD

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Int32Array,
        cache: KVCache,
        *,
        num_logits: int,
        parents: Sequence[int] = (),
    ) -> Forward:
        """The target's pass; rows that the slim model has read enter at the upper layers."""
        assert isinstance(cache, PrefixCache)
        assert not parents, NO_TREES
        num_exited = len(cache.exited_ids)
        assert token_ids[:num_exited].tolist() == cache.exited_ids, "not what the slim model read"
        if len(token_ids) > num_exited:
            self._read_lower(token_ids[num_exited:], cache, 1)
        hidden: list[torch.Tensor] = []
        lower_TA = torch.cat(cache.tapped) if cache.tapped else None
        exited_BTD = torch.cat(cache.exited, dim=1)
        past = cache.length
        for piece in _pieces(len(token_ids), most_at_end=num_logits):
            rows_BTD, tapped = self._walk.run(
                exited_BTD[:, piece], cache.shared, past=past + piece.start, layers=self._upper
            )
            if self.engine.hidden_layers:
                below = [] if lower_TA is None else [lower_TA[piece]]
                tapped += self._walk.last_output(rows_BTD)
                hidden.append(torch.cat([*below, *tapped], dim=-1))
        self._forget_exited(cache, 0)
        logits_TV = self._walk.logits(rows_BTD[:, -num_logits:])
        return Forward(logits_TV, torch.cat(hidden) if hidden else None)

    def keep(self, cache: KVCache, start: int, rows: Sequence[int]) -> None:
        del cache, start, rows
        raise AssertionError(NO_TREES)

    def truncate(self, cache: KVCache, length: int) -> None:
        assert isinstance(cache, PrefixCache)
        kept = max(0, length - cache.length)
        target_length = min(cache.length, length)
        if kept < len(cache.exited_ids):
            self._forget_exited(cache, kept)
        cache.slim_length = target_length + len(cache.exited_ids)
        cache.shared.truncate(cache.slim_length)

    def _forget_exited(self, cache: PrefixCache, kept: int) -> None:
        """Keep the first `kept` rows that await the upper layers."""
        cache.exited = _first(cache.exited, kept, dim=1)
        cache.tapped = _first(cache.tapped, kept, dim=0)
        del cache.exited_ids[kept:]


def _first(parts: Sequence[torch.Tensor], count: int, *, dim: int) -> list[torch.Tensor]:
    if count == 0 or not parts:
        return []
    return [torch.cat(list(parts), dim=dim).narrow(dim, 0, count)]
