"""Hybrid verified decoding: the loop.

One cycle of one request is `Decoder.step`: draft, decide, verify, trim, commit, observe, record.
`generate` runs a request to its end; a server interleaves the steps of many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter

from hvd_ray.context import DecodeContext
from hvd_ray.drafting.base import Drafter, ModelDrafter
from hvd_ray.ending import Ending, Trimmed
from hvd_ray.engines.base import Engine
from hvd_ray.errors import UserError
from hvd_ray.payoff.policy import Candidates, Policy
from hvd_ray.randomness import RandomStream, seeded_generator
from hvd_ray.text import TextCodec
from hvd_ray.types import (
    NO_DRAFT,
    Completion,
    Decision,
    Draft,
    FinishReason,
    Request,
    Source,
    Step,
    TokenBuffer,
    TokenLogprobs,
    Verdict,
    room_left,
)
from hvd_ray.verify.exact import FullVerifier, Verifier, VerifyState
from hvd_ray.verify.sampling import RowDistribution


@dataclass(slots=True)
class Generation:
    """A request on its way."""

    request: Request
    state: VerifyState
    ending: Ending
    steps: list[Step] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    is_closed: bool = False

    @property
    def context(self) -> DecodeContext:
        return self.state.context

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def completion(self) -> Completion:
        """The outcome; of an aborted request, what was committed until then."""
        context = self.context
        wants_logprobs = self.request.sampling.logprobs is not None
        return Completion(
            self.request.request_id,
            tuple(context.token_ids.view(context.prompt_len).tolist()),
            self.ending.text,
            self.finish_reason or "abort",
            self.stop_reason,
            tuple(self.logprobs) if wants_logprobs else None,
            tuple(self.steps),
            self.state.verification,
        )


@dataclass(slots=True)
class Decoder:
    """Decodes requests with one engine, one policy and the drafters that the policy may use."""

    engine: Engine
    codec: TextCodec
    policy: Policy
    cache_drafter: Drafter | None = None
    model_drafter: ModelDrafter | None = None
    make_verifier: Callable[[Engine], Verifier] = FullVerifier
    verifier: Verifier = field(init=False)

    def __post_init__(self) -> None:
        self.verifier = self.make_verifier(self.engine)

    # -- the life of a request -------------------------------------------------------------

    def generate(self, request: Request) -> Completion:
        """Decode one request to its end.

        Raises:
            UserError: the prompt is empty or too long, or a parameter does not fit the model.
        """
        generation = self.start(request)
        try:
            while not generation.is_finished:
                self.step(generation)
        finally:
            self.close(generation)
        return generation.completion()

    def start(self, request: Request) -> Generation:
        """Take a request on; `close` must follow, whatever happens between.

        Raises:
            UserError: the prompt is empty or too long, or a parameter does not fit the model.
        """
        generation = self._admit(request)
        with ExitStack() as undo:  # a drafter that refuses leaves none of the others started
            for drafter in self._drafters():
                drafter.start(request)
                undo.callback(drafter.stop, request.request_id)
            undo.pop_all()
        return generation

    def step(self, generation: Generation) -> Trimmed:
        """One cycle: at least one token is committed.

        Raises:
            ValueError: the generation has ended.
        """
        if generation.is_finished:
            raise ValueError(f"request {generation.request.request_id!r} has ended")
        candidates = self._look_up(generation)
        decision, decide_us = self._decide(generation, candidates)
        draft, draft_us = self._draft(generation, decision, candidates)
        verdict = self.verifier.verify(draft, generation.state)
        trimmed = generation.ending.trim(verdict.token_ids)
        self._commit(generation, verdict, trimmed)
        self._observe(generation, candidates, decision, draft, verdict, trimmed)
        draft_us += candidates.draft_us + decide_us
        self._record(generation, candidates, decision, draft, verdict, trimmed, draft_us)
        return trimmed

    def close(self, generation: Generation) -> None:
        """Release what the request held; safe after an error or an abort, and twice."""
        if not generation.is_closed:
            generation.is_closed = True
            for drafter in self._drafters():
                drafter.stop(generation.request.request_id)
            if generation.is_finished:
                self.verifier.finish(generation.state)

    # -- the parts of a cycle --------------------------------------------------------------

    def _look_up(self, generation: Generation) -> Candidates:
        """The cache's draft, always; how far a model draft may go."""
        started = perf_counter()
        context, request_id = generation.context, generation.request.request_id
        context.room = self._room(context)
        cache = NO_DRAFT
        if self.cache_drafter is not None:
            cache = self.cache_drafter.propose(request_id, context.room)
        model_source, model_limit = None, 0
        if self.model_drafter is not None:
            model_source = self.model_drafter.source
            model_limit = min(context.room, self.model_drafter.room(request_id))
        draft_us = (perf_counter() - started) * 1e6
        return Candidates(cache, model_source, model_limit, draft_us)

    def _decide(self, generation: Generation, candidates: Candidates) -> tuple[Decision, float]:
        """What the policy wants verified, and what asking it took."""
        started = perf_counter()
        decision = self.policy.decide(candidates, generation.context)
        return decision, (perf_counter() - started) * 1e6

    def _draft(
        self, generation: Generation, decision: Decision, candidates: Candidates
    ) -> tuple[Draft, float]:
        """The draft that the policy chose, and what making it took."""
        started = perf_counter()
        draft = NO_DRAFT
        if decision.source == candidates.cache.source and decision.length > 0:
            draft = candidates.cache.cut(decision.length)
        elif decision.source == candidates.model_source and self.model_drafter is not None:
            limit = min(decision.length, candidates.model_limit)
            draft = self.model_drafter.propose(generation.request.request_id, limit)
        return draft, (perf_counter() - started) * 1e6

    def _commit(self, generation: Generation, verdict: Verdict, trimmed: Trimmed) -> None:
        """Make the trimmed tokens the prefix; the cache keeps committed rows only.

        The last committed token is never in the cache yet: it is the first row of the next pass.
        """
        context = generation.context
        context.token_ids.extend(trimmed.token_ids)
        self.engine.truncate(generation.state.cache, len(context.token_ids) - 1)
        generation.logprobs.extend(verdict.logprobs[: len(trimmed.token_ids)])
        generation.finish_reason = trimmed.finish_reason
        generation.stop_reason = trimmed.stop_reason

    def _observe(
        self,
        generation: Generation,
        candidates: Candidates,
        decision: Decision,
        draft: Draft,
        verdict: Verdict,
        trimmed: Trimmed,
    ) -> None:
        """Tell history and drafters what was committed, and nothing else."""
        history = generation.context.history
        is_selected = draft.source == candidates.cache.source and len(draft) > 0
        payoff = decision.predicted_payoff
        history.note(candidates.cache, is_selected=is_selected, predicted=payoff)
        history.advance(trimmed.token_ids)
        for drafter in self._drafters():
            drafter.observe(generation.request.request_id, trimmed.token_ids, verdict.hidden)

    def _record(
        self,
        generation: Generation,
        candidates: Candidates,
        decision: Decision,
        draft: Draft,
        verdict: Verdict,
        trimmed: Trimmed,
        draft_us: float,
    ) -> None:
        """The cycle in the request's steps, and in what its policy remembers of it."""
        emitted = len(trimmed.token_ids)
        step = Step(
            cycle=len(generation.steps),
            position=generation.context.num_generated - emitted,
            source=draft.source if draft.token_ids else Source.NONE,
            drafted=len(draft),
            accepted=min(verdict.accepted, emitted),
            emitted=emitted,
            match_len=candidates.cache.match_len,
            score=candidates.cache.score,
            cache_draft_len=len(candidates.cache),
            predicted_payoff=decision.predicted_payoff,
            tau=decision.tau,
            draft_us=draft_us,
            verify_us=verdict.verify_us,
            reason=decision.reason,
            full_passes=verdict.full_passes,
            slim_passes=verdict.slim_passes,
        )
        generation.steps.append(step)
        generation.context.history.cycles.append(step)

    # -- admission -------------------------------------------------------------------------

    def _admit(self, request: Request) -> Generation:
        capabilities, sampling = self.engine.capabilities, request.sampling
        prompt = TokenBuffer(request.prompt_token_ids)
        _check_prompt(request, capabilities.vocab_size, capabilities.context_length)
        budget = min(sampling.max_tokens, capabilities.context_length - len(prompt))
        context = DecodeContext(prompt, len(prompt), max_tokens=budget, room=0)
        distribution = RowDistribution(
            sampling, prompt.view().copy(), capabilities.eos_token_ids, capabilities.vocab_size
        )
        state = VerifyState(
            context,
            self.engine.new_cache(),
            distribution,
            RandomStream(sampling.seed),
            seeded_generator(sampling.seed, stream=1),
            allows_loss=request.allows_loss,
        )
        ending = Ending(sampling, capabilities.eos_token_ids, budget, self.codec)
        return Generation(request, state, ending)

    def _room(self, context: DecodeContext) -> int:
        return room_left(
            num_tokens=len(context.token_ids),
            num_generated=context.num_generated,
            max_tokens=context.max_tokens,
            context_length=self.engine.capabilities.context_length,
        )

    def _drafters(self) -> Iterator[Drafter]:
        for drafter in (self.cache_drafter, self.model_drafter):
            if drafter is not None:
                yield drafter


def _check_prompt(request: Request, vocab_size: int, context_length: int) -> None:
    prompt = request.prompt_token_ids
    if not prompt:
        raise UserError(f"request {request.request_id}: the prompt is empty")
    if len(prompt) >= context_length:
        raise UserError(
            f"request {request.request_id}: the prompt has {len(prompt)} tokens, but the model's "
            f"context of {context_length} must also hold the answer; shorten the prompt"
        )
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise UserError(
            f"request {request.request_id}: token ids must be in 0..{vocab_size - 1}, got "
            f"{min(prompt)}..{max(prompt)}"
        )
