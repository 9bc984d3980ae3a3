"""Prompt look-up: what followed the last time the latest n tokens stood in this request.

The longest n in `min_match..max_match` wins, and of its places the latest. The index grows with
the request, so a look-up takes a constant number of dictionary reads whatever the prompt's length.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hvd_ray.config import NgramConfig
from hvd_ray.errors import UserError
from hvd_ray.types import NO_DRAFT, Draft, Request, Source


@dataclass(slots=True)
class NgramIndex:
    """Where each n-gram was last seen, for the n-grams that have a successor."""

    min_match: int
    max_match: int
    token_ids: list[int] = field(default_factory=list)
    _end_of: dict[tuple[int, ...], int] = field(default_factory=dict)

    def extend(self, token_ids: tuple[int, ...]) -> None:
        for token in token_ids:
            self._enter_latest()
            self.token_ids.append(token)

    def find(self) -> tuple[int, int] | None:
        """`(match length, position of the successor)` of the longest match, or None."""
        for size in range(min(self.max_match, len(self.token_ids)), self.min_match - 1, -1):
            end = self._end_of.get(tuple(self.token_ids[-size:]))
            if end is not None:
                return size, end
        return None

    def _enter_latest(self) -> None:
        end = len(self.token_ids)
        for size in range(self.min_match, min(self.max_match, end) + 1):
            self._end_of[tuple(self.token_ids[end - size : end])] = end


@dataclass(slots=True)
class NgramDrafter:
    """Drafts from the request's own prompt and output alone; nothing outlives the request."""

    config: NgramConfig = field(default_factory=NgramConfig)
    source: Source = field(default=Source.NGRAM, init=False)
    _active: dict[str, NgramIndex] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.config.min_match > self.config.max_match:
            low, high = self.config.min_match, self.config.max_match
            raise UserError(f"drafting.ngram: min_match={low} must not exceed max_match={high}")

    def start(self, request: Request) -> None:
        if request.request_id in self._active:
            raise ValueError(f"request {request.request_id!r} is already active")
        self._active[request.request_id] = self.read_prompt(request)

    def read_prompt(self, request: Request) -> NgramIndex:
        """The index that a request starts with: its prompt's."""
        index = NgramIndex(self.config.min_match, self.config.max_match)
        index.extend(request.prompt_token_ids)
        return index

    def observe(
        self,
        request_id: str,
        token_ids: tuple[int, ...],
        hidden: object | None = None,  # noqa: ARG002
    ) -> None:
        self._active[request_id].extend(token_ids)

    def propose(self, request_id: str, limit: int) -> Draft:
        """What followed the latest match, at most `limit` tokens."""
        index = self._active[request_id]
        found = index.find()
        limit = min(limit, self.config.max_draft_tokens)
        if found is None or limit <= 0:
            return NO_DRAFT
        match_len, start = found
        tokens = tuple(index.token_ids[start : start + limit])
        return Draft(Source.NGRAM, tokens, match_len=match_len)

    def stop(self, request_id: str) -> None:
        del self._active[request_id]
