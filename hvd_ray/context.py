"""What a policy may look at: the committed prefix and how earlier drafts fared.

Everything here depends on committed tokens alone, never on tokens of a draft under decision, so a
policy that reads it cannot bias the output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from hvd_ray.types import Draft, Step, TokenBuffer

HISTORY_LENGTH = 16
NUM_RECENT_CYCLES = 64


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
        self.outcomes: deque[DraftOutcome] = deque(maxlen=HISTORY_LENGTH)
        self.selections: deque[bool] = deque(maxlen=HISTORY_LENGTH)
        """Whether the cache draft was chosen, for each cycle that had one to choose."""
        self.cycles: deque[Step] = deque(maxlen=NUM_RECENT_CYCLES)
        """The latest cycles of this request, oldest first."""
        self.num_since_mismatch = 0
        """Committed tokens since a noted draft last differed from the target."""
        self._pending: list[_PendingDraft] = []

    def note(self, draft: Draft, *, is_selected: bool, predicted: float | None = None) -> None:
        """Remember a non-empty cache draft that starts at the current position."""
        if draft.token_ids:
            self.selections.append(is_selected)
            self._pending.append(_PendingDraft(draft.token_ids, predicted))

    def advance(self, token_ids: Sequence[int]) -> None:
        """Score the pending drafts against newly committed tokens."""
        for token in token_ids:
            self.num_since_mismatch += 1
            if self._pending:
                self._pending = [p for p in self._pending if not self._resolves(p, token)]

    def _resolves(self, pending: _PendingDraft, token: int) -> bool:
        if pending.token_ids[pending.matched] != token:
            self.num_since_mismatch = 0
            self._resolve(pending)
            return True
        pending.matched += 1
        if pending.matched == len(pending.token_ids):
            self._resolve(pending)
            return True
        return False

    def _resolve(self, pending: _PendingDraft) -> None:
        outcome = DraftOutcome(len(pending.token_ids), pending.matched, pending.predicted)
        self.outcomes.append(outcome)


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
