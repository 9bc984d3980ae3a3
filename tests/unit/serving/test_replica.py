"""A replica: capacity, leaving, time limits, scopes, settings that change."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_ray.config import Config
from hvd_ray.engines.base import Forward, KVCache
from hvd_ray.engines.toy import ToyCache, ToyEngine
from hvd_ray.errors import UserError
from hvd_ray.parts.find import Sources
from hvd_ray.parts.payoff import PayoffSource
from hvd_ray.payoff.cost_file import CostFile, CostKey
from hvd_ray.serving.calls import Call, Event, Failure, Opening, Piece
from hvd_ray.serving.replica import Replica
from hvd_ray.shipped import shipped_folder
from hvd_ray.types import Request, SamplingParams, scope_key
from tests.unit.payoff.networks import random_predictor
from tests.unit.serving.conftest import NO_SOURCES, make_replica

COSTS = CostFile(
    key=CostKey(model="m", dtype="float32", engine="torch", device="cpu", num_threads=1),
    rows=(1, 64),
    verify_ms=(10.0, 12.0),
)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


@dataclass(slots=True)
class GatedEngine(ToyEngine):
    """A toy that computes while its gate is open."""

    gate: threading.Event = field(default_factory=threading.Event)

    def forward(self, token_ids: Any, cache: KVCache, **more: Any) -> Forward:
        assert self.gate.wait(10)
        return ToyEngine.forward(self, token_ids, cache, **more)


def call(name: str = "r", **extra: Any) -> Call:
    return Call(**{"request_id": name, "prompts": ("badge",), "sampling": LONG, **extra})


async def events_of(replica: Replica, asked: Call) -> list[Event]:
    return [event async for batch in replica.serve(asked) for event in batch]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Piece))


def failure_in(events: list[Event]) -> Failure:
    assert isinstance(events[-1], Failure), events[-1]
    return events[-1]


@pytest.fixture
def gated() -> Any:
    engine = GatedEngine()
    replica = make_replica({"limits": {"max_requests": 2, "max_running": 1}}, engine=engine)
    yield replica, engine.gate
    engine.gate.set()
    replica.end()


def test_above_capacity_it_says_so_at_once(gated: Any) -> None:
    replica, gate = gated

    async def run() -> None:
        first = [asyncio.create_task(events_of(replica, call(name))) for name in "ab"]
        await until(lambda: replica._loop.num_running == 1 and replica._loop.num_waiting == 1)
        refused = failure_in(await events_of(replica, call("c")))
        assert refused.kind == "busy"
        gate.set()
        for events in await asyncio.gather(*first):
            assert isinstance(events[-1], Piece)
        assert isinstance((await events_of(replica, call("d")))[-1], Piece)

    asyncio.run(run())


@dataclass(slots=True)
class WatchedEngine(ToyEngine):
    """A toy that tells which of its caches are still there."""

    caches: list[Any] = field(default_factory=list)

    def new_cache(self) -> ToyCache:
        class Watched(ToyCache):  # has room for weak references
            pass

        cache = Watched()
        self.caches.append(weakref.ref(cache))
        return cache


@pytest.mark.parametrize("leaves", [False, True])
def test_a_cache_is_gone_with_its_request_and_waits_for_no_collector(leaves: bool) -> None:
    """Tasks and their work refer to each other, so the collector alone would free them."""
    engine = WatchedEngine()
    replica = make_replica(engine=engine)

    async def run() -> None:
        async with aclosing(replica.serve(call(num_choices=2))) as batches:
            async for batch in batches:
                if leaves and isinstance(batch[-1], Piece):
                    break
        await until(lambda: replica._loop.num_running == 0)
        await until(lambda: not any(cache() for cache in engine.caches))

    gc.disable()
    try:
        asyncio.run(run())
        assert engine.caches
    finally:
        gc.enable()
        replica.end()


def test_who_leaves_frees_the_slot_within_one_step(replica: Replica) -> None:
    async def run() -> None:
        async with aclosing(replica.serve(call())) as batches:
            async for batch in batches:
                if any(isinstance(event, Piece) for event in batch):
                    break
        await until(lambda: replica._loop.num_running == 0)
        assert (await replica.state()).num_running == 0
        assert replica._stage.cache._active == {}
        assert replica._num_requests == 0

    asyncio.run(run())


def test_who_leaves_is_computed_for_no_further(gated: Any) -> None:
    """Case L09: the request would run for 400 passes more; it takes the one under way."""
    replica, gate = gated
    engine = replica._stage.engine

    async def run() -> None:
        async with aclosing(replica.serve(call())) as batches:
            assert isinstance((await anext(batches))[0], Opening)
            await until(lambda: replica._loop.num_running == 1)
        assert replica._num_requests == 0
        gate.set()
        await until(lambda: replica._loop.num_running == 0)

    asyncio.run(run())
    assert engine.num_passes <= 1


def test_a_scope_is_of_one_tenant_and_one_model(replica: Replica) -> None:
    assert replica.scope_of("alice") == scope_key(tenant="alice", model="toy")


def test_thousands_who_leave(replica: Replica) -> None:
    """Nothing is left of them, and the one who stays gets its answer."""

    async def run() -> None:
        expected = text_of(await events_of(replica, call("before")))
        for number in range(3000):
            async with aclosing(replica.serve(call(str(number)))) as batches:
                await anext(batches)
        assert text_of(await events_of(replica, call("after"))) == expected
        await until(lambda: replica._loop.num_running == 0 and replica._loop.num_waiting == 0)
        assert replica._stage.cache._active == {}
        assert replica._num_requests == 0

    asyncio.run(run())


def test_a_request_has_a_time_limit(gated: Any) -> None:
    replica, gate = gated

    async def run() -> None:
        failure = failure_in(await events_of(replica, call(limit_s=0.05)))
        assert failure.kind == "timeout"
        gate.set()
        await until(lambda: replica._loop.num_running == 0)

    asyncio.run(run())


def test_many_at_once_get_what_each_gets_alone() -> None:
    """Interleaved over one cache, in every mode: the tokens are those of plain decoding."""
    replica = make_replica({"limits": {"max_running": 8}})
    asked = [
        call(
            f"{mode}{number}",
            prompts=("badge", "noon"),
            mode=mode,
            sampling=SamplingParams(max_tokens=60, temperature=heat, seed=number),
        )
        for number, heat in enumerate((0.0, 0.7, 1.0, 1.3))
        for mode in ("off", "cache", "auto")
    ]

    async def run() -> list[list[Event]]:
        return list(await asyncio.gather(*(events_of(replica, one) for one in asked)))

    outcomes = asyncio.run(run())
    replica.end()
    for first in range(0, len(asked), 3):
        texts = {_texts(events) for events in outcomes[first : first + 3]}
        assert len(texts) == 1


def _texts(events: list[Event]) -> tuple[str, str]:
    pieces = [event for event in events if isinstance(event, Piece)]
    joined = ["".join(p.text for p in pieces if p.choice_index == i) for i in (0, 1)]
    return joined[0], joined[1]


def test_a_part_that_is_refused_refuses_the_whole(replica: Replica) -> None:
    events = asyncio.run(events_of(replica, call(prompts=("badge", (1, 99)))))
    failure = failure_in(events)
    assert (failure.kind, failure.param) == ("bad_request", "prompt")
    assert len(events) == 1
    assert replica._loop.num_running == 0


def test_prompt_scores_come_with_the_opening(replica: Replica) -> None:
    asked = call(prompts=(tuple(range(1, 11)) * 20,), prompt_logprobs=1, shows_prompt=True)
    events = asyncio.run(events_of(replica, asked))
    opening = events[0]
    assert isinstance(opening, Opening)
    assert len(opening.prompt_scores) == 200
    expected = ToyEngine().logits_after([4, 5]).log_softmax(-1)[6]
    assert opening.prompt_scores[105].logprob == pytest.approx(float(expected), abs=1e-5)


def test_new_limits_hold_for_the_next(gated: Any) -> None:
    replica, gate = gated
    gate.set()
    tree = {"limits": {"max_output_tokens": 5, "max_prompt_tokens": 6}}

    async def run() -> None:
        assert await replica.reconfigure(tree)
        failure = failure_in(await events_of(replica, call(max_tokens=50)))
        assert failure.param == "max_tokens"
        for usual in (None, 16, 3):
            events = await events_of(replica, call(max_tokens=None, usual_tokens=usual))
            assert len(text_of(events)) == min(5, usual or 5)
        failure = failure_in(await events_of(replica, call(prompts=("abcdefg",))))
        assert failure.param == "prompt"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("tree", "word"),
    [
        ({"policy": {"tau": -1}}, "policy.tau"),
        ({"policy": {"name": "best"}}, "policy.name"),
        ({"policy": {"name": "hvd_tau"}}, "hvd_tau"),
        ({"policies": {}}, "policies"),
        ({"limits": {"max_running": 0}}, "limits.max_running"),
        ({"policy": {"name": "hvd_tau", "predictor": "/nowhere"}}, "nothing is at hand"),
    ],
)
def test_a_bad_value_is_refused_and_the_old_one_stays(
    replica: Replica, tree: dict[str, Any], word: str
) -> None:
    async def run() -> None:
        assert await replica.reconfigure({"policy": {"name": "rule_match"}})
        assert not await replica.reconfigure(tree)
        state = await replica.state()
        assert state.policy == "rule_match"
        assert state.refused is not None
        assert word in state.refused
        assert await replica.reconfigure({"policy": {"name": "suffix"}})
        assert (await replica.state()).refused is None

    asyncio.run(run())


def test_a_bad_value_at_the_start_is_an_error() -> None:
    with pytest.raises(UserError, match="hvd_tau"):
        make_replica({"policy": {"name": "hvd_tau"}})


def test_requests_under_way_end_as_they_began(gated: Any) -> None:
    replica, gate = gated

    async def run() -> None:
        under_way = asyncio.create_task(events_of(replica, call("a")))
        await until(lambda: replica._loop.num_running == 1)
        assert await replica.reconfigure({"policy": {"name": "greedy"}})
        gate.set()
        before = [e.step for e in await under_way if isinstance(e, Piece) and e.step]
        after = [e.step for e in await events_of(replica, call("b")) if isinstance(e, Piece)]
        assert any(step.drafted for step in before)
        assert not any(step and step.drafted for step in after)

    asyncio.run(run())


class Registry:
    """A stand-in for the model registry: an alias that can be moved, corrupted, dropped."""

    def __init__(self) -> None:
        self.champion: str | None = None
        self.is_corrupt = False
        self.kind: Any = "survival"

    def resolve(self, config: Config) -> Path:  # noqa: ARG002
        if self.champion is None:
            raise UserError("no payoff predictor")
        return Path(self.champion)

    def find(self, config: Config) -> PayoffSource:
        folder = self.resolve(config)
        if self.is_corrupt:
            raise UserError(f"predictor {folder}: weights.safetensors is damaged")
        return PayoffSource(random_predictor(self.kind), f"champion {folder.name}", None)


def test_a_moved_alias_is_picked_up_and_a_corrupt_one_is_not() -> None:
    registry = Registry()
    registry.champion = "v1"
    sources = Sources(payoff=registry.find, costs=NO_SOURCES.costs, head=NO_SOURCES.head)
    hot = {"policy": {"name": "hvd_tau", "tau": 2.0}}
    replica = make_replica(hot, sources=sources, resolve=registry.resolve)

    async def run() -> None:
        assert (await replica.state()).predictor == "champion v1"
        assert not await replica.refresh()
        registry.champion = "v2"
        assert await replica.refresh()
        assert (await replica.state()).predictor == "champion v2"
        registry.champion, registry.is_corrupt = "v3", True
        assert not await replica.refresh()
        state = await replica.state()
        assert state.predictor == "champion v2"
        assert "damaged" in (state.refused or "")
        assert isinstance((await events_of(replica, call()))[-1], Piece)
        registry.champion, registry.is_corrupt = "v2", False
        assert not await replica.refresh()
        assert (await replica.state()).refused is None
        registry.champion = "v4"
        assert await replica.refresh()
        assert (await replica.state()).refused is None

    asyncio.run(run())
    replica.end()


@pytest.mark.parametrize("kind", [None, "mlp"])
def test_a_champion_that_cannot_decide_leaves_the_one_that_does(kind: Any) -> None:
    """Nobody named a policy: `suffix` in place of hvd_cost is no change that anybody asked for."""
    registry = Registry()
    registry.champion = "v1"
    sources = Sources(payoff=registry.find, costs=lambda _: COSTS, head=NO_SOURCES.head)
    replica = make_replica({}, sources=sources, resolve=registry.resolve)

    async def run() -> None:
        registry.champion, registry.is_corrupt, registry.kind = "v2", kind is None, kind
        assert not await replica.refresh()
        state = await replica.state()
        assert (state.policy, state.predictor) == ("hvd_cost", "champion v1")
        assert ("damaged" if kind is None else "no survival curve") in (state.refused or "")
        registry.champion, registry.is_corrupt = "v1", False
        assert not await replica.refresh()
        assert (await replica.state()).refused is None
        registry.champion, registry.kind = "v3", "survival"
        assert await replica.refresh()
        assert (await replica.state()).predictor == "champion v3"

    asyncio.run(run())
    replica.end()


@pytest.mark.parametrize("is_named", [True, False])
def test_a_registry_that_is_gone_changes_nothing(is_named: bool) -> None:
    """Neither to what ships nor, where nobody named a policy, to one that needs no predictor."""
    registry = Registry()
    registry.champion = "v1"
    shipped = shipped_folder("smollm2-135m", "payoff")
    sources = Sources(payoff=registry.find, costs=lambda _: COSTS, head=NO_SOURCES.head)
    hot: dict[str, Any] = {"policy": {"name": "hvd_cost"} if is_named else {}}
    replica = make_replica(hot, sources=sources, resolve=registry.resolve)

    async def run() -> None:
        for gone in (None, str(shipped)):
            registry.champion = gone
            assert not await replica.refresh()
            state = await replica.state()
            assert (state.policy, state.predictor) == ("hvd_cost", "champion v1")
            assert "cannot be reached" in (state.refused or "")
            registry.champion = "v1"
            assert not await replica.refresh()
            assert (await replica.state()).refused is None

    asyncio.run(run())
    replica.end()


def test_a_champion_that_was_taken_away_gives_way_to_what_ships() -> None:
    """The registry is there and says so, unlike one that is gone."""
    registry = Registry()
    registry.champion = "v1"
    sources = Sources(payoff=registry.find, costs=lambda _: COSTS, head=NO_SOURCES.head)
    replica = make_replica({}, sources=sources, resolve=registry.resolve, is_vacant=lambda _: True)

    async def run() -> None:
        registry.champion = None
        assert not await replica.refresh(), "and nothing ships"
        registry.champion = str(shipped_folder("smollm2-135m", "payoff"))
        assert await replica.refresh()
        state = await replica.state()
        assert (state.predictor, state.refused) == ("champion payoff", None)

    asyncio.run(run())
    replica.end()


def test_a_poll_that_breaks_is_not_the_last() -> None:
    answers: Iterator[Any] = iter([Path("v1"), OSError("disk full"), Path("v2")])

    def resolve(config: Config) -> Path:  # noqa: ARG001
        answer = next(answers, Path("v2"))
        if isinstance(answer, OSError):
            raise answer
        return Path(answer)

    replica = make_replica(resolve=resolve)

    async def run() -> None:
        replica.poll_every(0.001)
        await until(lambda: replica._predictor == Path("v2"))

    asyncio.run(run())
    replica.end()


def test_token_ids_are_numbers_of_python(replica: Replica) -> None:
    """What crosses processes holds no array."""
    events = asyncio.run(events_of(replica, call()))
    pieces = [event for event in events if isinstance(event, Piece)]
    assert not any(isinstance(token, np.generic) for p in pieces for token in p.token_ids)


def test_a_long_prompt_is_read_in_parts_and_others_go_on() -> None:
    engine = GatedEngine(context_length=8192)
    replica = make_replica({"limits": {"max_running": 2}}, engine=engine)
    long_prompt = tuple(range(1, 13)) * 400
    order: list[str] = []

    async def follow(name: str, prompt: Any) -> str:
        text = ""
        async for batch in replica.serve(call(name, prompts=(prompt,), max_tokens=12)):
            pieces = [event for event in batch if isinstance(event, Piece)]
            order.extend(name for _ in pieces)
            text += text_of(list(batch))
        return text

    async def run() -> list[str]:
        reading = asyncio.create_task(follow("long", long_prompt))
        await until(lambda: replica._loop.num_running == 1)
        short = asyncio.create_task(follow("short", "badge"))
        await until(lambda: replica._loop.num_running + replica._loop.num_waiting == 2)
        engine.gate.set()
        return [await short, await reading]

    short, long = asyncio.run(run())
    assert order[0] == "short"
    decoder = replica.lineup.decoders["off"]
    request = Request("alone", long_prompt, SamplingParams(max_tokens=12, ignore_eos=True))
    assert long == decoder.generate(request).text
    assert len(short) == 12
    replica.end()
