"""A request's own text as the cache looks it up, and such texts at rest between two turns.

The prompt of a conversation's next turn begins with all that was said before. Tree and counts grow
token by token, so going on from where the last turn left them gives the very same as starting
anew, at the price of the new tokens alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hvd_ray.drafting.ngram_table import NgramTable
from hvd_ray.types import Int32Array, TokenBuffer

if TYPE_CHECKING:
    from arctic_inference.suffix_decoding._C import SuffixTree

MAX_RESTING_TOKENS = 65_536
"""Over all texts at rest; the oldest leave first."""
MIN_TOKENS = 64
"""A shorter text is read again in less time than it is looked for."""


@dataclass(slots=True)
class OwnText:
    """Prompt and output of one request."""

    tree: SuffixTree
    token_ids: TokenBuffer = field(default_factory=TokenBuffer)
    counts: NgramTable = field(default_factory=lambda: NgramTable(has_places=True))

    def __len__(self) -> int:
        return len(self.token_ids)

    def extend(self, new_ids: Int32Array) -> None:
        start = len(self.token_ids)
        self.token_ids.extend(new_ids)
        self.tree.extend_ndarray(0, new_ids)
        self.counts.extend(self.token_ids.view(), start)

    def begins(self, prompt: Int32Array) -> bool:
        size = len(self)
        return size <= len(prompt) and bool(np.array_equal(self.token_ids.view(), prompt[:size]))


@dataclass(slots=True)
class RestingTexts:
    """Texts of requests that ended; a scope only ever gets back what it has put in."""

    max_tokens: int = MAX_RESTING_TOKENS
    num_tokens: int = field(default=0, init=False)
    """Tokens of all texts at rest; never above `max_tokens`."""
    _texts: deque[tuple[str, OwnText]] = field(default_factory=deque, init=False)
    """Scope and text, the oldest first."""

    def put(self, scope: str, text: OwnText) -> None:
        """Take over a text that nobody extends any more."""
        if not MIN_TOKENS <= len(text) <= self.max_tokens:
            return
        self._texts.append((scope, text))
        self.num_tokens += len(text)
        while self.num_tokens > self.max_tokens:
            self.num_tokens -= len(self._texts.popleft()[1])

    def take(self, scope: str, prompt: Int32Array) -> OwnText | None:
        """The longest text with which `prompt` begins, or None; it is handed out once."""
        fitting = [text for owner, text in self._texts if owner == scope and text.begins(prompt)]
        if not fitting:
            return None
        best = max(fitting, key=len)
        self._keep(lambda _owner, text: text is not best)
        return best

    def clear(self, scope: str | None = None) -> None:
        """Drop the texts of one scope, or of all."""
        self._keep(lambda owner, _text: scope is not None and owner != scope)

    def _keep(self, is_kept: Callable[[str, OwnText], bool]) -> None:
        self._texts = deque(entry for entry in self._texts if is_kept(*entry))
        self.num_tokens = sum(len(text) for _, text in self._texts)
