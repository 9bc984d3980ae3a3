"""Which draft does each request of the batch get? Look-ups, decisions, and who wants the head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

from hvd_ray.context import DecodeContext
from hvd_ray.payoff.policy import (
    AlwaysCache,
    AlwaysModel,
    Candidates,
    NeverDraft,
    Policy,
)
from hvd_ray.types import NO_DRAFT, Decision, Draft, Source, room_left
from hvd_ray.vllm_plugin.options import Control
from hvd_ray.vllm_plugin.requests import Plan, RequestTable, Row, Tracked

_USES_MODEL = {Control.AUTO, Control.EAGLE3}
_FIXED: dict[Control, Policy] = {
    Control.CACHE: AlwaysCache(),
    Control.EAGLE3: AlwaysModel(),
    Control.OFF: NeverDraft(),
}


class BatchPolicy(Protocol):
    """Decides for all requests of a step at once; a pure function of its arguments."""

    def decide_all(
        self, candidates_B: Sequence[Candidates], contexts_B: Sequence[DecodeContext]
    ) -> list[Decision]:
        """One decision for each request, in order."""
        ...


@dataclass(frozen=True, slots=True)
class EachAlone:
    """Any policy, asked for one request after the other."""

    policy: Policy

    def decide_all(
        self, candidates_B: Sequence[Candidates], contexts_B: Sequence[DecodeContext]
    ) -> list[Decision]:
        pairs = zip(candidates_B, contexts_B, strict=True)
        return [self.policy.decide(candidates, context) for candidates, context in pairs]


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a draft besides its request."""

    max_model_len: int
    eagle3_tokens: int
    """0: there is no head."""
    uses_cache: bool = True
    """Whether the configured policy looks at the cache; a request may ask for it all the same."""
    lookup_ms: float = 5.0
    """The most time of a step for look-ups."""


@dataclass(slots=True)
class Choice:
    """What one request gets in this step."""

    tracked: Tracked
    decision: Decision
    cache: Draft = NO_DRAFT
    has_model: bool = False
    """Whether the head was offered."""

    @property
    def num_model_tokens(self) -> int:
        """Tokens wanted of the head."""
        return self.decision.length if self.decision.source == Source.EAGLE3 else 0

    @property
    def may_use_model(self) -> bool:
        """Whether the request could ever want the head."""
        return self.tracked.profile.control in _USES_MODEL

    @property
    def cache_tokens(self) -> Draft:
        """The cache's draft as decided, or none."""
        is_cache = self.decision.source == self.cache.source and self.decision.length > 0
        return self.cache.cut(self.decision.length) if is_cache else NO_DRAFT


@dataclass(slots=True)
class Router:
    """Decides for a batch; the drafts are then made and noted with `note`."""

    table: RequestTable
    policy: BatchPolicy
    limits: Limits
    lookup_us: float = field(default=0.0, init=False)
    """Time of the last step's look-ups."""
    decide_us: float = field(default=0.0, init=False)
    """Time of the last step's decisions."""
    entry_ms_of: Callable[[str], float] = field(default=lambda _: 0.0, init=False)
    """What the head must do first for a request, by its id; then it is done."""
    num_unlooked: int = field(default=0, init=False)
    """Look-ups that were left out for want of time, ever."""
    _turn: int = field(default=0, init=False)

    def choose(self, rows: Sequence[Row], *, max_draft_tokens: int) -> list[Choice | None]:
        """A choice for each row; None for those that are not decoding."""
        started = perf_counter()
        tracked_B = [self._decoding(row) for row in rows]
        live = [tracked for tracked in tracked_B if tracked is not None]
        drafts = self._look_up(live, max_draft_tokens)
        candidates = [self._candidates(*pair) for pair in zip(live, drafts, strict=True)]
        looked_up = perf_counter()
        decisions = self._decide(live, candidates)
        self.lookup_us = (looked_up - started) * 1e6
        self.decide_us = (perf_counter() - looked_up) * 1e6
        found = iter(zip(decisions, candidates, strict=True))
        choices: list[Choice | None] = []
        for tracked in tracked_B:
            if tracked is None:
                choices.append(None)
                continue
            decision, candidate = next(found)
            has_model = candidate.model_limit > 0
            choices.append(Choice(tracked, decision, candidate.cache, has_model))
        return choices

    def note(self, choice: Choice, draft: Draft) -> None:
        """Remember what a request is given, until the next step shows what came of it."""
        decision = choice.decision
        choice.tracked.plan = Plan(
            position=len(choice.tracked.context.token_ids),
            cache=choice.cache,
            draft=draft,
            predicted_payoff=decision.predicted_payoff,
            tau=decision.tau,
            reason=decision.reason,
            skipped=self._skipped(choice),
            draft_us=self.lookup_us + self.decide_us,
        )

    def _skipped(self, choice: Choice) -> str:
        """Why a request gets no draft, in one of a few words."""
        tracked = choice.tracked
        if tracked.profile.control is Control.OFF:
            return "seeded" if tracked.profile.is_seeded else "off"
        if tracked.context.room <= 0:
            return "no_room"
        return "declined" if choice.cache.token_ids or choice.has_model else "no_draft"

    def _decoding(self, row: Row) -> Tracked | None:
        tracked = self.table.get(row.request_id) if row.num_sampled else None
        return None if tracked is None or tracked.is_ended else tracked

    def _look_up(self, live: Sequence[Tracked], max_draft_tokens: int) -> list[Draft]:
        """The cache's draft for each request, as far as the time for look-ups goes.

        The next step goes on where this one stopped, so that all get their turn.
        """
        deadline = perf_counter() + self.limits.lookup_ms / 1e3
        drafts = [NO_DRAFT] * len(live)
        for tracked in live:
            tracked.context.room = self._room(tracked, max_draft_tokens)
        for num_done in range(len(live)):
            index = (self._turn + num_done) % len(live)
            if perf_counter() > deadline:
                self._turn = index
                self.num_unlooked += len(live) - num_done
                break
            if self._uses_cache(live[index]):
                drafts[index] = self._propose(live[index])
        return drafts

    def _propose(self, tracked: Tracked) -> Draft:
        if tracked.profile.control is Control.CACHE:
            return self.table.rules.propose(tracked.key, tracked.context.room)
        return self.table.cache.propose(tracked.key, tracked.context.room)

    def _uses_cache(self, tracked: Tracked) -> bool:
        if not tracked.profile.may_use_cache:
            return False
        if tracked.profile.control is Control.AUTO:
            return self.limits.uses_cache
        return True

    def _room(self, tracked: Tracked, max_draft_tokens: int) -> int:
        context = tracked.context
        room = room_left(
            num_tokens=len(context.token_ids),
            num_generated=context.num_generated,
            max_tokens=context.max_tokens,
            context_length=self.limits.max_model_len,
        )
        return min(room, max_draft_tokens)

    def _candidates(self, tracked: Tracked, cache: Draft) -> Candidates:
        if self.limits.eagle3_tokens and tracked.profile.control in _USES_MODEL:
            limit = min(tracked.context.room, self.limits.eagle3_tokens)
            entry_ms = self.entry_ms_of(tracked.request_id)
            return Candidates(cache, Source.EAGLE3, limit, model_entry_ms=entry_ms)
        return Candidates(cache)

    def _decide(self, live: Sequence[Tracked], candidates: Sequence[Candidates]) -> list[Decision]:
        """The configured policy for all that leave it to us, jointly; the others as they ask."""
        is_auto = [tracked.profile.control is Control.AUTO for tracked in live]
        auto = iter(
            self.policy.decide_all(
                [c for c, auto in zip(candidates, is_auto, strict=True) if auto],
                [t.context for t, auto in zip(live, is_auto, strict=True) if auto],
            )
        )
        return [
            next(auto) if ours else _FIXED[t.profile.control].decide(c, t.context)
            for t, c, ours in zip(live, candidates, is_auto, strict=True)
        ]
