"""The replicas of a fleet as one backend, through a handle of Ray Serve.

A conversation goes to its replica while that has room; a call that no event came of yet is sent
again elsewhere when its replica is full or dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from hvd_ray.serving.api_error import ApiError
from hvd_ray.serving.calls import Call, Event, Failure, Prompt, ReplicaState, together
from hvd_ray.serving.relay import RelayCall, RelayEvent

STATE_TIMEOUT_S = 10.0
NUM_TRIES = 3

_BUSY = Failure("busy", "all replicas are full; try again later")
_GONE = Failure("dead", "the replica died; the request may be sent again")


@dataclass(frozen=True, slots=True)
class HandleBackend:
    """`front.Backend` over many replicas."""

    handle: DeploymentHandle

    async def serve(self, call: Call) -> AsyncIterator[tuple[Event, ...]]:
        """The events of a call; the last try's refusal is what the client gets."""
        async with aclosing(self._somewhere("serve", call, _refusal_in)) as batches:
            async for batch in batches:
                yield batch if isinstance(batch, tuple) else (batch,)

    async def relay(self, call: RelayCall) -> AsyncIterator[RelayEvent | Failure]:
        """The answer of a replica that has endpoints of its own."""
        async with aclosing(self._somewhere("relay", call, _refusal)) as events:
            async for event in events:
                yield event

    async def _somewhere(
        self, method: str, call: Call | RelayCall, refusal: Callable[[Any], Failure | None]
    ) -> AsyncGenerator[Any, None]:
        """What the session's replica yields, or another's if that one is full or gone."""
        session = call.session
        for attempt in range(NUM_TRIES):
            has_begun, is_last = False, attempt == NUM_TRIES - 1
            async with aclosing(self._try(method, call, session)) as stream:
                async for item in stream:
                    if refusal(item) is not None and not has_begun and not is_last:
                        break
                    has_begun = True
                    yield item
            if has_begun:
                return
            session = None  # anybody else

    async def _try(
        self, method: str, call: Call | RelayCall, session: str | None
    ) -> AsyncGenerator[Any, None]:
        options: dict[str, Any] = {} if session is None else {"session_id": session}
        stream = self.handle.options(stream=True, method_name=method, **options).remote(call)
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


def _refusal(item: object) -> Failure | None:
    """A failure after which the call may be sent elsewhere."""
    is_refusal = isinstance(item, Failure) and item.kind in ("busy", "dead")
    return item if isinstance(item, Failure) and is_refusal else None


def _refusal_in(item: object) -> Failure | None:
    return _refusal(item[0] if isinstance(item, tuple) else item)
