"""What a policy may look at: the committed prefix and how earlier drafts fared.

Everything here depends on committed tokens alone, never on tokens of a draft under decision, so a
policy that reads it cannot bias the output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from hvd_ray.types import Draft, Source, Step, TokenBuffer

# Shapes: H kept items, X figures of each.

HISTORY_LENGTH = 16
NUM_RECENT_CYCLES = 64
SOURCE_NUMBERS = {source: number for number, source in enumerate(Source)}
Item = TypeVar("Item")


class Recent(Generic[Item]):
    """The latest items of a kind, oldest first, and beside them their figures as an array.

    Policies read every item in every step; compiled code does so from the array.
    """

    def __init__(self, length: int, figures_of: Callable[[Item], tuple[float, ...]], width: int):
        self._items: deque[Item] = deque(maxlen=length)
        self._figures_of = figures_of
        self._rows_X = np.zeros((2 * length, width))  # written downwards, so seldom moved
        self._first = length

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def __getitem__(self, index: int) -> Item:
        return self._items[index]

    @property
    def figures(self) -> NDArray[np.float64]:
        """[H, X], newest first, zeros behind the oldest; a view until the next `append`."""
        return self._rows_X[self._first : self._first + len(self._rows_X) // 2]

    def append(self, item: Item) -> None:
        """Take in a new item; the oldest leaves where there is no room."""
        if self._first == 0:
            self._first = len(self._rows_X) // 2
            self._rows_X[self._first :] = self._rows_X[: self._first]
        self._first -= 1
        self._rows_X[self._first] = self._figures_of(item)
        self._items.append(item)

    def extend(self, items: Iterable[Item]) -> None:
        for item in items:
            self.append(item)


@dataclass(frozen=True, slots=True)
class DraftOutcome:
    """How far a cache draft agreed with what the target then produced."""

    draft_len: int
    accepted_len: int
    predicted: float | None = None
    """The payoff that was predicted, if one was, in tokens."""

    @property
    def is_exhausted(self) -> bool:
        """The whole draft agreed; it might have agreed for longer."""
        return self.accepted_len == self.draft_len


def _figures_of_outcome(outcome: DraftOutcome) -> tuple[float, ...]:
    is_predicted = outcome.predicted is not None
    return outcome.accepted_len, outcome.draft_len, is_predicted, outcome.predicted or 0.0


def _figures_of_cycle(step: Step) -> tuple[float, ...]:
    return SOURCE_NUMBERS[step.source], step.drafted, step.accepted, step.emitted


@dataclass(slots=True)
class _PendingDraft:
    token_ids: tuple[int, ...]
    predicted: float | None
    matched: int = 0


class DraftHistory:
    """The fate of the cache drafts that were looked up, whether they were verified or not.

    A draft that the policy skipped is still scored, for free, against the tokens that the target
    commits afterwards. `note` a draft, then `advance` by the committed tokens; an outcome counts
    from the token at which the draft first differs or ends.
    """

    def __init__(self) -> None:
        self.outcomes: Recent[DraftOutcome] = Recent(HISTORY_LENGTH, _figures_of_outcome, 4)
        """Figures: accepted and drafted tokens, whether a payoff was predicted, and which."""
        self.selections: deque[bool] = deque(maxlen=HISTORY_LENGTH)
        """Whether the cache draft was chosen, for each cycle that had one to choose."""
        self.cycles: Recent[Step] = Recent(NUM_RECENT_CYCLES, _figures_of_cycle, 4)
        """Figures: the source's number, drafted, accepted and emitted tokens."""
        self.num_since_mismatch = 0
        """Committed tokens since a noted draft last differed from the target."""
        self._pending: list[_PendingDraft] = []

    def note(self, draft: Draft, *, is_selected: bool, predicted: float | None = None) -> None:
        """Remember a non-empty cache draft that starts at the current position."""
        if draft.token_ids:
            self.selections.append(is_selected)
            self._pending.append(_PendingDraft(draft.token_ids, predicted))

    def advance(self, token_ids: Sequence[int]) -> list[DraftOutcome]:
        """Score the pending drafts against newly committed tokens; the outcomes this settled."""
        settled: list[DraftOutcome] = []
        for token in token_ids:
            self.num_since_mismatch += 1
            if self._pending:
                self._pending = [p for p in self._pending if not self._resolves(p, token, settled)]
        return settled

    def _resolves(self, pending: _PendingDraft, token: int, settled: list[DraftOutcome]) -> bool:
        if pending.token_ids[pending.matched] != token:
            self.num_since_mismatch = 0
        else:
            pending.matched += 1
            if pending.matched < len(pending.token_ids):
                return False
        outcome = DraftOutcome(len(pending.token_ids), pending.matched, pending.predicted)
        self.outcomes.append(outcome)
        settled.append(outcome)
        return True


@dataclass(slots=True)
class DecodeContext:
    """The state of one request as policies, features and drafters see it."""

    token_ids: TokenBuffer
    """Prompt and committed output."""
    prompt_len: int
    max_tokens: int
    """The request's budget of output tokens."""
    room: int
    """The most draft tokens that may be verified now; see `decode.room_left`."""
    history: DraftHistory = field(default_factory=DraftHistory)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.prompt_len
