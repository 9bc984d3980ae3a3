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

MAX_WAITING_ROWS = 4096
"""Over all requests; beyond it the longest parts are read: states are kept in memory."""


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

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """Parts of which each follows on the one before."""
        return cls(
            parts[0].start,
            torch.cat([part.token_ids_N for part in parts]),
            torch.cat([part.hidden_NA for part in parts]),
            torch.cat([part.slots_N for part in parts]),
        )


@dataclass(slots=True)
class _Waiting:
    handle: object
    parts: list[Rows]
    num_rows: int

    @property
    def end(self) -> int:
        return self.parts[-1].end


@dataclass(slots=True)
class Backlog:
    """Waiting rows. A request's are dropped as soon as vLLM computes its positions anew."""

    block_size: int
    """Positions that vLLM shares as one; 0: it shares none, and a prompt waits like any row."""
    max_rows: int = MAX_WAITING_ROWS
    num_rows: int = field(default=0, init=False)
    """Rows that wait, of all requests."""
    _waiting: dict[str, _Waiting] = field(default_factory=dict)

    def add(self, request_id: str, handle: object, rows: Rows) -> None:
        """Take in a step's rows, after those that wait where they follow on."""
        known = self._waiting.get(request_id)
        if known is not None and (known.handle is not handle or known.end != rows.start):
            self.drop(request_id)
            known = None
        if known is None:
            known = self._waiting[request_id] = _Waiting(handle, [], 0)
        known.parts.append(rows)
        known.num_rows += len(rows)
        self.num_rows += len(rows)

    def is_due(self, request_id: str) -> bool:
        """Whether the head must read these rows now, wanted or not."""
        waiting = self._waiting[request_id]
        start = waiting.parts[0].start
        completes_block = self.block_size > 0 and (
            waiting.end // self.block_size > start // self.block_size
        )
        is_share = waiting.num_rows * len(self._waiting) >= self.max_rows
        return completes_block or (self.num_rows >= self.max_rows and is_share)

    def num_waiting(self, request_id: str) -> int:
        """Rows of a request that wait."""
        waiting = self._waiting.get(request_id)
        return 0 if waiting is None else waiting.num_rows

    def take(self, request_ids: Iterable[str]) -> list[Rows]:
        """The waiting rows of these requests; they wait no more."""
        return [Rows.joined(self.drop(request_id)) for request_id in request_ids]

    def drop(self, request_id: str) -> list[Rows]:
        """Forget a request's rows, as the head will never need them; the parts they came in."""
        waiting = self._waiting.pop(request_id)
        self.num_rows -= waiting.num_rows
        return waiting.parts

    def forget_absent(self, alive: Mapping[str, object]) -> None:
        """Drop the rows of requests that vLLM no longer has."""
        gone = [id for id, one in self._waiting.items() if alive.get(id) is not one.handle]
        for request_id in gone:
            self.drop(request_id)


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
    ends: Sequence[int],
    token_ids_N: Tensor,
    hidden_NA: Tensor,
    slots_N: Tensor,
) -> list[Rows]:
    """The rows of each request of a step.

    The states are copied: the runner may use their memory again. No tensor is read, for which a
    GPU's queue would have to run dry once for each request.

    Args:
        starts: the requests' first rows, and the number of all.
        ends: one beyond each request's last position.
        token_ids_N: of all requests.
        hidden_NA: the target's states there.
        slots_N: places in the KV cache.
    """
    sizes = [end - begin for begin, end in pairwise(starts)]
    parts = (_copied(each[: starts[-1]], sizes) for each in (token_ids_N, hidden_NA, slots_N))
    return [
        Rows(end - size, *each)
        for end, size, each in zip(ends, sizes, zip(*parts, strict=True), strict=True)
    ]


def _copied(rows_N: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """The rows in parts, each in memory of its own: one call, where a request each is slow."""
    parts: tuple[Tensor, ...] = torch.ops.aten.split_with_sizes_copy(rows_N, sizes)
    return parts
