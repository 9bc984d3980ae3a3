"""Which requests belong together, so that they go to the replica whose cache knows them."""

from __future__ import annotations

import hashlib

from hvd_ray.serving.calls import Prompt
from hvd_ray.serving.protocol import ChatRequest, CompletionRequest

PREFIX_CHARS = 512
PREFIX_TOKENS = 128


def session_of(body: ChatRequest | CompletionRequest, *, tenant: str, header: str | None) -> str:
    """A key that stays the same over a conversation: the caller's word, or the prompt's head.

    The header `x-session-id`, `session_id` and `user` are taken in this order; without any, the
    first messages of a conversation or the head of a prompt stand for it, since later turns begin
    with them.
    """
    named = header or body.session_id or body.user
    word = f"named {named}" if named else f"prefix {_head(body)}"
    return session_key(tenant, word)


def session_key(tenant: str, word: str) -> str:
    """The same for the same tenant and word, and for no other."""
    return hashlib.sha256(f"{tenant}\n{word}".encode()).hexdigest()[:32]


def _head(body: ChatRequest | CompletionRequest) -> str:
    if isinstance(body, ChatRequest):
        turns = [message for message in body.conversation if message.role != "assistant"]
        through = next((i for i, turn in enumerate(turns) if turn.role == "user"), 0)
        return "\n".join(f"{turn.role}: {turn.content}" for turn in turns[: through + 1])
    return _prompt_head(body.prompts[0])


def _prompt_head(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt[:PREFIX_CHARS]
    return " ".join(map(str, prompt[:PREFIX_TOKENS]))
