"""From a client's call to requests for the decoder: tokens, budgets, scopes, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

import numpy as np

from hvd_ray.engines.base import EngineCapabilities
from hvd_ray.errors import UserError
from hvd_ray.serving.api_error import named_param
from hvd_ray.serving.calls import Call, Failure, Message, Prompt
from hvd_ray.serving.settings import Limits
from hvd_ray.text import TextCodec
from hvd_ray.types import LOSSLESS, Request, SamplingParams, scope_key
from hvd_ray.verify.sampling import RowDistribution

_USUAL_CHARS = 8
"""Of a token, generously: a text within the context is hardly ever longer."""


@dataclass(eq=False)
class RefusedError(Exception):
    """A call that cannot be served as it is."""

    message: str
    param: str | None = None
    code: str | None = None

    @property
    def failure(self) -> Failure:
        param = self.param or named_param(self.message)
        return Failure("bad_request", self.message, param, self.code)


@dataclass(slots=True)
class Admission:
    """Checks and encodes calls for one target; for one thread at a time."""

    codec: TextCodec
    capabilities: EngineCapabilities
    model: str
    limits: Limits = field(default_factory=Limits)
    """May be replaced."""

    def __post_init__(self) -> None:
        self.codec = deepcopy(self.codec)  # the decoding thread has the other one

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """A prompt's token ids.

        Raises:
            RefusedError: it is empty, too long or not in the vocabulary.
        """
        try:
            if isinstance(prompt, str):
                self._refuse_endless(prompt, "prompt")
                token_ids = tuple(self.codec.encode(prompt))
            elif prompt and isinstance(prompt[0], Message):
                token_ids = self._encode_chat(prompt)
            else:
                token_ids = tuple(prompt)  # type: ignore[arg-type]
        except UserError as error:
            raise RefusedError(str(error), "messages") from None
        self._check_prompt(prompt, token_ids)
        return token_ids

    def _encode_chat(self, messages: Sequence[Any]) -> tuple[int, ...]:
        turns = [{"role": turn.role, "content": turn.content} for turn in messages]
        text = self.codec.render_chat(turns)
        self._refuse_endless(text, "messages")
        return tuple(self.codec.encode_rendered(text))

    @property
    def _most_tokens(self) -> int:
        """Of a prompt, so that one more fits into the context."""
        room = self.capabilities.context_length - 1
        return min(self.limits.max_prompt_tokens or room, room)

    def _refuse_endless(self, text: str, param: str) -> None:
        """Refuse a text by its beginning: a megabyte takes a second to tokenize, and others wait.

        Of a conversation it is the whole that counts, since many small messages are as much.

        Raises:
            RefusedError: a part of it is too long already.
        """
        most = self._most_tokens
        size = _USUAL_CHARS * (most + 1)
        while size < len(text):
            if len(self.codec.encode(text[:size])) > most + 1:
                raise RefusedError(
                    f"{param}: its first {size} of {len(text)} characters are more tokens than the "
                    f"{most} that are served here (the model's context is "
                    f"{self.capabilities.context_length})",
                    param,
                    "context_length_exceeded",
                )
            size *= 2

    def _check_prompt(self, prompt: Prompt, token_ids: tuple[int, ...]) -> None:
        is_chat = bool(prompt) and isinstance(prompt[0], Message)
        param = "messages" if is_chat else "prompt"
        capabilities, most = self.capabilities, self._most_tokens
        if not token_ids:
            raise RefusedError(f"{param}: is empty", param)
        if len(token_ids) > most:
            raise RefusedError(
                f"{param}: has {len(token_ids)} tokens; at most {most} are served here (the "
                f"model's context is {capabilities.context_length})",
                param,
                "context_length_exceeded",
            )
        if max(token_ids) >= capabilities.vocab_size:
            raise RefusedError(
                f"{param}: token id {max(token_ids)} is not in the vocabulary of "
                f"{capabilities.vocab_size}",
                param,
            )

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Refuse token ids that are not in the vocabulary before anything is begun."""
        capabilities = self.capabilities
        no_prompt = np.zeros(0, dtype=np.int32)
        try:
            RowDistribution(
                sampling, no_prompt, capabilities.eos_token_ids, capabilities.vocab_size
            )
        except UserError as error:
            raise RefusedError(str(error)) from None

    def _budget(self, call: Call, num_prompt_tokens: int) -> int:
        """Output tokens of each choice."""
        limits, context = self.limits, self.capabilities.context_length
        room = context - num_prompt_tokens
        asked = call.max_tokens
        allowed = min(room, limits.max_output_tokens or room)
        if asked is None:
            return min(allowed, allowed if call.usual_tokens is None else call.usual_tokens)
        if asked > allowed:
            why = f"the prompt's {num_prompt_tokens} leave room for {room} of {context}"
            if limits.max_output_tokens and limits.max_output_tokens < room:
                why = f"at most {limits.max_output_tokens} are served here"
            raise RefusedError(
                f"max_tokens: {asked}, but {why}", "max_tokens", "context_length_exceeded"
            )
        return asked

    def requests(
        self, call: Call, index: int, token_ids: tuple[int, ...]
    ) -> list[tuple[int, Request]]:
        """The choices of a prompt, by their number; seeds differ, as they do in vLLM.

        Raises:
            RefusedError: they do not fit.
        """
        budget = self._budget(call, len(token_ids))
        if budget == 0:
            return []
        scope = self.scope(call.tenant, call.salt)
        base = replace(call.sampling, max_tokens=budget)
        if base.min_tokens > budget:
            raise RefusedError(f"min_tokens: must be at most max_tokens ({budget})", "min_tokens")
        allows_loss = call.verification not in LOSSLESS
        requests = []
        for copy in range(call.num_choices):
            choice = index * call.num_choices + copy
            sampling = _with_seed(base, copy)
            request_id = f"{call.request_id}-{choice}"
            request = Request(request_id, token_ids, sampling, scope, allows_loss)
            requests.append((choice, request))
        return requests

    def scope(self, tenant: str, salt: str | None) -> str:
        """Whose outputs may be drafted from: the tenant's, in a client's own partition if it
        named one; a salt never reaches another tenant's."""
        scope = scope_key(tenant=tenant, model=self.model)
        return scope if salt is None else f"{scope}/{quote(salt, safe='')}"

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids.

        Raises:
            RefusedError: one is not in the vocabulary.
        """
        vocab_size = self.capabilities.vocab_size
        if token_ids and max(token_ids) >= vocab_size:
            raise RefusedError(
                f"tokens: {max(token_ids)} is not in the vocabulary of {vocab_size}", "tokens"
            )
        return self.codec.decode(token_ids)


def _with_seed(sampling: SamplingParams, copy: int) -> SamplingParams:
    if copy == 0 or sampling.seed is None:
        return sampling
    return replace(sampling, seed=sampling.seed + copy)
