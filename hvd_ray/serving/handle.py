"""The replicas of a fleet as one backend, through a handle of Ray Serve.

A conversation goes to its replica while that has room; a call that no event came of yet is sent
again elsewhere when its replica is full or dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from hvd_ray.serving.api_error import ApiError
from hvd_ray.serving.calls import Call, Event, Failure, Prompt, ReplicaState

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
        session = call.session
        for attempt in range(NUM_TRIES):
            has_begun, is_last = False, attempt == NUM_TRIES - 1
            async for batch in self._try(call, session):
                refused = isinstance(batch[0], Failure) and batch[0].kind in ("busy", "dead")
                if refused and not has_begun and not is_last:
                    break
                has_begun = True
                yield batch
            if has_begun:
                return
            session = None  # anybody else

    async def _try(self, call: Call, session: str | None) -> AsyncIterator[tuple[Event, ...]]:
        options: dict[str, Any] = {} if session is None else {"session_id": session}
        stream = self.handle.options(stream=True, method_name="serve", **options).remote(call)
        try:
            async for batch in stream:
                yield batch
        except BackPressureError:
            yield (_BUSY,)
        except (RayActorError, DeploymentUnavailableError):
            yield (_GONE,)
        finally:
            stream.cancel()

    async def state(self) -> ReplicaState:
        try:
            return await asyncio.wait_for(self.first_state(), STATE_TIMEOUT_S)
        except (TimeoutError, RayActorError, DeploymentUnavailableError, BackPressureError):
            raise ApiError(503, "no replica answers", code="no_replica") from None

    async def first_state(self) -> ReplicaState:
        """Waits as long as it takes for a replica to be there."""
        state: ReplicaState = await self.handle.state.remote()
        return state

    async def tokenize(self, prompt: Prompt) -> tuple[tuple[int, ...], tuple[str, ...]] | Failure:
        found: tuple[tuple[int, ...], tuple[str, ...]] | Failure
        found = await self.handle.tokenize.remote(prompt)
        return found

    async def detokenize(self, token_ids: tuple[int, ...]) -> str | Failure:
        found: str | Failure = await self.handle.detokenize.remote(token_ids)
        return found
