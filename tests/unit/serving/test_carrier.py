"""Many streams in one: every part of every call arrives once, in order, whatever ends before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest

from hvd_ray.serving import carrier as module
from hvd_ray.serving.calls import Failure
from hvd_ray.serving.carrier import FEW, Carriers, Inboxes, Load
from hvd_ray.serving.relay import RelayCall, RelayEvent, RelayHead

HEAD = RelayHead(200, "text/event-stream; charset=utf-8", b"0")
FRONT = "front"


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.1)
    monkeypatch.setattr(module, "OPENING_S", 0.0)


def bounded(work: Callable[[], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with asyncio.timeout(10):
            return await work()

    return asyncio.run(run())


def call(number: int) -> RelayCall:
    return RelayCall("POST", "/", {}, call_id=str(number), front=FRONT)


async def talk(*parts: bytes, pause_s: float = 0.001) -> AsyncGenerator[RelayEvent | Failure, None]:
    yield HEAD
    for part in parts:
        await asyncio.sleep(pause_s)
        yield part


class Replica:
    """Calls as a replica answers them, and how many items its own streams took."""

    def __init__(self) -> None:
        self.carriers = Carriers()
        self.num_own = 0
        self.num_loads = 0

    async def answer(
        self, asked: RelayCall, events: AsyncGenerator[RelayEvent | Failure, None]
    ) -> AsyncGenerator[RelayEvent | Failure, None]:
        async with aclosing(events), aclosing(self.carriers.carried(asked, events)) as kept:
            async for event in kept:
                self.num_own += 1
                yield event

    async def stream(
        self, asked: RelayCall, events: AsyncGenerator[RelayEvent | Failure, None]
    ) -> AsyncIterator[Any]:
        """A call as Ray brings it: the replica goes on, whether or not somebody reads."""
        came: asyncio.Queue[Any] = asyncio.Queue()

        async def pump() -> None:
            try:
                async for event in self.answer(asked, events):
                    came.put_nowait(event)
            except RuntimeError as error:
                came.put_nowait(error)
            came.put_nowait(None)

        pumping = asyncio.create_task(pump())
        while (event := await came.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event
        await pumping

    async def loads(self, name: str) -> AsyncIterator[Load]:
        async for load in self.carriers.loads(FRONT, name):
            self.num_loads += 1
            yield load


async def read(inboxes: Inboxes, asked: RelayCall, own: AsyncIterator[Any]) -> list[Any]:
    """What a front hands on of a call."""
    inboxes.open(asked.call_id)
    told: list[Any] = []
    async for event in own:
        told.append(event.body if isinstance(event, RelayHead) else event)
        if isinstance(event, RelayHead) and event.carrier is not None:
            told += [part async for part in inboxes.parts(asked.call_id, event.carrier)]
            break
    inboxes.close(asked.call_id)
    return told


def opened(inboxes: Inboxes, replica: Replica, name: str = "c") -> asyncio.Task[None]:
    inboxes.expect(name)
    return asyncio.create_task(inboxes.receive(name, replica.loads(name)))


def test_every_part_of_many_calls_arrives_once_and_in_order() -> None:
    async def run() -> None:
        inboxes, replica = Inboxes(), Replica()
        receiving = opened(inboxes, replica)
        await asyncio.sleep(0)
        texts = {n: [b"%d-%d;" % (n, k) for k in range(30)] for n in range(20)}
        told = await asyncio.gather(
            *(read(inboxes, call(n), replica.stream(call(n), talk(*texts[n]))) for n in texts)
        )
        for number, parts in enumerate(told):
            assert b"".join(parts) == b"0" + b"".join(texts[number])
        assert replica.num_own == 20, "of its own stream each call has the beginning alone"
        assert replica.num_loads < 60, "600 parts in a few loads"
        await receiving  # idle, it ends of its own accord
        assert await own_items(replica, call(99)) == 2, "no carrier takes it on"

    bounded(run)


def test_a_front_has_one_carrier_and_another_front_its_own() -> None:
    async def run() -> None:
        replica = Replica()
        first = asyncio.create_task(_count(replica.carriers.loads(FRONT, "a")))
        await asyncio.sleep(0)
        assert await _count(replica.carriers.loads(FRONT, "b")) == 0
        other = RelayCall("POST", "/", {}, call_id="1", front="x")
        assert await own_items(replica, other) == 2
        await first

    bounded(run)


async def own_items(replica: Replica, asked: RelayCall) -> int:
    """How many items an answer of two parts takes of its own stream."""
    return len([event async for event in replica.answer(asked, talk(b"1"))])


def test_a_carrier_that_is_opened_meanwhile_takes_the_call_on() -> None:
    async def late() -> AsyncGenerator[RelayEvent | Failure, None]:
        await asyncio.sleep(0.05)
        async for event in talk(b"1", b"2"):
            yield event

    async def run() -> None:
        inboxes, replica = Inboxes(), Replica()
        reading = asyncio.create_task(read(inboxes, call(1), replica.stream(call(1), late())))
        await asyncio.sleep(0.01)
        receiving = opened(inboxes, replica)
        assert b"".join(await reading) == b"012"
        assert replica.num_own == 1
        assert call(1) not in replica.carriers
        await receiving

    bounded(run)


async def _count(loads: AsyncIterator[Load]) -> int:
    return len([load async for load in loads])


def test_an_answer_that_is_not_streamed_goes_its_own_way() -> None:
    async def whole() -> AsyncGenerator[RelayEvent | Failure, None]:
        yield RelayHead(200, "application/json", b"{}")
        yield b"\n"

    async def run() -> None:
        inboxes, replica = Inboxes(), Replica()
        receiving = opened(inboxes, replica)
        await asyncio.sleep(0)
        assert await read(inboxes, call(1), replica.stream(call(1), whole())) == [b"{}", b"\n"]
        await receiving

    bounded(run)


def test_a_carrier_that_breaks_fails_its_calls_and_no_other() -> None:
    async def breaks(replica: Replica) -> AsyncIterator[Load]:
        async for load in replica.loads("c"):
            yield load
            if b"3" in load.get("1", []):
                raise ConnectionError

    async def run() -> None:
        inboxes, replica = Inboxes(), Replica()
        inboxes.expect("c")
        receiving = asyncio.create_task(inboxes.receive("c", breaks(replica)))
        await asyncio.sleep(0)
        short = read(inboxes, call(2), replica.stream(call(2), talk(b"1")))
        long = talk(*(b"%d" % n for n in range(1, 9)), pause_s=0.02)
        told, whole = await asyncio.gather(
            read(inboxes, call(1), replica.stream(call(1), long)), short
        )
        assert whole == [b"0", b"1"]
        assert told[:-1] == [b"0", b"1", b"2", b"3"]
        assert told[-1].kind == "dead"
        with pytest.raises(ConnectionError):
            await receiving

    bounded(run)


def test_a_call_that_begins_where_the_carrier_has_just_broken_is_failed() -> None:
    async def run() -> None:
        inboxes = Inboxes()
        inboxes.open("1")
        told = [part async for part in inboxes.parts("1", "gone")]
        assert [part.kind for part in told if isinstance(part, Failure)] == ["dead"]

    bounded(run)


def test_what_a_first_try_left_does_not_reach_the_second() -> None:
    """Its beginning was lost with its replica, and a part of it had come by that one's carrier."""

    async def once(load: Load) -> AsyncIterator[Load]:
        yield load

    async def run() -> None:
        inboxes = Inboxes()
        inboxes.open("1")
        for name, parts in (("old", [b"x"]), ("new", [b"1", b"2", None])):
            inboxes.expect(name)
            await inboxes.receive(name, once({"1": parts}))
        assert [part async for part in inboxes.parts("1", "new")] == [b"1", b"2"]

    bounded(run)


def test_a_fault_of_the_engine_is_told() -> None:
    async def faulty() -> AsyncGenerator[RelayEvent | Failure, None]:
        yield HEAD
        raise RuntimeError("inside")

    async def run() -> None:
        inboxes, replica = Inboxes(), Replica()
        receiving = opened(inboxes, replica)
        await asyncio.sleep(0)
        told = await read(inboxes, call(1), replica.stream(call(1), faulty()))
        assert told[0] == b"0"
        assert isinstance(told[1], Failure)
        assert "inside" not in told[1].message
        await receiving

    bounded(run)


def test_a_call_that_the_replica_ends_early_does_not_look_whole() -> None:
    async def run() -> None:
        inboxes, replica = Inboxes(), Replica()
        receiving = opened(inboxes, replica)
        await asyncio.sleep(0)
        own = replica.answer(call(1), talk(*[b"x"] * 10_000))
        inboxes.open("1")
        head = await anext(own)
        assert isinstance(head, RelayHead)
        assert head.carrier is not None
        await own.aclose()
        told = [part async for part in inboxes.parts("1", head.carrier)]
        assert [part.kind for part in told if isinstance(part, Failure)] == ["fault"]
        await receiving

    bounded(run)


def test_who_leaves_is_forgotten_at_both_ends() -> None:
    async def run() -> None:
        inboxes, replica = Inboxes(), Replica()
        receiving = opened(inboxes, replica)
        await asyncio.sleep(0)
        inboxes.open("1")
        own = replica.answer(call(1), talk(*[b"x"] * 10_000))
        async for _ in own:
            break
        await asyncio.sleep(0.02)
        inboxes.close("1")
        await own.aclose()
        other = replica.stream(call(2), talk(b"1"))
        assert await read(inboxes, call(2), other) == [b"0", b"1"]
        await receiving  # nobody is attached any more

    bounded(run)


def test_an_old_carrier_takes_nobody_on_and_finishes_what_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "TAKING_ON_S", 0.05)

    async def run() -> None:
        inboxes, replica = Inboxes(), Replica()
        old = opened(inboxes, replica, "old")
        await asyncio.sleep(0)
        parts = [b"%d" % n for n in range(20)]
        reading = asyncio.create_task(
            read(inboxes, call(1), replica.stream(call(1), talk(*parts, pause_s=0.01)))
        )
        await asyncio.sleep(0.08)
        assert await own_items(replica, call(2)) == 2
        new = opened(inboxes, replica, "new")
        await asyncio.sleep(0)
        assert await read(inboxes, call(3), replica.stream(call(3), talk(b"1"))) == [b"0", b"1"]
        assert b"".join(await reading) == b"0" + b"".join(parts)
        await asyncio.gather(old, new)

    bounded(run)


def test_few_calls_are_worth_no_carrier() -> None:
    async def run() -> None:
        inboxes = Inboxes()
        for number in range(FEW):
            assert not inboxes.wants_carrier()
            inboxes.open(str(number))
        assert inboxes.wants_carrier()
        inboxes.expect("c")
        await inboxes.receive("c", Carriers().loads(FRONT, "c"))  # nobody had anything to say
        assert not inboxes.wants_carrier(), "not again at once"

    bounded(run)
