"""Text to token ids, every stretch between two special tokens only once.

A tokenizer cuts a text at its special tokens before it does anything else, so what stands between
two of them has the same ids wherever it stands. A long conversation, whose every prompt holds the
one before it, is then tokenised in time linear in its length.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np

from hvd_ray.types import Int32Array

CACHE_CHARS = 32 * 2**20
"""Text whose ids are kept; with them some 150 MB at the most."""
CHECKED_CHARS = 50_000
"""Text that is tokenised a second time as a whole, to see that cutting it changes nothing."""
_HARD_TEXT = "{0} a{0}\n{1}  b \n\n{0}c{1}{1}\t{0}Ünd 12{1} "


class Tokenizer(Protocol):
    """A tokenizer that reads special tokens in the text as such and adds none itself."""

    @property
    def special_tokens(self) -> Sequence[str]:
        """The texts that stand for one token each, whatever surrounds them."""
        ...

    @property
    def eos_token_id(self) -> int | None: ...

    def encode(self, texts: Sequence[str]) -> list[Int32Array]:
        """The ids of each text."""
        ...

    def encode_plain(self, texts: Sequence[str]) -> list[Int32Array]:
        """The same for texts that hold no special token, as fast as it goes."""
        ...


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A text and its ids, aligned at the segments it was cut into."""

    text: str
    token_ids: Int32Array
    segments: list[str]
    char_ends: list[int]
    """Where each segment ends, in characters."""
    token_ends: list[int]

    def segment_at(self, char: int) -> int:
        """The segment that holds this character, or begins with it."""
        return bisect_right(self.char_ends, char)


class SegmentTokenizer:
    """Tokenises texts segment by segment and remembers segments."""

    def __init__(self, tokenizer: Tokenizer, *, cache_chars: int = CACHE_CHARS) -> None:
        self._tokenizer = tokenizer
        self._cache_chars = cache_chars
        self._num_cached_chars = 0
        self._cache: OrderedDict[str, Int32Array] = OrderedDict()
        self._special = _pattern(tokenizer.special_tokens)
        self._chars_to_check = CHECKED_CHARS
        self._latest: TokenizedText | None = None
        if self._special is not None:
            ordered = sorted(tokenizer.special_tokens)
            self._check(_HARD_TEXT.format(ordered[0], ordered[-1]))

    def cut(self, text: str, start: int, end: int) -> tuple[Int32Array, Int32Array]:
        """The ids of `text[:start]` and of `text[start:end]`.

        Where a token would reach over `start`, both sides are tokenised apart, as a prompt and
        its answer are when the answer is written.
        """
        whole = self.tokenize(text)
        first = self._tokens_before(whole, start)
        last = self._tokens_before(whole, end)
        if first is not None and last is not None:
            return whole.token_ids[:first], whole.token_ids[first:last]
        prompt, answer = self._tokenized(text[:start]), self._tokenized(text[start:end])
        return prompt.token_ids, answer.token_ids

    def tokenize(self, text: str) -> TokenizedText:
        """The ids of a text; the latest text is remembered as a whole."""
        if self._latest is not None and self._latest.text is text:
            return self._latest
        if self._chars_to_check > 0:
            self._check(text)
        self._latest = self._tokenized(text)
        return self._latest

    def _check(self, text: str) -> None:
        """Give up cutting if it changes the ids of this text."""
        if self._special is None:
            return
        (expected,) = self._tokenizer.encode([text])
        self._chars_to_check -= len(text)
        if not np.array_equal(self._tokenized(text).token_ids, expected):
            self._special = None
            self._cache.clear()
            self._num_cached_chars = 0

    def _tokenized(self, text: str) -> TokenizedText:
        parts = [text] if self._special is None else self._special.split(text)
        segments = [part for part in parts if part]
        arrays = self._ids_of(segments)
        return TokenizedText(
            text,
            np.concatenate(arrays) if arrays else np.zeros(0, np.int32),
            segments,
            list(accumulate(map(len, segments))),
            list(accumulate(map(len, arrays))),
        )

    def _tokens_before(self, whole: TokenizedText, char: int) -> int | None:
        """How many tokens make up `text[:char]`; None where a token reaches over its end."""
        index = whole.segment_at(char)
        begun = whole.token_ends[index - 1] if index else 0
        head_len = char - (whole.char_ends[index - 1] if index else 0)
        if not head_len:
            return begun
        (head,) = self._ids_of([whole.segments[index][:head_len]])
        ours = whole.token_ids[begun : begun + len(head)]
        is_same = begun + len(head) <= whole.token_ends[index] and np.array_equal(ours, head)
        return begun + len(head) if is_same else None

    def _ids_of(self, segments: Sequence[str]) -> list[Int32Array]:
        new = [segment for segment in dict.fromkeys(segments) if segment not in self._cache]
        found = dict(zip(new, self._encode(new), strict=True)) if new else {}
        arrays = [found.get(segment, self._cache.get(segment)) for segment in segments]
        for segment, ids in found.items():
            self._remember(segment, ids)
        return arrays  # type: ignore[return-value]  # each is in one of the two

    def _encode(self, texts: Sequence[str]) -> list[Int32Array]:
        """The ids of segments; a special token is a segment of its own."""
        if self._special is None:
            return self._tokenizer.encode(texts)
        is_special = [self._special.fullmatch(text) is not None for text in texts]
        plain = [text for text, special in zip(texts, is_special, strict=True) if not special]
        ids = iter(self._tokenizer.encode_plain(plain))
        return [
            self._tokenizer.encode([text])[0] if special else next(ids)
            for text, special in zip(texts, is_special, strict=True)
        ]

    def _remember(self, segment: str, ids: Int32Array) -> None:
        self._cache[segment] = ids
        self._num_cached_chars += len(segment)
        while self._num_cached_chars > self._cache_chars:
            oldest, _ = self._cache.popitem(last=False)
            self._num_cached_chars -= len(oldest)


def _pattern(special_tokens: Sequence[str]) -> re.Pattern[str] | None:
    """Splits a text at its special tokens and keeps them, the longest of several first."""
    texts = sorted(filter(None, special_tokens), key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, texts)) + ")") if texts else None
