"""Own trees of requests that ended, for the next turn of the same conversation.

The prompt of a conversation's next turn begins with all that was said before. A tree grows token
by token, so going on from where the last turn left it gives the very tree that starting anew
would, at the price of the new tokens alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hvd_ray.types import Int32Array

if TYPE_CHECKING:
    from arctic_inference.suffix_decoding._C import SuffixTree

MAX_RESTING_TOKENS = 65_536
"""Over all trees at rest; the oldest leave first."""
MIN_TOKENS = 64
"""A shorter text is read again in less time than its tree is looked for."""


@dataclass(frozen=True, slots=True)
class _Resting:
    scope: str
    tree: SuffixTree
    token_ids: Int32Array

    def begins(self, prompt: Int32Array) -> bool:
        size = len(self.token_ids)
        return size <= len(prompt) and bool(np.array_equal(self.token_ids, prompt[:size]))


@dataclass(slots=True)
class RestingTrees:
    """Trees by what they hold; a scope only ever gets back what it has put in."""

    max_tokens: int = MAX_RESTING_TOKENS
    num_tokens: int = field(default=0, init=False)
    """Tokens of all trees at rest; never above `max_tokens`."""
    _trees: deque[_Resting] = field(default_factory=deque, init=False)
    """The oldest first."""

    def put(self, scope: str, tree: SuffixTree, token_ids: Int32Array) -> None:
        """Take over a tree that holds exactly `token_ids`, which are copied."""
        if not MIN_TOKENS <= len(token_ids) <= self.max_tokens:
            return
        self._trees.append(_Resting(scope, tree, np.array(token_ids)))
        self.num_tokens += len(token_ids)
        while self.num_tokens > self.max_tokens:
            self.num_tokens -= len(self._trees.popleft().token_ids)

    def take(self, scope: str, prompt: Int32Array) -> tuple[SuffixTree, int] | None:
        """The tree with the longest beginning of `prompt`, and that beginning's length."""
        fitting = [t for t in self._trees if t.scope == scope and t.begins(prompt)]
        if not fitting:
            return None
        best = max(fitting, key=lambda resting: len(resting.token_ids))
        self._keep(lambda resting: resting is not best)
        return best.tree, len(best.token_ids)

    def clear(self, scope: str | None = None) -> None:
        """Drop the trees of one scope, or of all."""
        self._keep(lambda resting: scope is not None and resting.scope != scope)

    def _keep(self, is_kept: Callable[[_Resting], bool]) -> None:
        self._trees = deque(resting for resting in self._trees if is_kept(resting))
        self.num_tokens = sum(len(resting.token_ids) for resting in self._trees)
