"""The seam of the drafters: whoever guesses the next tokens of a request."""

from __future__ import annotations

from typing import Protocol

from hvd_ray.types import Draft, Request, Source


class Drafter(Protocol):
    """Guesses the next tokens of the requests it was told of.

    Life of a request: `start`, then `propose` and `observe` in any order, then `stop` exactly
    once, also when the request is aborted. A drafter sees committed tokens only, so a proposal is
    a function of the prefix (and, for a cache, of the scope's past outputs).
    """

    @property
    def source(self) -> Source: ...

    def start(self, request: Request) -> None:
        """Begin a request.

        Raises:
            ValueError: the request id is already active.
        """
        ...

    def observe(self, request_id: str, token_ids: tuple[int, ...], hidden: object | None) -> None:
        """Take note of newly committed output tokens.

        `hidden` holds the target's hidden states of the pass that made them, one row a position,
        from the first position that was not cached before the pass; rows of rejected tokens may
        follow and must be ignored. None where the engine has none or the target made no pass.
        Cache drafters ignore it.
        """
        ...

    def propose(self, request_id: str, limit: int) -> Draft:
        """Guess at most `limit` (>= 0) tokens after the committed ones; may be empty."""
        ...

    def stop(self, request_id: str) -> None:
        """End a request and free what it held; its outputs may stay in the scope's cache."""
        ...


class ModelDrafter(Drafter, Protocol):
    """A drafter whose drafts cost passes of a model, so that policies must know their length."""

    def room(self, request_id: str) -> int:
        """The most tokens that it could draft now, whatever the limit.

        A function of how many tokens are committed alone, so that replay knows it too.
        """
        ...
