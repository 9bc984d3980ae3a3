"""What kind of text each token id stands for, worked out once for a tokenizer.

Shapes: V vocabulary.
"""

from __future__ import annotations

import unicodedata
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hvd_ray.home import atomic_path, file_lock, hvd_home
from hvd_ray.text import TextCodec

CLASSES_VERSION = 1
OPENING = "([{"
CLOSING = ")]}"
QUOTES = "\"'`´“”‘’«»"
DELIMITERS = ",;:|"


class TokenClass(IntFlag):
    """What the text of a token holds; one token may be of several classes."""

    SPACE = 1 << 0
    """White space other than a line break."""
    NEWLINE = 1 << 1
    PUNCTUATION = 1 << 2
    """Any character of Unicode's P and S categories, brackets and quotes included."""
    OPENING = 1 << 3
    CLOSING = 1 << 4
    DIGIT = 1 << 5
    QUOTE = 1 << 6
    DELIMITER = 1 << 7
    WORD_START = 1 << 8
    """A space followed by something."""
    LETTER = 1 << 9
    BLANK = 1 << 10
    """White space and nothing else."""
    EMPTY = 1 << 11
    """No text of its own: a special token or an unused id."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenClasses:
    """The table that features read; ids beyond it count as `EMPTY`."""

    flags_V: NDArray[np.uint16]
    """Bits of `TokenClass`."""
    balance_V: NDArray[np.int8]
    """Opening minus closing brackets in the token's text, within [-127, 127]."""

    @classmethod
    def from_codec(cls, codec: TextCodec, vocab_size: int) -> TokenClasses:
        """Decode every id of the vocabulary and classify its text (about a second)."""
        return cls.from_texts(_token_texts(codec, vocab_size))

    @classmethod
    def from_texts(cls, texts_V: Sequence[str]) -> TokenClasses:
        """The classes of these texts, the index being the token id."""
        lengths_V = np.array([len(text) for text in texts_V], dtype=np.int64)
        encoded = "".join(texts_V).encode("utf-32-le", errors="surrogatepass")
        chars = np.frombuffer(encoded, dtype="<u4")
        alphabet, index = np.unique(chars, return_inverse=True)
        bits = np.array([_char_class(chr(c)) for c in alphabet], dtype=np.uint16)[index]
        signs = np.array([_bracket_sign(chr(c)) for c in alphabet], dtype=np.int64)[index]
        has_text_V = lengths_V > 0
        flags_V = np.full(len(texts_V), TokenClass.EMPTY, dtype=np.uint16)
        balance_V = np.zeros(len(texts_V), dtype=np.int8)
        if len(chars):
            starts = (np.cumsum(lengths_V) - lengths_V)[has_text_V]
            flags_V[has_text_V] = _token_flags(bits, chars, starts, lengths_V[has_text_V])
            balance_V[has_text_V] = np.add.reduceat(signs, starts).clip(-127, 127)
        return cls(flags_V, balance_V)

    def save(self, path: Path) -> None:
        """Write the table to `path` (.npz), whole or not at all."""
        with atomic_path(path) as draft, draft.open("wb") as handle:
            np.savez(
                handle, version=CLASSES_VERSION, flags_V=self.flags_V, balance_V=self.balance_V
            )

    @classmethod
    def load(cls, path: Path) -> TokenClasses | None:
        """The table at `path`, or None where it is absent, damaged or of another version."""
        try:
            with np.load(path, allow_pickle=False) as arrays:
                if int(arrays["version"]) != CLASSES_VERSION:
                    return None
                table = cls(arrays["flags_V"], arrays["balance_V"])
        except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile):
            return None
        return table if table._is_sound() else None

    def _is_sound(self) -> bool:
        types_fit = self.flags_V.dtype == np.uint16 and self.balance_V.dtype == np.int8
        return types_fit and self.flags_V.ndim == 1 and self.flags_V.shape == self.balance_V.shape


def cached_token_classes(codec: TextCodec, *, vocab_size: int, tokenizer_sha: str) -> TokenClasses:
    """The table of a tokenizer, read from HVD_HOME, made and kept there the first time."""
    path = hvd_home() / "token_classes" / f"{tokenizer_sha[:32]}-{vocab_size}.npz"
    if (table := TokenClasses.load(path)) is not None:
        return table
    with file_lock(path):
        if (table := TokenClasses.load(path)) is not None:
            return table
        table = TokenClasses.from_codec(codec, vocab_size)
        table.save(path)
    return table


def _token_texts(codec: TextCodec, vocab_size: int) -> list[str]:
    """Each token's text as it reads after a letter: some decoders drop a leading space."""
    anchor = list(codec.encode("a"))[-1:]
    prefix = codec.decode(anchor)
    texts = []
    for token in range(vocab_size):
        whole = codec.decode([*anchor, token])
        follows = whole.startswith(prefix)
        texts.append(whole[len(prefix) :] if follows else codec.decode([token]))
    return texts


def _char_class(char: str) -> TokenClass:
    if char in "\n\r\v\f\x85\u2028\u2029":
        return TokenClass.NEWLINE
    if char.isspace():
        return TokenClass.SPACE
    if char.isdigit():
        return TokenClass.DIGIT
    if char.isalpha():
        return TokenClass.LETTER
    found = TokenClass(0)
    for members, bit in (
        (OPENING, TokenClass.OPENING),
        (CLOSING, TokenClass.CLOSING),
        (QUOTES, TokenClass.QUOTE),
        (DELIMITERS, TokenClass.DELIMITER),
    ):
        if char in members:
            found |= bit
    if unicodedata.category(char)[0] in "PS":
        found |= TokenClass.PUNCTUATION
    return found


def _bracket_sign(char: str) -> int:
    return (char in OPENING) - (char in CLOSING)


def _token_flags(
    bits: NDArray[np.uint16],
    chars: NDArray[np.uint32],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> NDArray[np.uint16]:
    """Join the classes of each token's characters and add those of the token as a whole."""
    flags = np.bitwise_or.reduceat(bits, starts)
    white = np.uint16(TokenClass.SPACE | TokenClass.NEWLINE)
    flags[(flags & ~white) == 0] |= np.uint16(TokenClass.BLANK)
    starts_with_space = (chars[starts] == ord(" ")) & (lengths > 1)
    is_blank = (flags & np.uint16(TokenClass.BLANK)) > 0
    flags[starts_with_space & ~is_blank] |= np.uint16(TokenClass.WORD_START)
    return flags
