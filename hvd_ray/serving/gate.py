"""The door of a front that is about to end: nobody new comes in, the last one inside is awaited."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from hvd_ray.serving.api_error import ApiError

LOOKING_S = 0.05
RETRY_AFTER_S = 5.0
"""Whoever starts a server in place of this one needs longer; a balancer has another one."""


@dataclass(slots=True)
class Gate:
    """Requests under way, counted until the last byte of their answers."""

    is_closed: bool = False
    num_inside: int = 0

    def refuse_if_closed(self) -> None:
        """Turn away whoever comes too late.

        Raises:
            ApiError: 503, the server is ending.
        """
        if self.is_closed:
            message = "the server is ending and finishes what is under way; try again later"
            raise ApiError(503, message, code="shutting_down", retry_after_s=RETRY_AFTER_S)

    def guarding(self, handler: ASGIApp) -> ASGIApp:
        """The same endpoint behind the gate."""
        return _Guarded(self, handler)

    async def close(self) -> None:
        """Let nobody in any more; returns when all that were inside have their answers."""
        self.is_closed = True
        while self.num_inside:
            await asyncio.sleep(LOOKING_S)


@dataclass(frozen=True, slots=True)
class _Guarded:
    gate: Gate
    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.gate.refuse_if_closed()
        self.gate.num_inside += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.gate.num_inside -= 1
