"""What the decoding thread does for a call: score a prompt, decode an output."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic

import numpy as np

from hvd_ray.decode import Decoder, Generation
from hvd_ray.ending import Trimmed
from hvd_ray.engines.base import Engine, KVCache
from hvd_ray.errors import UserError
from hvd_ray.serving.api_error import named_param
from hvd_ray.serving.calls import Call, Event, Failure, Opening, Piece, ScoredToken, Span
from hvd_ray.text import TextCodec, TextStream
from hvd_ray.types import Request, Source, Step, TokenLogprobs
from hvd_ray.verify.sampling import token_logprobs

_log = logging.getLogger(__name__)

SCORED_ROWS = 64
"""Rows of a prompt scored in one slice: a float32 row of logits is vocabulary times 4 bytes."""

READ_ROWS = 512
"""Rows of a long prompt read in one slice: as many as the engine itself reads in one piece."""

Emit = Callable[[Event], None]


def failure_of(error: BaseException, *, is_fatal: bool) -> Failure:
    """What a client is told of a fault of ours: nothing of its inside."""
    if is_fatal:
        return Failure("dead", "the engine has stopped; the request may be sent again", None)
    _log.error("a request failed in the engine", exc_info=error)
    return Failure("fault", "the engine failed on this request; the server's log says why")


def refusal_of(error: UserError) -> Failure:
    message = str(error)
    return Failure("bad_request", message, named_param(message))


@dataclass(eq=False, slots=True)
class DecodeTask:
    """One output, cycle by cycle."""

    decoder: Decoder
    request: Request
    call: Call
    choice_index: int
    emit: Emit
    _generation: Generation | None = field(default=None, init=False)
    _spans: TextStream = field(init=False)
    _submitted_s: float = field(default_factory=monotonic, init=False)
    _waited_ms: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._spans = self.decoder.codec.stream()

    @property
    def owner(self) -> str:
        return self.call.tenant

    def step(self) -> bool:
        """One cycle, or a part of a long prompt; the first cycle reads the rest of it."""
        try:
            if self._generation is None:
                self._waited_ms = (monotonic() - self._submitted_s) * 1e3
                self._generation = self.decoder.start(self.request)
            if self._read_ahead(self._generation):
                return False
            trimmed = self.decoder.step(self._generation)
        except UserError as error:
            self.emit(refusal_of(error))
            return True
        self.emit(self._piece(self._generation, trimmed))
        return self._generation.is_finished

    def _read_ahead(self, generation: Generation) -> bool:
        """Read a part of a prompt that is longer, so that others need not wait for all of it.

        A head needs the hidden states of the whole prompt in one piece, so with one it is read in
        one slice.
        """
        cache = generation.state.cache
        end = cache.length + READ_ROWS
        if self.decoder.model_drafter is not None or end >= generation.context.prompt_len:
            return False
        rows = generation.context.token_ids.view(cache.length)[:READ_ROWS].copy()
        self.decoder.engine.forward(rows, cache, num_logits=1)
        return True

    def fail(self, error: BaseException, *, is_fatal: bool) -> None:
        self.emit(failure_of(error, is_fatal=is_fatal))

    def close(self) -> None:
        generation, self._generation = self._generation, None
        if generation is not None:  # the task may be referred to for long; its KV cache goes now
            self.decoder.close(generation)

    def _piece(self, generation: Generation, trimmed: Trimmed) -> Piece:
        text, stop = trimmed.text, trimmed.stop_reason
        if self.call.keeps_stop and isinstance(stop, str):
            text += stop
        step = generation.steps[-1]
        logprobs = generation.logprobs[len(generation.logprobs) - len(trimmed.token_ids) :]
        return Piece(
            self.choice_index,
            text,
            trimmed.token_ids,
            scored(trimmed.token_ids, logprobs, self.decoder.codec) if logprobs else (),
            step,
            self._split(step, trimmed) if self.call.shows_spans else (),
            trimmed.finish_reason,
            stop,
            self._waited_ms,
            generation.state.verification,
        )

    def _split(self, step: Step, trimmed: Trimmed) -> tuple[Span, ...]:
        """The cycle's tokens as text, the accepted ones by their drafter's name."""
        spans = []
        for index, token in enumerate(trimmed.token_ids):
            source = step.source if index < step.accepted else Source.NONE
            text = self._spans.push(token)
            if trimmed.finish_reason and index == len(trimmed.token_ids) - 1:
                text += self._spans.flush()
            spans.append(Span(text, source.value))
        return tuple(spans)


@dataclass(eq=False, slots=True)
class ScoreTask:
    """The target's view of a prompt's own tokens, some rows a slice."""

    engine: Engine
    codec: TextCodec
    token_ids: tuple[int, ...]
    num_top: int
    call: Call
    opening: Opening
    emit: Emit
    then: Callable[[], None]
    _cache: KVCache | None = field(default=None, init=False)
    _scores: list[ScoredToken] = field(default_factory=list, init=False)

    @property
    def owner(self) -> str:
        return self.call.tenant

    def step(self) -> bool:
        if self._cache is None:
            self._cache = self.engine.new_cache()
            first = self.token_ids[0]
            self._scores.append(ScoredToken(first, self.codec.token_text(first), None))
        start = len(self._scores) - 1
        end = min(start + SCORED_ROWS, len(self.token_ids) - 1)
        if start < end:
            self._score(start, end)
        if end < len(self.token_ids) - 1:
            return False
        self.emit(_with_scores(self.opening, tuple(self._scores)))
        self.then()
        return True

    def _score(self, start: int, end: int) -> None:
        assert self._cache is not None
        rows = np.asarray(self.token_ids[start:end], dtype=np.int32)
        following = self.token_ids[start + 1 : end + 1]
        forward = self.engine.forward(rows, self._cache, num_logits=end - start)
        logprobs = token_logprobs(forward.logits_TV, following, self.num_top)
        self._scores += scored(following, logprobs, self.codec)

    def fail(self, error: BaseException, *, is_fatal: bool) -> None:
        self.emit(failure_of(error, is_fatal=is_fatal))

    def close(self) -> None:
        self._cache = None


def scored(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], codec: TextCodec
) -> tuple[ScoredToken, ...]:
    """Log-probabilities with the tokens' texts."""
    return tuple(
        ScoredToken(
            token,
            codec.token_text(token),
            found.logprob,
            tuple((codec.token_text(rival), value) for rival, value in found.top),
        )
        for token, found in zip(token_ids, logprobs, strict=True)
    )


def _with_scores(opening: Opening, scores: tuple[ScoredToken, ...]) -> Opening:
    return Opening(
        opening.prompt_index,
        opening.num_prompt_tokens,
        opening.prompt_text,
        opening.prompt_token_ids,
        scores,
    )
