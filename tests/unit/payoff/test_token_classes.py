"""The class of every token, from the text it decodes to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from hvd_ray.engines.toy import ToyCodec
from hvd_ray.payoff.token_classes import TokenClass, TokenClasses, cached_token_classes
from hvd_ray.text import HFTextCodec, TextStream

C = TokenClass


@pytest.mark.parametrize(
    ("text", "flags", "balance"),
    [
        ("", C.EMPTY, 0),
        (" ", C.SPACE | C.BLANK, 0),
        ("\n\n", C.NEWLINE | C.BLANK, 0),
        ("  \n", C.SPACE | C.NEWLINE | C.BLANK, 0),
        (" the", C.SPACE | C.WORD_START | C.LETTER, 0),
        ("the", C.LETTER, 0),
        ("42", C.DIGIT, 0),
        ('"', C.QUOTE | C.PUNCTUATION, 0),
        (",", C.DELIMITER | C.PUNCTUATION, 0),
        ("({[", C.OPENING | C.PUNCTUATION, 3),
        ("))", C.CLOSING | C.PUNCTUATION, -2),
        ("()", C.OPENING | C.CLOSING | C.PUNCTUATION, 0),
        ("é漢", C.LETTER, 0),
        ("=", C.PUNCTUATION, 0),
    ],
)
def test_flags_and_balance(text: str, flags: TokenClass, balance: int) -> None:
    table = TokenClasses.from_texts(["x", text, "y"])
    assert TokenClass(int(table.flags_V[1])) == flags
    assert table.balance_V[1] == balance
    assert table.flags_V[0] == table.flags_V[2] == C.LETTER


def test_empty_texts_at_the_ends_do_not_shift_their_neighbours() -> None:
    table = TokenClasses.from_texts(["", "a", "", "", "1", ""])
    assert table.flags_V.tolist() == [C.EMPTY, C.LETTER, C.EMPTY, C.EMPTY, C.DIGIT, C.EMPTY]


def test_all_texts_empty() -> None:
    assert TokenClasses.from_texts(["", ""]).flags_V.tolist() == [C.EMPTY, C.EMPTY]


@dataclass
class SentencePieceLike:
    """Decodes as SentencePiece does: the space before the first word is dropped."""

    pieces: tuple[str, ...] = ("a", " the", "x")

    def encode(self, text: str) -> list[int]:
        assert text == "a"
        return [2, 0]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self.pieces[token] for token in token_ids).removeprefix(" ")

    def stream(self) -> TextStream:
        raise NotImplementedError


def test_a_leading_space_survives_decoders_that_drop_it() -> None:
    codec = SentencePieceLike()
    assert codec.decode([1]) == "the"
    table = TokenClasses.from_codec(codec, 3)
    assert C.WORD_START in TokenClass(int(table.flags_V[1]))


def test_from_the_codecs_of_the_project(tiny_llama_path: Path) -> None:
    toy = TokenClasses.from_codec(ToyCodec(), 32)
    assert len(toy.flags_V) == 32
    codec = HFTextCodec(tiny_llama_path)
    vocab_size = len(codec.tokenizer)
    table = TokenClasses.from_codec(codec, vocab_size + 5)
    (brace,) = codec.encode("{")
    assert C.OPENING in TokenClass(int(table.flags_V[brace]))
    assert table.balance_V[brace] == 1
    assert set(table.flags_V[vocab_size:].tolist()) == {int(C.EMPTY)}  # unused ids of a padded head


def test_save_and_load(tmp_path: Path) -> None:
    table = TokenClasses.from_texts(["a", "(", "\n"])
    table.save(tmp_path / "classes.npz")
    loaded = TokenClasses.load(tmp_path / "classes.npz")
    assert loaded is not None
    assert np.array_equal(loaded.flags_V, table.flags_V)
    assert np.array_equal(loaded.balance_V, table.balance_V)


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04 cut short", b"no zip at all"])
def test_an_unreadable_table_is_no_table(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "classes.npz"
    if content is not None:
        path.write_bytes(content)
    assert TokenClasses.load(path) is None


@pytest.mark.parametrize(
    "arrays",
    [
        {"version": 0, "flags_V": np.zeros(2, np.uint16), "balance_V": np.zeros(2, np.int8)},
        {"version": 1, "flags_V": np.zeros(2, np.uint16), "balance_V": np.zeros(3, np.int8)},
        {"version": 1, "flags_V": np.zeros(2, np.int64), "balance_V": np.zeros(2, np.int8)},
        {"version": 1, "flags_V": np.zeros(2, np.uint16)},
        {"version": 1, "flags_V": np.array([None]), "balance_V": np.zeros(1, np.int8)},
    ],
)
def test_a_table_of_another_make_is_no_table(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    np.savez(tmp_path / "classes.npz", **arrays)
    assert TokenClasses.load(tmp_path / "classes.npz") is None


def test_the_table_is_made_once_and_mended_when_damaged(hvd_home: Path) -> None:
    first = cached_token_classes(ToyCodec(), vocab_size=16, tokenizer_sha="f" * 64)
    (path,) = (hvd_home / "token_classes").glob("*.npz")
    before = path.stat().st_mtime_ns
    cached_token_classes(ToyCodec(), vocab_size=16, tokenizer_sha="f" * 64)
    assert path.stat().st_mtime_ns == before
    path.write_bytes(b"damaged")
    again = cached_token_classes(ToyCodec(), vocab_size=16, tokenizer_sha="f" * 64)
    assert np.array_equal(first.flags_V, again.flags_V)
    assert TokenClasses.load(path) is not None
