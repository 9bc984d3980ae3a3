"""One stream for many: what a replica's calls say to one front is carried there together.

Ray's price of a stream is by the item, a millisecond in each process, and an engine's step gives
every running call a part at the same moment. So a front with several streams at a replica opens one
more, the carrier, and the replica puts into it what the calls say after their beginning. Each call
keeps a stream of its own, by which it is sent to its replica, begins, and is left early.

Nothing is lost where a carrier ends: it ends of its own accord only when no call is attached to it,
and where it breaks, its calls are failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace

from hvd_ray.serving.calls import Failure
from hvd_ray.serving.relay import RelayCall, RelayEvent, RelayHead

Part = bytes | Failure | None
"""Of a call's answer; None: there is no more of it."""
Load = dict[str, list[Part]]
"""What is carried at a time: for each call its parts in order."""

INTERVAL_S = 0.005
"""Between loads; what comes meanwhile waits for the next."""
IDLE_S = 1.0
"""A carrier without calls ends after this: Serve waits for it when the replica is to end."""
TAKING_ON_S = 30.0
"""After this it takes on no call any more, so that it ends with those that it has."""
FEW = 4
"""Below so many calls under way a front opens no carrier."""
OPENING_S, PAUSE_S = 0.1, 2.0
"""A front opens one at most so often, not knowing how many replicas there are; and for a while none
after one that brought nothing, as where its replica had one."""

_BROKEN = Failure("dead", "the replica died; the request may be sent again")


# -- in the replica ------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Carrier:
    """The replica's end of one; made on the running event loop."""

    name: str
    _calls: set[str] = field(default_factory=set, init=False)
    _load: Load = field(default_factory=dict, init=False)
    _has_load: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _is_over: bool = field(default=False, init=False)
    _old_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._old_s = _now_s() + TAKING_ON_S

    @property
    def takes_on(self) -> bool:
        return not self._is_over and _now_s() < self._old_s

    def attach(self, call_id: str) -> None:
        self._calls.add(call_id)

    def put(self, call_id: str, part: Part) -> None:
        """Carry a part of an attached call's answer; after None it is no longer attached."""
        self._load.setdefault(call_id, []).append(part)
        self._has_load.set()
        if part is None:
            self._calls.discard(call_id)

    async def loads(self) -> AsyncGenerator[Load, None]:
        """What is to be carried, as it comes, until no call is attached for a while."""
        try:
            while self._calls or self._load or await self._is_needed():
                await self._has_load.wait()
                load, self._load = self._load, {}
                self._has_load.clear()
                yield {call_id: _joined(parts) for call_id, parts in load.items()}
                await asyncio.sleep(INTERVAL_S)
        finally:
            self._is_over = True

    async def _is_needed(self) -> bool:
        """Whether a call is attached before the carrier has been idle for too long."""
        if not self.takes_on:
            return False
        with suppress(TimeoutError):
            await asyncio.wait_for(self._has_load.wait(), IDLE_S)
        return bool(self._calls or self._load)


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _joined(parts: list[Part]) -> list[Part]:
    """Neighbouring parts of a body as one."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, bytes) and isinstance(last, bytes):
            joined[-1] = last + part
        else:
            joined.append(part)
    return joined


@dataclass(slots=True)
class Carriers:
    """A replica's carriers, one for each front that has opened one."""

    _by_front: dict[str, Carrier] = field(default_factory=dict, init=False)
    _by_call: dict[str, Carrier] = field(default_factory=dict, init=False)

    async def loads(self, front: str, name: str) -> AsyncGenerator[Load, None]:
        """Open a carrier; ends at once where that front has one that still takes calls on."""
        if self._open_for(front) is not None:
            return
        carrier = self._by_front[front] = Carrier(name)
        try:
            async with aclosing(carrier.loads()) as loads:
                async for load in loads:
                    yield load
        finally:
            if self._by_front.get(front) is carrier:
                del self._by_front[front]

    async def carried(
        self, call: RelayCall, events: AsyncIterator[RelayEvent | Failure]
    ) -> AsyncGenerator[RelayEvent | Failure, None]:
        """What stays in the call's own stream: the beginning of a stream, or else all of it."""
        carrier, has_begun = self._attach(call), False
        try:
            async for event in events:
                if has_begun:
                    assert carrier is not None
                    assert not isinstance(event, RelayHead)
                    carrier.put(call.call_id, event)
                    continue
                if isinstance(event, RelayHead) and is_stream(event):
                    carrier = carrier or self._attach(call)  # opened meanwhile
                    if carrier is not None:
                        has_begun, event = True, replace(event, carrier=carrier.name)
                yield event
        except BaseException:  # ended by whomever: what was cut short must not look whole
            if carrier is not None:
                message = "the engine failed on this request; the server's log says why"
                carrier.put(call.call_id, Failure("fault", message))
            raise
        finally:
            if carrier is not None:
                self._by_call.pop(call.call_id, None)
                carrier.put(call.call_id, None)

    def __contains__(self, call: RelayCall) -> bool:
        """Whether the call is attached to one."""
        return call.call_id in self._by_call

    def _attach(self, call: RelayCall) -> Carrier | None:
        carrier = self._open_for(call.front)
        if carrier is not None:
            carrier.attach(call.call_id)
            self._by_call[call.call_id] = carrier
        return carrier

    def _open_for(self, front: str) -> Carrier | None:
        carrier = self._by_front.get(front)
        return carrier if carrier is not None and carrier.takes_on else None


def is_stream(event: object) -> bool:
    """Whether it begins an answer that comes in parts."""
    return isinstance(event, RelayHead) and event.content_type.startswith("text/event-stream")


# -- in the front --------------------------------------------------------------------------------

Inbox = asyncio.Queue[tuple[str, Part]]
"""Parts with their carrier's names: a call that is sent again may meet what the first try left."""


@dataclass(slots=True)
class Inboxes:
    """The front's end of all its carriers: an inbox for each call under way."""

    _by_call: dict[str, Inbox] = field(default_factory=dict, init=False)
    _attached: dict[str, list[Inbox]] = field(default_factory=dict, init=False)
    """To each carrier that is open, by its name."""
    _next_s: float = field(default=0.0, init=False)

    def open(self, call_id: str) -> None:
        self._by_call[call_id] = asyncio.Queue()

    def close(self, call_id: str) -> None:
        """What still comes for it is dropped."""
        del self._by_call[call_id]

    def wants_carrier(self) -> bool:
        """Whether it is worth one more; if so it must be opened, under a name that is expected."""
        now_s = _now_s()
        if len(self._by_call) < FEW or now_s < self._next_s:
            return False
        self._next_s = now_s + OPENING_S
        return True

    def expect(self, name: str) -> None:
        """A carrier of that name is being opened."""
        self._attached[name] = []

    async def receive(self, name: str, loads: AsyncIterator[Load]) -> None:
        """Deal out what an expected carrier brings; if it breaks, its calls are failed."""
        is_used = False
        try:
            async for load in loads:
                is_used = True
                self._deal_out(name, load)
        finally:
            if not is_used:
                self._next_s = _now_s() + PAUSE_S
            for inbox in self._attached.pop(name):
                inbox.put_nowait((name, _BROKEN))  # read only where no end has come

    def _deal_out(self, name: str, load: Load) -> None:
        for call_id, parts in load.items():
            inbox = self._by_call.get(call_id)
            if inbox is not None:
                for part in parts:
                    inbox.put_nowait((name, part))

    async def parts(self, call_id: str, carrier: str) -> AsyncGenerator[bytes | Failure, None]:
        """What a carrier brings of a call, to its last part or the carrier's end."""
        inbox = self._by_call[call_id]
        if carrier in self._attached:
            self._attached[carrier].append(inbox)
        else:  # it ended before the call's beginning arrived, and has brought what it had
            inbox.put_nowait((carrier, _BROKEN))
        while True:
            name, part = await inbox.get()
            if name != carrier:
                continue
            if part is None:
                return
            yield part
            if isinstance(part, Failure):
                return
