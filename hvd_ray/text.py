"""Text to tokens and back: the seam, and its transformers implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hvd_ray.errors import UserError
from hvd_ray.targets.loading import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "�"


class TextStream(Protocol):
    """Turns one request's output tokens into text, piece by piece.

    The pieces joined are the text of the whole, byte for byte: a character whose bytes are spread
    over several tokens appears once it is complete, at `flush` at the latest.
    """

    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        ...

    def flush(self) -> str:
        """What was held back, when no more tokens come."""
        ...


class TextCodec(Protocol):
    """A tokenizer with its chat template."""

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The prompt of a conversation, up to and with the opening of the answer."""
        ...

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of that prompt."""
        ...

    def encode_rendered(self, text: str) -> list[int]:
        """The tokens of such a text, which holds its control tokens already."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def token_text(self, token_id: int) -> str:
        """One token by itself, control tokens too; part of a character shows as U+FFFD."""
        ...

    def stream(self) -> TextStream: ...


@dataclass(slots=True)
class _HFTextStream:
    """Decodes a sliding window of tokens, from the last point at which the text was whole."""

    tokenizer: PreTrainedTokenizerBase
    _token_ids: list[int] = field(default_factory=list)
    _window: int = 0
    """First token of the window: enough context for the tokenizer to space the next piece."""
    _emitted: int = 0
    """Tokens whose text went out."""

    def push(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        piece = self._pending()
        if not piece or piece.endswith(REPLACEMENT):
            return ""
        self._window, self._emitted = self._emitted, len(self._token_ids)
        return piece

    def flush(self) -> str:
        piece = self._pending()
        self._window = self._emitted = len(self._token_ids)
        return piece

    def _pending(self) -> str:
        before = _decode(self.tokenizer, self._token_ids[self._window : self._emitted])
        whole = _decode(self.tokenizer, self._token_ids[self._window :])
        return whole[len(before) :]


def _decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    text = tokenizer.decode(
        list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str)
    return text


class HFTextCodec:
    """A transformers tokenizer.

    Raises:
        UserError: the folder holds no usable tokenizer.
    """

    def __init__(self, path: str | Path) -> None:
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(path)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode_rendered(self.render_chat(messages))

    def encode_rendered(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The chat template's rendering, with the opening of the assistant's turn.

        Raises:
            UserError: the tokenizer has no chat template, or it refuses these messages.
        """
        from jinja2 import TemplateError

        if self.tokenizer.chat_template is None:
            raise UserError("the tokenizer has no chat template: give `prompt`, not `messages`")
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError) as error:
            raise UserError(f"the chat template refuses these messages: {error}") from None
        return str(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return _decode(self.tokenizer, token_ids)

    def token_text(self, token_id: int) -> str:
        text = self.tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def stream(self) -> TextStream:
        return _HFTextStream(self.tokenizer)
