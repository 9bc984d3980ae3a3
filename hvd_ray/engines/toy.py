"""An engine that is a table: tests and documentation run in milliseconds.

The next token's logits depend on the last `order` tokens through a seeded hash, so the "model" is
deterministic, has structure to draft from, and its exact distribution can be written down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from hvd_ray.engines.base import EngineCapabilities, Forward, KVCache
from hvd_ray.text import TextStream
from hvd_ray.types import Int32Array

EOS = 0
FIRST_LETTER = 97  # "a": token 1


@dataclass(slots=True)
class ToyCache:
    """Remembers its tokens, so that a test can see exactly what the cache holds."""

    token_ids: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True)
class ToyEngine:
    """A Markov chain of the given order behind the `Engine` seam."""

    vocab_size: int = 24
    order: int = 2
    seed: int = 0
    sharpness: float = 3.0
    """Standard deviation of the logits: the higher, the more predictable."""
    context_length: int = 512
    num_passes: int = field(default=0, init=False)
    _table: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict, init=False)

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            "toy",
            self.vocab_size,
            self.context_length,
            eos_token_ids=(EOS,),
            dtype="float32",
            has_trees=True,
        )

    def new_cache(self) -> ToyCache:
        return ToyCache()

    def forward(
        self,
        token_ids: Int32Array,
        cache: KVCache,
        *,
        num_logits: int,
        parents: Sequence[int] = (),
    ) -> Forward:
        assert isinstance(cache, ToyCache)
        assert len(parents) < num_logits <= len(token_ids)
        self.num_passes += 1
        cache.token_ids.extend(int(token) for token in token_ids)
        num_chain = cache.length - len(parents)
        first = cache.length - num_logits + 1
        prefixes = [cache.token_ids[:end] for end in range(first, num_chain + 1)]
        root = len(prefixes) - 1
        for row, parent in enumerate(parents):
            prefixes.append([*prefixes[root + 1 + parent], cache.token_ids[num_chain + row]])
        assert max(map(len, prefixes)) <= self.context_length, "a row past the context"
        return Forward(torch.stack([self.logits_after(prefix) for prefix in prefixes]))

    def keep(self, cache: KVCache, start: int, rows: Sequence[int]) -> None:
        assert isinstance(cache, ToyCache)
        cache.token_ids[start:] = [cache.token_ids[start + row] for row in rows]

    def truncate(self, cache: KVCache, length: int) -> None:
        assert isinstance(cache, ToyCache)
        del cache.token_ids[length:]

    def logits_after(self, prefix: Sequence[int]) -> torch.Tensor:
        """float32 logits of the token after `prefix`, shape [V]."""
        key = tuple(prefix[-self.order :])
        if key not in self._table:
            rng = np.random.default_rng([self.seed, *key])
            logits = rng.normal(0, self.sharpness, self.vocab_size).astype(np.float32)
            logits[EOS] -= self.sharpness
            self._table[key] = torch.from_numpy(logits)
        return self._table[key]


class _ToyStream:
    def push(self, token_id: int) -> str:
        return ToyCodec().decode([token_id])

    def flush(self) -> str:
        return ""


class ToyCodec:
    """Token `i` is the i-th lower-case letter; EOS has no text."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - FIRST_LETTER + 1 for letter in text]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode_rendered(self.render_chat(messages))

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        return "".join(message["content"] for message in messages)

    def encode_rendered(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token + FIRST_LETTER - 1) for token in token_ids if token != EOS)

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id]) or "<end>"

    def stream(self) -> TextStream:
        return _ToyStream()
