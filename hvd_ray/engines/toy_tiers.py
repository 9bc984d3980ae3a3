"""A toy engine with a slim model: two tables, of which the slim one is more or less like the other.

As in a real engine, target and slim model read the request separately, so a test can see what each
of them holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from hvd_ray.engines.base import EngineCapabilities, Forward, KVCache
from hvd_ray.engines.toy import ToyCache, ToyEngine
from hvd_ray.types import Int32Array


@dataclass(slots=True)
class ToyTieredCache:
    """What the target and the slim model have read."""

    target: ToyCache = field(default_factory=ToyCache)
    slim: ToyCache = field(default_factory=ToyCache)

    @property
    def length(self) -> int:
        return self.target.length

    @property
    def slim_length(self) -> int:
        return self.slim.length


@dataclass(slots=True)
class ToyTiers:
    """The target, and a slim model whose logits are a mixture of the target's and others."""

    target: ToyEngine
    closeness: float = 0.7
    """1: the slim model is the target; 0: it has nothing of it."""
    num_slim_passes: int = field(default=0, init=False)
    _other: ToyEngine = field(init=False)

    def __post_init__(self) -> None:
        target = self.target
        self._other = ToyEngine(target.vocab_size, target.order, target.seed + 1, target.sharpness)

    @property
    def capabilities(self) -> EngineCapabilities:
        return replace(self.target.capabilities, can_slim=True, has_trees=False)

    def new_cache(self) -> ToyTieredCache:
        return ToyTieredCache()

    def forward(
        self,
        token_ids: Int32Array,
        cache: KVCache,
        *,
        num_logits: int,
        parents: Sequence[int] = (),
    ) -> Forward:
        assert isinstance(cache, ToyTieredCache)
        assert not parents, "no trees behind a slim model"
        return self.target.forward(token_ids, cache.target, num_logits=num_logits)

    def keep(self, cache: KVCache, start: int, rows: Sequence[int]) -> None:
        del cache, start, rows
        raise AssertionError("no trees behind a slim model")

    def forward_slim(self, token_ids: Int32Array, cache: KVCache, *, num_logits: int) -> Forward:
        assert isinstance(cache, ToyTieredCache)
        assert 1 <= num_logits <= len(token_ids)
        self.num_slim_passes += 1
        held = cache.slim.token_ids
        held.extend(int(token) for token in token_ids)
        assert len(held) <= self.target.context_length, "a row past the context was computed"
        ends = range(len(held) - num_logits + 1, len(held) + 1)
        return Forward(torch.stack([self.slim_logits_after(held[:end]) for end in ends]))

    def truncate(self, cache: KVCache, length: int) -> None:
        assert isinstance(cache, ToyTieredCache)
        self.target.truncate(cache.target, length)
        self.target.truncate(cache.slim, length)

    def slim_logits_after(self, prefix: Sequence[int]) -> torch.Tensor:
        """float32 logits of the slim model for the token after `prefix`, shape [V]."""
        own, other = self.target.logits_after(prefix), self._other.logits_after(prefix)
        return self.closeness * own + (1 - self.closeness) * other
