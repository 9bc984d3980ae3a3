"""The replicas of a fleet as one backend, through a handle of Ray Serve.

A conversation goes to its replica while that has room; a call of whose answer nothing came yet is
sent again elsewhere when its replica is full or dies.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
)
from ray.serve.handle import DeploymentHandle

from hvd_ray.serving.api_error import ApiError
from hvd_ray.serving.calls import (
    Call,
    Event,
    Failure,
    Opening,
    Prompt,
    ReplicaState,
    together,
)
from hvd_ray.serving.carrier import Inboxes
from hvd_ray.serving.relay import RelayCall, RelayEvent, RelayHead
from hvd_ray.serving.ring import place_of

_log = logging.getLogger(__name__)
STATE_TIMEOUT_S = 10.0
NUM_TRIES = 3
"""Each at another replica, as far as there are so many."""

_BUSY = Failure("busy", "all replicas are full; try again later")
_GONE = Failure("dead", "the replica died; the request may be sent again")


@dataclass(frozen=True, slots=True)
class HandleBackend:
    """`front.Backend` over many replicas."""

    handle: DeploymentHandle
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    """What replicas know this front by."""
    _inboxes: Inboxes = field(default_factory=Inboxes, init=False)
    _receiving: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    async def serve(self, call: Call) -> AsyncIterator[tuple[Event, ...]]:
        """The events of a call; the last try's refusal is what the client gets."""
        async with aclosing(self._somewhere("serve", call)) as batches:
            async for batch in batches:
                yield batch if isinstance(batch, tuple) else (batch,)

    async def relay(self, call: RelayCall) -> AsyncIterator[RelayEvent | Failure]:
        """The answer of a replica that has endpoints of its own."""
        call_id, session = secrets.token_hex(8), call.session or secrets.token_hex(8)
        call = replace(call, call_id=call_id, front=self.name, session=session)
        self._inboxes.open(call_id)
        if self._inboxes.wants_carrier():
            self._open_carrier(place_of(session, 0))
        try:
            async with aclosing(self._somewhere("relay", call)) as events:
                async for event in events:
                    yield event
                    if isinstance(event, RelayHead) and event.carrier is not None:
                        async for part in self._inboxes.parts(call_id, event.carrier):
                            yield part
                        return
        finally:
            self._inboxes.close(call_id)

    def _open_carrier(self, place: str) -> None:
        """One from the replica at that place, if it has none yet for this front."""
        name = secrets.token_hex(8)
        self._inboxes.expect(name)
        receiving = asyncio.create_task(self._receive(name, place))
        self._receiving.add(receiving)
        receiving.add_done_callback(self._receiving.discard)

    async def _receive(self, name: str, place: str) -> None:
        handle = self.handle.options(stream=True, method_name="carry", session_id=place)
        stream = handle.remote(self.name, name)
        try:
            await self._inboxes.receive(name, stream)
        except (RayError, RayServeException) as error:
            _log.info("a carrier broke: %r", error)  # its calls have been told
        finally:
            stream.cancel()

    async def _somewhere(self, method: str, call: Call | RelayCall) -> AsyncGenerator[Any, None]:
        """What the session's replica yields, or another's if that one is full or gone."""
        session = call.session or secrets.token_hex(8)
        for attempt in range(NUM_TRIES):
            place = place_of(session, attempt)
            async with aclosing(self._try(method, call, place)) as stream:
                begun = await _beginning(stream)
                is_refused = bool(begun) and _is_refusal(begun[-1])
                if not is_refused or attempt == NUM_TRIES - 1:
                    for item in begun:
                        yield item
                    async for item in stream:
                        yield item
                    return

    async def _try(
        self, method: str, call: Call | RelayCall, place: str
    ) -> AsyncGenerator[Any, None]:
        handle = self.handle.options(stream=True, method_name=method, session_id=place)
        stream = handle.remote(call)
        try:
            async for item in stream:
                yield item
        except BackPressureError:
            yield _BUSY
        except (RayActorError, DeploymentUnavailableError):
            yield _GONE
        finally:
            stream.cancel()

    async def state(self) -> ReplicaState:
        """All replicas together; one that does not answer in time is left out."""
        states = [found for found in await self._all("state") if isinstance(found, ReplicaState)]
        return together(states) if states else await self._state_soon()

    async def expositions(self) -> Mapping[str, str]:
        """The figures of each replica that answers in time, by its name."""
        return dict(found for found in await self._all("exposition") if isinstance(found, tuple))

    async def _all(self, method: str) -> list[Any]:
        """What every replica answers, or the exception that it ended with."""
        response = self.handle.broadcast(method)
        try:
            found: list[Any] = await response.results_async(
                timeout_s=STATE_TIMEOUT_S, return_exceptions=True
            )
        except (TimeoutError, RayActorError, DeploymentUnavailableError):
            return []
        return found

    async def _state_soon(self) -> ReplicaState:
        """That of the next replica to be there: none is listed while it takes new settings on."""
        try:
            return await asyncio.wait_for(self.first_state(), STATE_TIMEOUT_S)
        except (TimeoutError, RayActorError, DeploymentUnavailableError, BackPressureError):
            message = "no replica answers"
            raise ApiError(503, message, code="no_replica", retry_after_s=5) from None

    async def first_state(self) -> ReplicaState:
        """Waits as long as it takes for a replica to be there."""
        state: ReplicaState = await self.handle.state.remote()
        return state

    async def tokenize(self, prompt: Prompt) -> tuple[tuple[int, ...], tuple[str, ...]] | Failure:
        found: tuple[tuple[int, ...], tuple[str, ...]] | Failure
        found = await self._one("tokenize", prompt)
        return found

    async def detokenize(self, token_ids: tuple[int, ...]) -> str | Failure:
        found: str | Failure = await self._one("detokenize", token_ids)
        return found

    async def _one(self, method: str, argument: object) -> Any:
        try:
            return await self.handle.options(method_name=method).remote(argument)
        except BackPressureError:
            return _BUSY
        except (RayActorError, DeploymentUnavailableError):
            return _GONE

    async def fields(self) -> Mapping[str, frozenset[str]]:
        found: Mapping[str, frozenset[str]] = await self.handle.fields.remote()
        return found


async def _beginning(stream: AsyncIterator[Any]) -> list[Any]:
    """Up to the first item that a client could be shown; of a call that is refused, that alone."""
    begun: list[Any] = []
    async for item in stream:
        if _is_refusal(item):
            return [item]
        begun.append(item)
        if not _is_preface(item):
            break
    return begun


def _is_preface(item: object) -> bool:
    """Whether it only says that an answer may follow: the client has seen nothing of it."""
    return isinstance(item, tuple) and all(isinstance(event, Opening) for event in item)


def _is_refusal(item: object) -> bool:
    """Whether the call may be sent elsewhere."""
    first = item[0] if isinstance(item, tuple) else item
    return isinstance(first, Failure) and first.kind in ("busy", "dead")
