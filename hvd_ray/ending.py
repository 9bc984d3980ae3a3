"""Where an output ends: stop tokens, stop strings and the token budget, applied to a whole run.

A verify step commits several tokens at once. They are walked one by one, so that text, token ids,
log-probabilities, counts and caches all end at the same token, the one at which step-by-step
decoding would have ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hvd_ray.text import TextCodec, TextStream
from hvd_ray.types import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class Trimmed:
    """The part of a verdict that is committed."""

    token_ids: tuple[int, ...]
    text: str
    """New text that can be shown; held back while it might be the head of a stop string."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class Ending:
    """Watches one request's output for its end.

    A stop token or string inside the budget wins over the budget; one beyond it does not. The
    token that completes a stop is part of the token ids; the text leaves the stop out.
    """

    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    max_output_tokens: int
    """The request's budget or what the context leaves, whichever is less."""
    codec: TextCodec
    text: str = field(default="", init=False)
    """All text so far, without a stop string."""
    _num_shown: int = field(default=0, init=False)
    _num_tokens: int = field(default=0, init=False)
    _stream: TextStream = field(init=False)

    def __post_init__(self) -> None:
        self._stream = self.codec.stream()

    def trim(self, token_ids: tuple[int, ...]) -> Trimmed:
        """The tokens up to and with the one that ends the output, if one does."""
        for index, token in enumerate(token_ids):
            reason, stop = self._take(token)
            if reason is not None:
                return Trimmed(token_ids[: index + 1], self._show_all(), reason, stop)
        return Trimmed(token_ids, self._show_safe())

    def _take(self, token: int) -> tuple[FinishReason | None, int | str | None]:
        self._num_tokens += 1
        may_stop = self._num_tokens > self.sampling.min_tokens
        is_stop_token = may_stop and self._is_stop_token(token)
        is_last = is_stop_token or self._num_tokens >= self.max_output_tokens
        start = len(self.text)
        if not is_stop_token:
            self.text += self._stream.push(token)
        if is_last:
            self.text += self._stream.flush()  # may complete a stop string, so before the search
        found = self._find_stop(start) if may_stop else None
        if found is not None:
            position, stop = found
            self.text = self.text[:position]
            return "stop", stop
        if is_stop_token:
            return "stop", None if self._is_eos(token) else token
        return ("length", None) if is_last else (None, None)

    def _is_eos(self, token: int) -> bool:
        return not self.sampling.ignore_eos and token in self.eos_token_ids

    def _is_stop_token(self, token: int) -> bool:
        return self._is_eos(token) or token in self.sampling.stop_token_ids

    def _find_stop(self, start: int) -> tuple[int, str] | None:
        """The earliest stop string that ends in the text just added, which begins at `start`."""
        places = []
        for stop in self.sampling.stop:
            position = self.text.find(stop, max(0, start - len(stop) + 1))
            if position >= 0:
                places.append((position, stop))
        return min(places, key=lambda place: place[0]) if places else None

    def _show_safe(self) -> str:
        """New text, less a tail that could grow into a stop string."""
        held = max((_overlap(self.text, stop) for stop in self.sampling.stop), default=0)
        return self._show(max(self._num_shown, len(self.text) - held))

    def _show_all(self) -> str:
        return self._show(len(self.text))

    def _show(self, end: int) -> str:
        piece = self.text[self._num_shown : end]
        self._num_shown = end
        return piece


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper head of `stop` that `text` ends with."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
