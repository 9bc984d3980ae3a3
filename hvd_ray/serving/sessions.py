"""Which requests belong together, so that they go to the replica whose cache knows them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

PREFIX_CHARS = 512
PREFIX_TOKENS = 128


def session_of(given: Mapping[str, Any], *, tenant: str, header: str | None) -> str:
    """A key that stays the same over a conversation: the caller's word, or the prompt's head.

    The header `x-session-id`, `session_id` and `user` are taken in this order; without any, the
    first messages of a conversation or the head of a prompt stand for it, since later turns begin
    with them.

    Args:
        given: a request's body; nothing in it needs to have the right form.
        tenant: whose it is.
        header: the caller's word beside the body.
    """
    named = header or given.get("session_id") or given.get("user")
    word = f"named {named}" if named else f"prefix {_head(given)}"
    return session_key(tenant, word)


def session_key(tenant: str, word: str) -> str:
    """The same for the same tenant and word, and for no other."""
    return hashlib.sha256(f"{tenant}\n{word}".encode()).hexdigest()[:32]


def _head(given: Mapping[str, Any]) -> str:
    messages = given.get("messages")
    if isinstance(messages, list):
        return _conversation_head([turn for turn in messages if isinstance(turn, dict)])
    prompt = given.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt[:PREFIX_CHARS]
    return json.dumps(prompt[:PREFIX_TOKENS] if isinstance(prompt, list) else prompt)


def _conversation_head(messages: list[dict[str, Any]]) -> str:
    """What is said up to the user's first words, without what the model said."""
    turns = [turn for turn in messages if turn.get("role") != "assistant"]
    through = next((i for i, turn in enumerate(turns) if turn.get("role") == "user"), 0)
    return json.dumps([[turn.get("role"), turn.get("content")] for turn in turns[: through + 1]])
