"""Answers in OpenAI's shapes, whole and as the chunks of a stream, for both endpoints.

An endpoint is a `Shape`: how a request becomes a call, and how outputs and pieces become JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from time import time
from typing import Any, Protocol

from hvd_ray.serving.api_error import bad_request
from hvd_ray.serving.calls import Call, Opening, Piece, ScoredToken, Span
from hvd_ray.serving.protocol import ChatRequest, CompletionRequest
from hvd_ray.serving.tally import Output, Tally
from hvd_ray.types import Step

Json = dict[str, Any]
MAX_OUTPUTS = 1024
"""Prompts times choices of one request."""
ALL_CHECKED = (
    "no token went unchecked: the audit does not trust the slim model yet or any more (see "
    "hvd_tier_trusted in /metrics), its gate asked the target for every block, or the loss budget "
    "was spent"
)


class Shape(Protocol):
    """One endpoint's way of asking and answering."""

    def call(self, *, request_id: str, tenant: str, session: str | None, limit_s: float) -> Call:
        """What a replica is asked.

        Raises:
            ApiError: the request cannot be served.
        """
        ...

    def whole(self, tally: Tally) -> Json:
        """The answer at the end."""
        ...

    def opening_chunks(self, opening: Opening) -> list[Json]:
        """What a stream shows once a prompt was read."""
        ...

    def chunk(self, piece: Piece, tally: Tally) -> Json | None:
        """What a stream shows of a cycle; None: nothing yet."""
        ...

    def end_chunks(self, tally: Tally) -> list[Json]:
        """What follows the last choice: usage and metrics, where they are wanted."""
        ...


class _Shape:
    """What both endpoints share."""

    object_whole: str
    object_chunk: str
    prefix: str

    def __init__(
        self, body: CompletionRequest | ChatRequest, *, answer_id: str, model: str
    ) -> None:
        self._base = body
        self._head = {"id": f"{self.prefix}-{answer_id}", "created": int(time()), "model": model}

    def frame(self, choices: list[Json], *, is_chunk: bool) -> Json:
        kind = self.object_chunk if is_chunk else self.object_whole
        return {**self._head, "object": kind, "choices": choices}

    def end_chunks(self, tally: Tally) -> list[Json]:
        if not (self._base.wants_usage or self._base.return_metrics):
            return []
        chunk = self.frame([], is_chunk=True)
        if self._base.wants_usage:
            chunk["usage"] = tally.usage
        if self._base.return_metrics:
            chunk["metrics"] = tally.request_metrics()
        return [chunk]

    def _finish(self, answer: Json, tally: Tally) -> Json:
        answer["usage"] = tally.usage
        if self._base.return_metrics:
            answer["metrics"] = tally.request_metrics()
        return answer

    def _extras(self, steps: Sequence[Step], spans: Sequence[Span], ids: Sequence[int]) -> Json:
        """Fields that OpenAI does not have, where they were asked for."""
        extras: Json = {}
        if self._base.return_token_ids:
            extras["token_ids"] = list(ids)
        if self._base.return_steps:
            extras["hvd"] = {
                "steps": [asdict(step) for step in steps],
                "spans": [asdict(span) for span in spans],
            }
        return extras

    def _of_piece(self, piece: Piece) -> Json:
        steps = [piece.step] if piece.step else []
        return {
            **self._extras(steps, piece.spans, piece.token_ids),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
            **(self._made_by(piece) if piece.finish_reason else {}),
        }

    def _made_by(self, made: Piece | Output) -> Json:
        """Who has checked the output, for a request that chose or wants figures."""
        asked, has_figures = self._base.verification, self._base.return_metrics
        if asked is None and not has_figures:
            return {}
        answer: Json = {"verification": made.verification}
        if has_figures and asked not in (None, made.verification):
            answer["verification_reason"] = ALL_CHECKED
        return answer

    def _is_silent(self, piece: Piece) -> bool:
        """Whether a cycle has nothing to show: its text may yet become a stop string."""
        asked = self._base.return_token_ids or self._base.return_steps
        asked = asked or self._base.wants_running_usage
        return not (piece.text or piece.scores or piece.finish_reason or asked)

    def _framed(self, choice: Json, tally: Tally) -> Json:
        chunk = self.frame([choice], is_chunk=True)
        if self._base.wants_running_usage:
            chunk["usage"] = tally.usage
        return chunk


class CompletionShape(_Shape):
    object_whole = object_chunk = "text_completion"
    prefix = "cmpl"

    def __init__(self, body: CompletionRequest, *, answer_id: str, model: str) -> None:
        super().__init__(body, answer_id=answer_id, model=model)
        self._body = body
        self._offsets: dict[int, int] = {}

    def call(self, *, request_id: str, tenant: str, session: str | None, limit_s: float) -> Call:
        body = self._body
        if body.max_tokens == 0 and not body.echo:
            raise bad_request("max_tokens: 0 makes sense with echo alone", "max_tokens")
        if len(body.prompts) * body.n > MAX_OUTPUTS:
            message = f"prompt: {len(body.prompts)} prompts times n={body.n}; at most {MAX_OUTPUTS}"
            raise bad_request(f"{message} outputs a request", "prompt")
        scores_prompt = body.echo and body.logprobs is not None
        return Call(
            request_id=request_id,
            prompts=body.prompts,
            sampling=body.sampling(max_tokens=body.max_tokens, logprobs=body.logprobs),
            num_choices=body.n,
            tenant=tenant,
            salt=body.cache_salt,
            session=session,
            mode=body.hvd,
            verification=body.verification or "full",
            max_tokens=body.max_tokens if "max_tokens" in body.model_fields_set else None,
            usual_tokens=body.max_tokens,
            prompt_logprobs=body.logprobs if scores_prompt else None,
            shows_prompt=body.echo or body.return_token_ids,
            shows_spans=body.return_steps,
            keeps_stop=body.include_stop_str_in_output,
            limit_s=limit_s,
        )

    def whole(self, tally: Tally) -> Json:
        choices = []
        for prompt_index, opening in sorted(tally.openings.items()):
            for copy in range(self._body.n):
                index = prompt_index * self._body.n + copy
                choices.append(self._choice(index, opening, tally.outputs.get(index, Output())))
        return self._finish(self.frame(choices, is_chunk=False), tally)

    def _choice(self, index: int, opening: Opening, output: Output) -> Json:
        echoed = opening.prompt_text if self._body.echo else ""
        scores = [*opening.prompt_scores, *output.scores]
        wants_scores = self._body.logprobs is not None
        choice = {
            "index": index,
            "text": echoed + output.text,
            "logprobs": self._logprobs(index, scores) if wants_scores else None,
            "finish_reason": output.finish_reason or "length",
            "stop_reason": output.stop_reason,
            **self._extras(output.steps, output.spans, output.token_ids),
            **self._made_by(output),
        }
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = list(opening.prompt_token_ids)
        return choice

    def opening_chunks(self, opening: Opening) -> list[Json]:
        if not (self._body.echo or self._body.return_token_ids):
            return []
        return [
            self.frame([self._echo(opening, copy)], is_chunk=True) for copy in range(self._body.n)
        ]

    def _echo(self, opening: Opening, copy: int) -> Json:
        index = opening.prompt_index * self._body.n + copy
        has_scores = bool(opening.prompt_scores)
        choice = {
            "index": index,
            "text": opening.prompt_text if self._body.echo else "",
            "logprobs": self._logprobs(index, opening.prompt_scores) if has_scores else None,
            "finish_reason": "length" if self._body.max_tokens == 0 else None,
        }
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = list(opening.prompt_token_ids)
        return choice

    def chunk(self, piece: Piece, tally: Tally) -> Json | None:
        if self._is_silent(piece):
            return None
        index = piece.choice_index
        choice = {
            "index": index,
            "text": piece.text,
            "logprobs": self._logprobs(index, piece.scores) if piece.scores else None,
            **self._of_piece(piece),
        }
        return self._framed(choice, tally)

    def _logprobs(self, index: int, scores: Sequence[ScoredToken]) -> Json:
        offset, offsets = self._offsets.get(index, 0), []
        for score in scores:
            offsets.append(offset)
            offset += len(score.text)
        self._offsets[index] = offset
        return {
            "tokens": [score.text for score in scores],
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": [_rivals(score) for score in scores],
            "text_offset": offsets,
        }


class ChatShape(_Shape):
    object_whole = "chat.completion"
    object_chunk = "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(self, body: ChatRequest, *, answer_id: str, model: str) -> None:
        super().__init__(body, answer_id=answer_id, model=model)
        self._body = body

    def call(self, *, request_id: str, tenant: str, session: str | None, limit_s: float) -> Call:
        body = self._body
        if body.top_logprobs and not body.logprobs:
            raise bad_request("top_logprobs: needs logprobs to be true", "top_logprobs")
        logprobs = body.top_logprobs if body.logprobs else None
        return Call(
            request_id=request_id,
            prompts=(body.conversation,),
            sampling=body.sampling(max_tokens=body.budget, logprobs=logprobs),
            num_choices=body.n,
            tenant=tenant,
            salt=body.cache_salt,
            session=session,
            mode=body.hvd,
            verification=body.verification or "full",
            max_tokens=body.budget,
            shows_prompt=body.return_token_ids,
            shows_spans=body.return_steps,
            keeps_stop=body.include_stop_str_in_output,
            limit_s=limit_s,
        )

    def whole(self, tally: Tally) -> Json:
        choices = [self._choice(i, tally.outputs[i]) for i in range(self._body.n)]
        answer = self.frame(choices, is_chunk=False)
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = list(tally.openings[0].prompt_token_ids)
        return self._finish(answer, tally)

    def _choice(self, index: int, output: Output) -> Json:
        message = {"role": "assistant", "content": output.text, "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": _contents(output.scores) if self._body.logprobs else None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            **self._extras(output.steps, output.spans, output.token_ids),
            **self._made_by(output),
        }

    def opening_chunks(self, opening: Opening) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        choices = [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            for index in range(self._body.n)
        ]
        chunks = [self.frame([choice], is_chunk=True) for choice in choices]
        if self._body.return_token_ids:
            chunks[0]["prompt_token_ids"] = list(opening.prompt_token_ids)
        return chunks

    def chunk(self, piece: Piece, tally: Tally) -> Json | None:
        if self._is_silent(piece):
            return None
        choice = {
            "index": piece.choice_index,
            "delta": {"content": piece.text} if piece.text else {},
            "logprobs": _contents(piece.scores) if piece.scores else None,
            **self._of_piece(piece),
        }
        return self._framed(choice, tally)


def _rivals(score: ScoredToken) -> dict[str, float] | None:
    """The most likely tokens and the one that stands here."""
    if score.logprob is None:
        return None
    return {**dict(reversed(score.top)), score.text: score.logprob}


def _contents(scores: Sequence[ScoredToken]) -> Json:
    return {
        "content": [
            {
                **_content(score.text, score.logprob),
                "top_logprobs": [_content(text, value) for text, value in score.top],
            }
            for score in scores
        ]
    }


def _content(text: str, logprob: float | None) -> Json:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
