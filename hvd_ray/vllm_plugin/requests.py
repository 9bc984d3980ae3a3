"""What is remembered of each request that vLLM runs: its prefix, its history, its cache entry.

vLLM owns the requests: they are prefilled in chunks, preempted, resumed, aborted, and an id may
come back for another request. Before every decision the table is brought in line with vLLM's own
state, which always wins; nothing here is needed for right results, only for good drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count

from hvd_ray.context import DecodeContext, DraftOutcome
from hvd_ray.drafting.suffix import RuleDrafter, SuffixDrafter
from hvd_ray.types import NO_DRAFT, Draft, Int32Array, Request, Source, Step, TokenBuffer
from hvd_ray.vllm_plugin.options import Control

# Shapes: T committed tokens.


@dataclass(frozen=True, slots=True)
class Profile:
    """What a request brought along; fixed for its life."""

    scope: str
    control: Control = Control.AUTO
    max_tokens: int = 2**31 - 1
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the output, EOS included where it counts."""
    is_readable: bool = True
    """Whether its prompt is known as tokens (not as embeddings)."""
    is_seeded: bool = False
    """Whether its control is `off` for its seed alone."""

    @property
    def may_be_remembered(self) -> bool:
        """Whether its output may be drafted to others of its scope."""
        return self.control is not Control.OFF

    @property
    def may_use_cache(self) -> bool:
        """Whether the cache could ever draft for it."""
        return self.is_readable and self.control in (Control.AUTO, Control.CACHE)


@dataclass(frozen=True, slots=True)
class Row:
    """One request in one step of vLLM, after its tokens were sampled."""

    request_id: str
    handle: object
    """vLLM's own state of the request; another object is another request."""
    token_ids_T: Int32Array
    """Prompt and output, those of this step included; a view."""
    prompt_len: int
    num_sampled: int
    """Tokens of this step, the last of `token_ids_T`; 0 in a prefill chunk."""
    num_drafted: int = 0
    """Draft tokens that vLLM verified in this step."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What was proposed for a request, until vLLM says what became of it."""

    position: int
    """Committed tokens when it was made."""
    cache: Draft = NO_DRAFT
    """The cache's draft that was looked up, verified or not."""
    draft: Draft = NO_DRAFT
    """The draft that vLLM was given."""
    predicted_payoff: float | None = None
    tau: float | None = None
    reason: str = ""
    skipped: str = "first"
    """Why there is no draft, in one word, where there is none."""
    draft_us: float = 0.0


@dataclass(slots=True)
class Tracked:
    """One request's state here."""

    key: str
    """Its name in the cache; unlike vLLM's id it never comes back."""
    request_id: str
    handle: object
    profile: Profile
    context: DecodeContext
    plan: Plan | None = None
    num_cycles: int = 0
    is_ended: bool = False
    """A stop token or the budget was reached; vLLM will drop it."""


@dataclass(slots=True)
class RequestTable:
    """The requests that vLLM runs, in step with it.

    `profile_of` reads a request's profile from vLLM's state, once.
    """

    cache: SuffixDrafter
    profile_of: Callable[[object], Profile]
    on_step: Callable[[Tracked, Step, str], None] = lambda _tracked, _step, _skipped: None
    """Told of each cycle, and in one word why it verified no draft, where it did not."""
    on_outcome: Callable[[DraftOutcome], None] = lambda _outcome: None
    """Told how far a cache draft agreed, once that is known."""
    on_end: Callable[[Tracked], None] = lambda _tracked: None
    pass_us: float = 0.0
    """Time of the target pass whose rows are being observed."""
    rules: RuleDrafter = field(init=False)
    """The cache's drafts for requests that no predictor decides on."""
    _tracked: dict[str, Tracked] = field(default_factory=dict)
    _names: count[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.rules = RuleDrafter(self.cache)

    def __len__(self) -> int:
        return len(self._tracked)

    def get(self, request_id: str) -> Tracked | None:
        return self._tracked.get(request_id)

    def forget_absent(self, alive: Mapping[str, object]) -> None:
        """Drop the requests that vLLM no longer has: finished, aborted, or replaced under their id.

        Preempted ones stay: vLLM keeps their state too.
        """
        gone = [id for id, t in self._tracked.items() if alive.get(id) is not t.handle]
        for request_id in gone:
            self._drop(request_id)

    def observe(self, rows: Iterable[Row]) -> None:
        """Take in what this step brought each request."""
        for row in rows:
            if row.num_sampled:
                self._observe(row)

    def _observe(self, row: Row) -> None:
        tracked = self._tracked.get(row.request_id)
        num_before = len(row.token_ids_T) - row.num_sampled
        if (
            tracked is not None
            and tracked.is_ended
            and num_before >= len(tracked.context.token_ids)
        ):
            return
        if tracked is not None and len(tracked.context.token_ids) != num_before:
            self._drop(row.request_id)  # vLLM took tokens back: what we remember is not its prefix
            tracked = None
        if tracked is None:
            tracked = self._start(row, num_before)
        sampled = row.token_ids_T[num_before:].tolist()
        tokens = tracked_tokens(sampled, tracked)
        self._record(tracked, row, num_sampled=len(sampled), tokens=tokens)
        tracked.is_ended = _has_ended(tokens, tracked)

    def _start(self, row: Row, num_before: int) -> Tracked:
        profile = self.profile_of(row.handle)
        key = f"{row.request_id}#{next(self._names)}"
        prompt = row.token_ids_T[: row.prompt_len].tolist() if profile.may_use_cache else ()
        context = DecodeContext(
            TokenBuffer(row.token_ids_T[:num_before]), row.prompt_len, profile.max_tokens, room=0
        )
        self.cache.start(Request(key, tuple(prompt), scope=profile.scope))
        if num_before > row.prompt_len and profile.may_be_remembered:
            earlier = row.token_ids_T[row.prompt_len : num_before].tolist()
            self.cache.observe(key, tuple(earlier))
        tracked = self._tracked[row.request_id] = Tracked(
            key, row.request_id, row.handle, profile, context
        )
        return tracked

    def _record(
        self, tracked: Tracked, row: Row, *, num_sampled: int, tokens: tuple[int, ...]
    ) -> None:
        """Hold the plan against what came of it; then the tokens are the prefix."""
        context = tracked.context
        plan = tracked.plan
        if plan is None or plan.position != len(context.token_ids):
            plan = Plan(len(context.token_ids))
        step = _step_of(
            tracked,
            plan,
            row,
            num_sampled=num_sampled,
            num_emitted=len(tokens),
            verify_us=self.pass_us,
        )
        is_selected = step.source == plan.cache.source and step.drafted > 0
        context.history.note(plan.cache, is_selected=is_selected, predicted=plan.predicted_payoff)
        for outcome in context.history.advance(tokens):
            self.on_outcome(outcome)
        context.history.cycles.append(step)
        context.token_ids.extend(tokens)
        if tracked.profile.may_be_remembered:
            self.cache.observe(tracked.key, tokens)
        tracked.plan = None
        tracked.num_cycles += 1
        self.on_step(tracked, step, "dropped" if len(plan.draft) else plan.skipped)

    def _drop(self, request_id: str) -> None:
        tracked = self._tracked.pop(request_id)
        self.cache.stop(tracked.key)
        self.on_end(tracked)


def tracked_tokens(sampled: list[int], tracked: Tracked) -> tuple[int, ...]:
    """The sampled tokens up to the first that ends the output: vLLM drops what an accepted draft
    brought beyond it, so nothing of that may be remembered."""
    left = tracked.profile.max_tokens - tracked.context.num_generated
    for index, token in enumerate(sampled[:left]):
        if token in tracked.profile.stop_token_ids:
            return tuple(sampled[: index + 1])
    return tuple(sampled[: max(left, 0)])


def _has_ended(tokens: tuple[int, ...], tracked: Tracked) -> bool:
    at_budget = tracked.context.num_generated >= tracked.profile.max_tokens
    return at_budget or bool(tokens and tokens[-1] in tracked.profile.stop_token_ids)


def _step_of(
    tracked: Tracked,
    plan: Plan,
    row: Row,
    *,
    num_sampled: int,
    num_emitted: int,
    verify_us: float,
) -> Step:
    """The record of the cycle that has just ended.

    vLLM may have cut the draft (grammar, token budget, room), and pads some steps with rows that
    are no draft; so `drafted` is what both sides know of.
    """
    drafted = min(row.num_drafted, len(plan.draft))
    return Step(
        cycle=tracked.num_cycles,
        position=tracked.context.num_generated,
        source=plan.draft.source if drafted else Source.NONE,
        drafted=drafted,
        accepted=min(num_sampled - 1, drafted, num_emitted),
        emitted=num_emitted,
        match_len=plan.cache.match_len,
        score=plan.cache.score,
        cache_draft_len=len(plan.cache),
        predicted_payoff=plan.predicted_payoff,
        tau=plan.tau,
        draft_us=plan.draft_us,
        verify_us=verify_us,
        reason=plan.reason,
    )
