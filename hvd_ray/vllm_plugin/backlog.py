"""The target's states that the head has not read yet, request by request.

The head's KV cache must hold every committed position before the head drafts, and before vLLM
shares a block with another request. Between these moments nothing needs the head, so rows of
decoding steps wait here and are read together; proposals are those of a head that read each step's
rows at once. Shapes: N rows, A width of the target's states.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

MAX_WAITING_ROWS = 64
"""A request's rows are read at the latest when there are so many: states are kept in memory."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive committed positions of one request, as the head reads them."""

    start: int
    """Position of the first row."""
    token_ids_N: Tensor
    hidden_NA: Tensor
    slots_N: Tensor
    """Where each position's keys and values lie in the KV cache."""

    def __len__(self) -> int:
        return len(self.token_ids_N)

    @property
    def end(self) -> int:
        """One beyond the last position."""
        return self.start + len(self.token_ids_N)

    def followed_by(self, other: Rows) -> Rows:
        return Rows(
            self.start,
            torch.cat((self.token_ids_N, other.token_ids_N)),
            torch.cat((self.hidden_NA, other.hidden_NA)),
            torch.cat((self.slots_N, other.slots_N)),
        )


@dataclass(slots=True)
class Backlog:
    """Waiting rows. A request's are dropped as soon as vLLM computes its positions anew."""

    block_size: int
    """Positions that vLLM shares as one; 0: it shares none."""
    max_rows: int = MAX_WAITING_ROWS
    _waiting: dict[str, tuple[object, Rows]] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return sum(len(rows) for _, rows in self._waiting.values())

    def add(self, request_id: str, handle: object, rows: Rows) -> None:
        """Take in a step's rows, after those that wait where they follow on."""
        known = self._waiting.get(request_id)
        if known is not None and known[0] is handle and known[1].end == rows.start:
            rows = known[1].followed_by(rows)
        self._waiting[request_id] = (handle, rows)

    def is_due(self, request_id: str) -> bool:
        """Whether the head must read these rows now, wanted or not."""
        _, rows = self._waiting[request_id]
        completes_block = self.block_size > 0 and (
            rows.end // self.block_size > rows.start // self.block_size
        )
        return completes_block or len(rows) >= self.max_rows

    def take(self, request_ids: Iterable[str]) -> list[Rows]:
        """The waiting rows of these requests; they wait no more."""
        return [self._waiting.pop(request_id)[1] for request_id in request_ids]

    def forget_absent(self, alive: Mapping[str, object]) -> None:
        """Drop the rows of requests that vLLM no longer has."""
        gone = [id for id, (handle, _) in self._waiting.items() if alive.get(id) is not handle]
        for request_id in gone:
            del self._waiting[request_id]


def in_batches(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """The indices of `sizes` in groups whose sum is at most `limit`, or that are one alone."""
    batches: list[list[int]] = []
    room = 0
    for index, size in enumerate(sizes):
        if not batches or size > room:
            batches.append([])
            room = limit
        batches[-1].append(index)
        room -= size
    return batches


def split_rows(
    starts: Sequence[int],
    *,
    positions_N: Tensor,
    token_ids_N: Tensor,
    hidden_NA: Tensor,
    slots_N: Tensor,
) -> list[Rows]:
    """The rows of each request of a step; `starts` are their first rows and the number of all.

    The states are copied: the runner may use their memory again.
    """
    return [
        Rows(
            int(positions_N[begin]),
            token_ids_N[begin:end].clone(),
            hidden_NA[begin:end].clone(),
            slots_N[begin:end].clone(),
        )
        for begin, end in pairwise(starts)
    ]
