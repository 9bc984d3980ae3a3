"""A transformers tokenizer as the import of transcripts needs it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvd_ray.errors import UserError
from hvd_ray.text import HFTextCodec
from hvd_ray.traces.transcripts_words import WordEncoder, word_pattern
from hvd_ray.types import Int32Array

# What a template's own expressions raise on values that it does not expect.
_REFUSALS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class HFTranscriptTokenizer:
    """Chat template and encoding of one tokenizer; a `ChatTemplate` and a `Tokenizer`."""

    def __init__(self, codec: HFTextCodec) -> None:
        self._tokenizer: Any = codec.tokenizer
        added = self._tokenizer.added_tokens_decoder.values()
        self.end_texts: tuple[str, ...] = tuple(token.content for token in added)
        """What may end a turn: every token that stands for itself."""
        self.special_tokens: tuple[str, ...] = tuple(t.content for t in added if _is_strict(t))
        self._core = getattr(self._tokenizer, "backend_tokenizer", None)
        if not hasattr(self._core, "encode_batch_fast"):
            self._core = None
        pattern = word_pattern(self._core) if self._core is not None else None
        self._words = WordEncoder(self._core, pattern) if pattern is not None else None

    @property
    def eos_token_id(self) -> int | None:
        value: int | None = self._tokenizer.eos_token_id
        return value

    @property
    def has_template(self) -> bool:
        return self._tokenizer.chat_template is not None

    @property
    def template_hash(self) -> str:
        """Names the chat template; empty where there is none."""
        template = self._tokenizer.chat_template
        return hashlib.sha256(str(template).encode()).hexdigest()[:16] if template else ""

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        with_opening: bool = False,
    ) -> str:
        from jinja2 import TemplateError

        if not self.has_template:
            raise UserError("the tokenizer has no chat template: choose another --tokenizer")
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=[dict(tool) for tool in tools] or None,
                    tokenize=False,
                    add_generation_prompt=with_opening,
                )
            )
        except (TemplateError, *_REFUSALS) as error:
            cause = " ".join(str(error).split())
            raise UserError(f"the chat template refuses the dialogue: {cause}") from None

    def encode(self, texts: Sequence[str]) -> list[Int32Array]:
        if self._core is not None:
            batch = self._core.encode_batch_fast(list(texts), add_special_tokens=False)
            return [np.array(encoding.ids, dtype=np.int32) for encoding in batch]
        lists = (self._tokenizer.encode(text, add_special_tokens=False) for text in texts)
        return [np.array(ids, dtype=np.int32) for ids in lists]

    def encode_plain(self, texts: Sequence[str]) -> list[Int32Array]:
        return self._words.encode(texts) if self._words is not None else self.encode(texts)

    def encode_prompt(self, text: str) -> list[int]:
        """A raw prompt's ids, with what the tokenizer puts before a text of its own accord."""
        return list(self._tokenizer.encode(text))


def _is_strict(token: Any) -> bool:
    """Whether a special token leaves the text at its sides alone."""
    return not (token.lstrip or token.rstrip or token.single_word or token.normalized)
