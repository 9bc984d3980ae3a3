"""The seam between the decode loop and whatever computes the target's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hvd_ray.types import Int32Array

if TYPE_CHECKING:
    import torch

# Shapes: T rows of a pass, V vocabulary, D width of the hidden states handed out.


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """What an engine can do, stated by the engine and never probed."""

    name: str
    vocab_size: int
    context_length: int
    """The most tokens, prompt and output together, that a request may hold."""
    eos_token_ids: tuple[int, ...]
    dtype: str
    has_hidden: bool = False
    """Whether `forward` returns hidden states for a model drafter."""
    has_trees: bool = False
    """Whether `forward` takes trees."""
    can_slim: bool = False
    """Whether sub-models of the target can be run, see `TieredEngine`."""


class KVCache(Protocol):
    """The keys and values of one request; `length` committed or just-verified positions."""

    @property
    def length(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Forward:
    """The outcome of one target pass."""

    logits_TV: torch.Tensor
    """float32, the last `num_logits` rows."""
    hidden_TD: torch.Tensor | None = None
    """All rows of the pass, at the layers a model drafter reads, or None."""


class Engine(Protocol):
    """Computes target passes over a cache that can be rolled back.

    Life of a request: `new_cache`, then any number of `forward`, `keep` and `truncate`; dropping
    the cache ends it. `forward` appends its rows to the cache; `keep` reduces a tree to its
    accepted path, `truncate` forgets every position from `length` on, so that a rejected draft
    leaves no trace.
    """

    @property
    def capabilities(self) -> EngineCapabilities: ...

    def new_cache(self) -> KVCache: ...

    def forward(
        self,
        token_ids: Int32Array,
        cache: KVCache,
        *,
        num_logits: int,
        parents: Sequence[int] = (),
    ) -> Forward:
        """Run the target over `token_ids` placed after `cache.length` cached positions.

        Args:
            token_ids: int32, shape [T], T >= 1.
            cache: grows by T.
            num_logits: rows of logits wanted, counted from the end; 1..T.
            parents: makes the last rows a tree (see `Draft.parents`; -1 is the row before them),
                where `capabilities.has_trees`. Each sees its own path alone.
        """
        ...

    def keep(self, cache: KVCache, start: int, rows: Sequence[int]) -> None:
        """Of the positions from `start` on keep those at the rising offsets `rows`, moved up."""
        ...

    def truncate(self, cache: KVCache, length: int) -> None:
        """Forget the positions from `length` (<= `cache.length`) on."""
        ...


class TieredCache(KVCache, Protocol):
    """What target and slim model have read of one request; either may be ahead of the other."""

    @property
    def slim_length(self) -> int:
        """Positions that the slim model has read; `length` counts the target's."""
        ...


class TieredEngine(Engine, Protocol):
    """An engine that also runs a slim model: its target with some layers left out.

    `forward` is the target's pass as ever, over the rows from `cache.length` on, however far the
    slim model has read: what the slim model committed without it is back-filled there, and the
    hidden states of the pass begin at the first back-filled position. No position of the target's
    keys and values is ever the slim model's. `truncate` shortens both.
    """

    def forward_slim(self, token_ids: Int32Array, cache: KVCache, *, num_logits: int) -> Forward:
        """Run the slim model over `token_ids` placed after its `slim_length` positions.

        The tokens up to there must be those that a later `forward` is given for the same
        positions; `truncate` first where they are not.
        """
        ...
