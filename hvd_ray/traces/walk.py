"""Walking a trace as decoding walks a request: the same context, the same room for a draft.

Labels and replay share this with each other, and `room_left` with the decode loop, so that what
holds on a trace holds live.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hvd_ray.context import DecodeContext
from hvd_ray.drafting.base import Drafter
from hvd_ray.traces.schema import Trace
from hvd_ray.types import NO_DRAFT, Draft, TokenBuffer, room_left


def accepted_len(draft: Draft, output: tuple[int, ...], position: int) -> int:
    """The longest prefix of the draft that the output repeats from `position` on, in tokens.

    This is what full verification accepts, greedy or sampled: the first rejected draft token is
    always replaced by another one.
    """
    tokens = draft.token_ids
    ahead = output[position : position + len(tokens)]
    if tokens == ahead:
        return len(tokens)
    for index, (guessed, produced) in enumerate(zip(tokens, ahead, strict=False)):
        if guessed != produced:
            return index
    return len(ahead)


@dataclass(slots=True)
class Walk:
    """A trace on its way from the prompt to its end."""

    trace: Trace
    drafter: Drafter | None = None
    context: DecodeContext = field(init=False)

    def __post_init__(self) -> None:
        trace = self.trace
        budget = trace.sampling.max_tokens
        left = trace.context_length - len(trace.prompt_token_ids)
        prompt = TokenBuffer(trace.prompt_token_ids)
        self.context = DecodeContext(prompt, len(prompt), max_tokens=min(budget, left), room=0)

    def look_up(self) -> Draft:
        """The cache's draft at the current position, within the room that decoding would have."""
        self.context.room = self._room()
        if self.drafter is None:
            return NO_DRAFT
        return self.drafter.propose(self.trace.trace_id, self.context.room)

    def commit(self, token_ids: tuple[int, ...]) -> None:
        """Move on over the trace's own next tokens."""
        self.context.token_ids.extend(token_ids)
        self.context.history.advance(token_ids)
        if self.drafter is not None:
            self.drafter.observe(self.trace.trace_id, token_ids, None)

    def _room(self) -> int:
        context = self.context
        return room_left(
            num_tokens=len(context.token_ids),
            num_generated=context.num_generated,
            max_tokens=min(context.max_tokens, self.trace.end),
            context_length=self.trace.context_length,
        )


@contextmanager
def walking(trace: Trace, drafter: Drafter | None = None) -> Iterator[Walk]:
    """Start a trace with the drafter, and stop it in the end; its output stays in the cache."""
    assert trace.error is None, "a failed trace has no output to walk"
    if drafter is not None:
        drafter.start(trace.request())
    try:
        yield Walk(trace, drafter)
    finally:
        if drafter is not None:
            drafter.stop(trace.trace_id)


def in_time_order(traces: list[Trace]) -> list[Trace]:
    """The order in which a replica would have finished them; ties go by `trace_id`."""
    return sorted(traces, key=lambda trace: (trace.created_at, trace.trace_id))
