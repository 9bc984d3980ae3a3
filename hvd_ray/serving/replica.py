"""A replica: one target, its drafters and its decoding thread, behind calls and events.

It knows nothing of HTTP or Ray. Everything that touches the engine runs on the decoding thread;
tokenizing and waiting happen on the caller's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from hvd_ray.decode import Decoder
from hvd_ray.errors import UserError
from hvd_ray.serving.admission import Admission, RefusedError
from hvd_ray.serving.calls import (
    Call,
    Event,
    Failure,
    Opening,
    Prompt,
    ReplicaFacts,
    ReplicaState,
)
from hvd_ray.serving.lineup import Lineup, Stage, is_lesser, line_up
from hvd_ray.serving.loop import DecodeLoop, LoopEndedError
from hvd_ray.serving.settings import HotSettings, hot_settings
from hvd_ray.serving.tasks import DecodeTask, ScoreTask
from hvd_ray.serving.work import Work
from hvd_ray.shipped import shipped_folder

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
        self._admission = Admission(stage.codec, stage.engine.capabilities, name, hot.limits)
        self._tokenizing = ThreadPoolExecutor(1, "tokenize")
        self._polling: asyncio.Task[None] | None = None
        self._predictor = stage.predictor_folder(hot.policy)
        self._num_requests = 0
        self._refused: str | None = None
        self._poll_refusal: str | None = None
        self._changing = asyncio.Lock()
        self.facts = ReplicaFacts(
            model=name,
            root=root,
            engine=stage.engine.capabilities.name,
            dtype=stage.engine.capabilities.dtype,
            context_length=stage.engine.capabilities.context_length,
            modes=tuple(self._lineup.decoders),
            verifications=tuple(self._lineup.verified),
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
        work = Work(self._loop, limit_s=call.limit_s)
        try:
            await self._begin(call, work)
            async with aclosing(work.events()) as batches:
                async for batch in batches:
                    yield batch
        except RefusedError as refused:
            yield (refused.failure,)
        except LoopEndedError:
            yield (_DEAD,)
        finally:
            self._num_requests -= 1
            work.cancel()

    async def _begin(self, call: Call, work: Work) -> None:
        """Submit the call's tasks; nothing is submitted if any part of it is refused."""
        decoder = self._decoder(call)
        self._admission.check_sampling(call.sampling)
        encoded = [
            await self._in_tokenizer(self._admission.encode, prompt) for prompt in call.prompts
        ]
        plans = [
            [
                DecodeTask(decoder, request, call, choice, work.emit)
                for choice, request in self._admission.requests(call, index, token_ids)
            ]
            for index, token_ids in enumerate(encoded)
        ]
        work.num_open = sum(len(tasks) for tasks in plans)
        work.num_unopened = len(plans)
        for index, tasks in enumerate(plans):
            self._open(call, index, encoded[index], tasks, work)

    def _decoder(self, call: Call) -> Decoder:
        """The decoder for what a call asks for.

        Raises:
            RefusedError: it is not served here; names the field.
        """
        decoders = self._lineup.verified.get(call.verification)
        if decoders is None:
            raise RefusedError(
                f"verification: {call.verification!r} is not allowed by this deployment; choose "
                f"from {', '.join(self.facts.verifications)}",
                "verification",
                "unsupported_parameter",
            )
        decoder = decoders.get(call.mode)
        if decoder is None:
            raise RefusedError(
                f"hvd: {call.mode!r} is not served here: this model has no EAGLE-3 head; "
                f"choose from {', '.join(self.facts.modes)}",
                "hvd",
            )
        return decoder

    def _open(
        self,
        call: Call,
        index: int,
        token_ids: tuple[int, ...],
        tasks: Sequence[DecodeTask],
        work: Work,
    ) -> None:
        """Say what is known of the prompt, scored first if that is wanted, then decode."""
        opening = Opening(index, len(token_ids))
        if call.shows_prompt:
            prompt = call.prompts[index]
            text = prompt if isinstance(prompt, str) else self._admission.decode(token_ids)
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

    def scope_of(self, tenant: str) -> str:
        """Whose outputs a tenant's requests are drafted from."""
        return self._admission.scope(tenant, None)

    # -- tokens ----------------------------------------------------------------------------

    async def tokenize(self, prompt: Prompt) -> tuple[tuple[int, ...], tuple[str, ...]] | Failure:
        """Token ids and the text of each."""
        try:
            token_ids = await self._in_tokenizer(self._admission.encode, prompt)
        except RefusedError as refused:
            return refused.failure
        texts = map(self._admission.codec.token_text, token_ids)
        return token_ids, tuple(texts)

    async def detokenize(self, token_ids: tuple[int, ...]) -> str | Failure:
        try:
            return await self._in_tokenizer(self._admission.decode, token_ids)
        except RefusedError as refused:
            return refused.failure

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
            notes=lineup.notes,
            refused=self._refused,
            fault=self._loop.fault,
            audits={
                name: audited
                for name, check in self._stage.checks.items()
                if (audited := check.audited) is not None
            },
        )

    @property
    def is_healthy(self) -> bool:
        """Whether the decoding thread lives and gets on."""
        return self._loop.is_alive and self._loop.stalled_s < STALLED_S

    @property
    def lineup(self) -> Lineup:
        return self._lineup

    async def reconfigure(self, tree: dict[str, Any]) -> bool:
        """Take new settings on; requests under way end with the old ones.

        Returns:
            Whether they hold now; if not, `state().refused` says why and the old ones stay.
        """
        async with self._changing:
            try:
                hot = hot_settings(tree)
                folder = await asyncio.to_thread(self._stage.predictor_folder, hot.policy)
                self._take(await self._lined_up(hot))
            except UserError as error:
                self.refuse(error)
                return False
            self._predictor = folder
            self._hot, self._admission.limits = hot, hot.limits
            self._loop.max_running = hot.limits.max_running
            return True

    async def refresh(self) -> bool:
        """Look again for the predictor that an alias names; True if another one serves now."""
        async with self._changing:
            policy = self._hot.policy
            try:
                folder = await asyncio.to_thread(self._stage.predictor_folder, policy)
                if folder == self._predictor:
                    self._forgive()
                    return False
                await asyncio.to_thread(self._check_found, folder)
                lineup = await self._lined_up(self._hot)
                self._check_no_worse(lineup)
                self._take(lineup)
            except UserError as error:
                self.refuse(error)
                self._poll_refusal = str(error)
                return False
            self._predictor = folder
            return True

    def _check_found(self, folder: Path | None) -> None:
        """A registry that is gone looks like one that never had a champion; one that is there
        and has none any more was told so (`hvd promote --shipped`).

        Raises:
            UserError: one served until now, and none is to be found.
        """
        shipped = shipped_folder(self._stage.config.model, "payoff")
        if self._predictor is None or folder not in (None, shipped):
            return
        if folder is None or not self._stage.is_vacant(self._stage.config):
            raise UserError("the registry gives no champion any more, or cannot be reached")

    def _check_no_worse(self, lineup: Lineup) -> None:
        """A champion that is damaged, or of a kind that cannot decide, must not be what moves a
        deployment without a policy of its own to a lesser one.

        Raises:
            UserError: the policy that serves cannot be had with it.
        """
        if not self._hot.is_policy_named and is_lesser(lineup.policy, than=self._lineup.policy):
            raise UserError("; ".join(lineup.notes))

    def _forgive(self) -> None:
        """The registry names again what serves."""
        if self._refused is not None and self._refused == self._poll_refusal:
            self._refused = None

    def poll_every(self, seconds: float) -> None:
        """Refresh from time to time, on the running event loop, until `end`."""

        async def poll() -> None:
            while True:
                await asyncio.sleep(seconds)
                try:
                    await self.refresh()
                except Exception:  # noqa: BLE001 - one look at the registry must not be the last
                    _log.exception("the registry was asked in vain; what serves stays")

        self._polling = asyncio.get_running_loop().create_task(poll())

    async def _lined_up(self, hot: HotSettings) -> Lineup:
        return await asyncio.to_thread(
            line_up, self._stage, hot.policy, is_named=hot.is_policy_named
        )

    def _take(self, lineup: Lineup) -> None:
        self._lineup, self._refused = lineup, None
        _log.info("serving policy %s, predictor %s", lineup.policy, lineup.predictor)

    def refuse(self, error: UserError) -> None:
        """Note that the latest settings do not hold, and why."""
        if str(error) != self._refused:
            _log.error("refused, what served before stays: %s", error)
        self._refused = str(error)

    def end(self) -> None:
        """Stop the decoding thread; what has not finished is told so."""
        if self._polling is not None:
            self._polling.cancel()
        self._loop.end()
        self._tokenizing.shutdown(wait=False)
