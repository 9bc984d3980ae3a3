"""A replica: one target, its drafters and its decoding thread, behind calls and events.

It knows nothing of HTTP or Ray. Everything that touches the engine runs on the decoding thread;
tokenizing and waiting happen on the caller's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np

from hvd_ray.errors import UserError
from hvd_ray.serving.api_error import named_param
from hvd_ray.serving.calls import (
    Call,
    Event,
    Failure,
    Message,
    Opening,
    Piece,
    Prompt,
    ReplicaFacts,
    ReplicaState,
)
from hvd_ray.serving.lineup import Lineup, Stage, line_up
from hvd_ray.serving.loop import DecodeLoop, LoopEndedError, Task
from hvd_ray.serving.settings import HotSettings, Limits, hot_settings
from hvd_ray.serving.tasks import DecodeTask, ScoreTask
from hvd_ray.types import Request, SamplingParams, scope_key
from hvd_ray.verify.sampling import RowDistribution

_log = logging.getLogger(__name__)

_DEAD = Failure("dead", "the engine has stopped; the request may be sent again")
T = TypeVar("T")
R = TypeVar("R")
STALLED_S = 300.0
"""A cycle that takes longer than this counts as an engine that hangs."""


class Replica:
    """Serves calls; one event loop, one decoding thread."""

    def __init__(
        self, stage: Stage, *, name: str, root: str, hot: HotSettings | None = None
    ) -> None:
        """Line the decoders up and start the decoding thread.

        Raises:
            UserError: the settings ask for what cannot be had.
        """
        hot = hot or HotSettings()
        self._stage = stage
        self._hot = hot
        self._lineup = line_up(stage, hot.policy, is_named=hot.is_policy_named)
        self._loop = DecodeLoop(max_running=hot.limits.max_running)
        self._encoder = deepcopy(stage.codec)  # the decoding thread has the other one
        self._tokenizing = ThreadPoolExecutor(1, "tokenize")
        self._polling: asyncio.Task[None] | None = None
        self._predictor = stage.predictor_folder(hot.policy)
        self._num_requests = 0
        self._refused: str | None = None
        self._changing = asyncio.Lock()
        self.facts = ReplicaFacts(
            model=name,
            root=root,
            engine=stage.engine.capabilities.name,
            dtype=stage.engine.capabilities.dtype,
            context_length=stage.engine.capabilities.context_length,
            modes=tuple(self._lineup.decoders),
        )

    # -- serving ---------------------------------------------------------------------------

    async def serve(self, call: Call) -> AsyncGenerator[tuple[Event, ...], None]:
        """The events of a call as they come, those that came together in one tuple.

        The last event is the end of the last output or a `Failure`. Leaving the iterator early
        frees what the call holds before the next cycle.
        """
        limit = self._hot.limits.max_requests
        if self._num_requests >= limit:
            message = f"this replica is full ({limit} requests); try again later"
            yield (Failure("busy", message),)
            return
        if not self._loop.is_alive:
            yield (_DEAD,)
            return
        self._num_requests += 1
        work = _Work(self._loop, limit_s=call.limit_s)
        try:
            await self._begin(call, work)
            async with aclosing(work.events()) as batches:
                async for batch in batches:
                    yield batch
        except _Refused as refused:
            yield (refused.failure,)
        except LoopEndedError:
            yield (_DEAD,)
        finally:
            self._num_requests -= 1
            work.cancel()

    async def _begin(self, call: Call, work: _Work) -> None:
        """Submit the call's tasks; nothing is submitted if any part of it is refused."""
        decoder = self._lineup.decoders.get(call.mode)
        if decoder is None:
            raise _Refused(
                f"hvd: {call.mode!r} is not served here: this model has no EAGLE-3 head; "
                f"choose from {', '.join(self.facts.modes)}",
                "hvd",
            )
        self._check_sampling(call.sampling)
        encoded = [await self._in_tokenizer(self._encode, prompt) for prompt in call.prompts]
        plans = [
            [
                DecodeTask(decoder, request, call, choice, work.emit)
                for choice, request in self._requests(call, index, token_ids)
            ]
            for index, token_ids in enumerate(encoded)
        ]
        work.num_open = sum(len(tasks) for tasks in plans)
        work.num_unopened = len(plans)
        for index, tasks in enumerate(plans):
            self._open(call, index, encoded[index], tasks, work)

    def _open(
        self,
        call: Call,
        index: int,
        token_ids: tuple[int, ...],
        tasks: Sequence[DecodeTask],
        work: _Work,
    ) -> None:
        """Say what is known of the prompt, scored first if that is wanted, then decode."""
        opening = Opening(index, len(token_ids))
        if call.shows_prompt:
            prompt = call.prompts[index]
            text = prompt if isinstance(prompt, str) else self._encoder.decode(token_ids)
            opening = replace(opening, prompt_text=text, prompt_token_ids=token_ids)
        if call.prompt_logprobs is None:
            work.emit(opening)
            work.submit(tasks)
            return
        scoring = ScoreTask(
            self._stage.engine,
            self._stage.codec,
            token_ids,
            call.prompt_logprobs,
            call,
            opening,
            work.emit,
            then=lambda: work.submit(tasks),
        )
        work.submit([scoring])

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        codec = self._encoder
        try:
            if isinstance(prompt, str):
                token_ids = tuple(codec.encode(prompt))
            elif prompt and isinstance(prompt[0], Message):
                token_ids = self._encode_chat(prompt)
            else:
                token_ids = tuple(prompt)  # type: ignore[arg-type]
        except UserError as error:
            raise _Refused(str(error), "messages") from None
        self._check_prompt(prompt, token_ids)
        return token_ids

    def _encode_chat(self, messages: Sequence[Any]) -> tuple[int, ...]:
        turns = [{"role": turn.role, "content": turn.content} for turn in messages]
        return tuple(self._encoder.encode_chat(turns))

    def _check_prompt(self, prompt: Prompt, token_ids: tuple[int, ...]) -> None:
        is_chat = bool(prompt) and isinstance(prompt[0], Message)
        param = "messages" if is_chat else "prompt"
        capabilities, limits = self._stage.engine.capabilities, self._hot.limits
        if not token_ids:
            raise _Refused(f"{param}: is empty", param)
        allowed = limits.max_prompt_tokens or capabilities.context_length - 1
        if len(token_ids) > min(allowed, capabilities.context_length - 1):
            raise _Refused(
                f"{param}: has {len(token_ids)} tokens; at most {allowed} are served here (the "
                f"model's context is {capabilities.context_length})",
                param,
                "context_length_exceeded",
            )
        if max(token_ids) >= capabilities.vocab_size:
            raise _Refused(
                f"{param}: token id {max(token_ids)} is not in the vocabulary of "
                f"{capabilities.vocab_size}",
                param,
            )

    def _check_sampling(self, sampling: SamplingParams) -> None:
        """Refuse token ids that are not in the vocabulary before anything is begun."""
        capabilities = self._stage.engine.capabilities
        no_prompt = np.zeros(0, dtype=np.int32)
        try:
            RowDistribution(
                sampling, no_prompt, capabilities.eos_token_ids, capabilities.vocab_size
            )
        except UserError as error:
            raise _Refused(str(error)) from None

    def _budget(self, call: Call, num_prompt_tokens: int) -> int:
        """Output tokens of each choice."""
        limits, context = self._hot.limits, self._stage.engine.capabilities.context_length
        room = context - num_prompt_tokens
        asked = call.max_tokens
        if asked is None:
            return min(room, limits.max_output_tokens or room)
        allowed = min(room, limits.max_output_tokens or room)
        if asked > allowed:
            why = f"the prompt's {num_prompt_tokens} leave room for {room} of {context}"
            if limits.max_output_tokens and limits.max_output_tokens < room:
                why = f"at most {limits.max_output_tokens} are served here"
            raise _Refused(
                f"max_tokens: {asked}, but {why}", "max_tokens", "context_length_exceeded"
            )
        return asked

    def _requests(
        self, call: Call, index: int, token_ids: tuple[int, ...]
    ) -> list[tuple[int, Request]]:
        """One for each choice of a prompt; seeds differ, as they do in vLLM."""
        budget = self._budget(call, len(token_ids))
        if budget == 0:
            return []
        scope = self.scope(call.tenant, call.salt)
        base = replace(call.sampling, max_tokens=budget)
        if base.min_tokens > budget:
            raise _Refused(f"min_tokens: must be at most max_tokens ({budget})", "min_tokens")
        requests = []
        for copy in range(call.num_choices):
            choice = index * call.num_choices + copy
            sampling = _with_seed(base, copy)
            request_id = f"{call.request_id}-{choice}"
            requests.append((choice, Request(request_id, token_ids, sampling, scope)))
        return requests

    def scope(self, tenant: str, salt: str | None) -> str:
        """Whose outputs may be drafted from: the tenant's, in a client's own partition if it
        named one; a salt never reaches another tenant's."""
        scope = scope_key(tenant=tenant, model=self.facts.model)
        return scope if salt is None else f"{scope}/{quote(salt, safe='')}"

    # -- tokens ----------------------------------------------------------------------------

    async def tokenize(self, prompt: Prompt) -> tuple[tuple[int, ...], tuple[str, ...]] | Failure:
        """Token ids and the text of each."""
        try:
            token_ids = await self._in_tokenizer(self._encode, prompt)
        except _Refused as refused:
            return refused.failure
        return token_ids, tuple(self._encoder.token_text(token) for token in token_ids)

    async def detokenize(self, token_ids: tuple[int, ...]) -> str | Failure:
        vocab_size = self._stage.engine.capabilities.vocab_size
        if token_ids and max(token_ids) >= vocab_size:
            message = f"tokens: {max(token_ids)} is not in the vocabulary of {vocab_size}"
            return Failure("bad_request", message, "tokens")
        return await self._in_tokenizer(self._encoder.decode, token_ids)

    async def _in_tokenizer(self, work: Callable[[T], R], argument: T) -> R:
        """Off the event loop: a prompt of megabytes takes a second."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work, argument)

    # -- operation -------------------------------------------------------------------------

    async def state(self) -> ReplicaState:
        lineup = self._lineup
        return ReplicaState(
            self.facts,
            is_alive=self.is_healthy,
            num_running=self._loop.num_running,
            num_waiting=self._loop.num_waiting,
            num_cached_tokens=self._stage.cache.num_cached_tokens,
            policy=lineup.policy,
            tau=lineup.tau,
            predictor=lineup.predictor,
            refused=self._refused,
            fault=self._loop.fault,
        )

    @property
    def is_healthy(self) -> bool:
        """Whether the decoding thread lives and gets on."""
        return self._loop.is_alive and self._loop.stalled_s < STALLED_S

    @property
    def lineup(self) -> Lineup:
        return self._lineup

    @property
    def limits(self) -> Limits:
        return self._hot.limits

    async def reconfigure(self, tree: dict[str, Any]) -> bool:
        """Take new settings on; requests under way end with the old ones.

        Returns:
            Whether they hold now; if not, `state().refused` says why and the old ones stay.
        """
        async with self._changing:
            try:
                hot = hot_settings(tree)
                await self._line_up(hot)
            except UserError as error:
                self._refuse(error)
                return False
            self._hot = hot
            self._loop.max_running = hot.limits.max_running
            return True

    async def refresh(self) -> bool:
        """Look again for the predictor that an alias names; True if another one serves now."""
        async with self._changing:
            policy = self._hot.policy
            try:
                folder = await asyncio.to_thread(self._stage.predictor_folder, policy)
                if folder == self._predictor:
                    return False
                await self._line_up(self._hot)
            except UserError as error:
                self._refuse(error)
                return False
            self._predictor = folder
            return True

    def poll_every(self, seconds: float) -> None:
        """Refresh from time to time, on the running event loop, until `end`."""

        async def poll() -> None:
            while True:
                await asyncio.sleep(seconds)
                await self.refresh()

        self._polling = asyncio.get_running_loop().create_task(poll())

    async def _line_up(self, hot: HotSettings) -> None:
        lineup = await asyncio.to_thread(
            line_up, self._stage, hot.policy, is_named=hot.is_policy_named
        )
        self._lineup, self._refused = lineup, None
        _log.info("serving policy %s, predictor %s", lineup.policy, lineup.predictor)

    def _refuse(self, error: UserError) -> None:
        if str(error) != self._refused:
            _log.error("refused, what served before stays: %s", error)
        self._refused = str(error)

    def end(self) -> None:
        """Stop the decoding thread; what has not finished is told so."""
        if self._polling is not None:
            self._polling.cancel()
        self._loop.end()
        self._tokenizing.shutdown(wait=False)


def _with_seed(sampling: SamplingParams, copy: int) -> SamplingParams:
    if copy == 0 or sampling.seed is None:
        return sampling
    return replace(sampling, seed=sampling.seed + copy)


@dataclass(eq=False)
class _Refused(Exception):  # noqa: N818 - it is a reason, not a fault
    message: str
    param: str | None = None
    code: str | None = None

    @property
    def failure(self) -> Failure:
        return Failure(
            "bad_request", self.message, self.param or named_param(self.message), self.code
        )


class _Work:
    """The tasks of one call, and the way their events take to its event loop."""

    def __init__(self, loop: DecodeLoop, *, limit_s: float) -> None:
        self.num_open = 0
        """Outputs that have not ended."""
        self.num_unopened = 0
        """Prompts that were not opened yet."""
        self._loop = loop
        self._tasks: list[Task] = []
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._event_loop = asyncio.get_running_loop()
        self._limit_s = limit_s
        self._deadline_s = self._event_loop.time() + limit_s
        self._lock = threading.Lock()
        self._is_cancelled = False

    def emit(self, event: Event) -> None:
        """From any thread."""
        try:
            self._event_loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the event loop has closed: nobody listens any more
            self._is_cancelled = True

    def submit(self, tasks: Sequence[Task]) -> None:
        """From any thread."""
        with self._lock:
            if not self._is_cancelled:
                self._tasks += tasks
                for task in tasks:
                    self._loop.submit(task)

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
        for task in self._tasks:
            self._loop.cancel(task)

    async def events(self) -> AsyncGenerator[tuple[Event, ...], None]:
        """Until every prompt was opened and every output has ended, or one has failed."""
        while self.num_open or self.num_unopened:
            batch = await self._next_events()
            failure = next((event for event in batch if isinstance(event, Failure)), None)
            if failure is not None:
                yield (failure,)
                return
            self.num_unopened -= sum(isinstance(event, Opening) for event in batch)
            self.num_open -= sum(
                isinstance(event, Piece) and event.finish_reason is not None for event in batch
            )
            yield batch

    async def _next_events(self) -> tuple[Event, ...]:
        left_s = self._deadline_s - self._event_loop.time()
        try:
            batch = [await asyncio.wait_for(self._events.get(), max(0.0, left_s))]
        except TimeoutError:
            message = f"the request took longer than {self._limit_s:g} s and was given up"
            return (Failure("timeout", message),)
        while not self._events.empty():
            batch.append(self._events.get_nowait())
        return tuple(batch)
