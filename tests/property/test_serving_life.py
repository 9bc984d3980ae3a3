"""Any crowd of clients on a replica: who stays gets plain decoding's answer, who leaves leaves
nothing, whatever the order."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_ray.drafting.suffix import SuffixDrafter
from hvd_ray.engines.toy import ToyEngine
from hvd_ray.serving.calls import Call, Failure, Mode, Piece
from hvd_ray.serving.replica import Replica
from hvd_ray.types import Request, SamplingParams
from tests.property.toy_requests import decoder
from tests.unit.serving.conftest import make_replica

LIMITS = {"max_running": 2, "max_requests": 5}


@dataclass(frozen=True)
class Client:
    """One call, and when its client comes and goes."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    mode: Mode
    tenant: str
    num_choices: int
    comes_after: int
    """Turns of the event loop."""
    leaves_after: int | None
    """Batches of events; None: it stays."""


clients = st.builds(
    Client,
    prompt=st.lists(st.integers(1, 4), min_size=1, max_size=8).map(tuple),
    max_tokens=st.integers(1, 30),
    temperature=st.sampled_from([0.0, 0.0, 0.8]),
    mode=st.sampled_from(["auto", "cache", "off"]),
    tenant=st.sampled_from(["ann", "bob"]),
    num_choices=st.integers(1, 2),
    comes_after=st.integers(0, 5),
    leaves_after=st.one_of(st.none(), st.integers(0, 3)),
)


def engine() -> ToyEngine:
    return ToyEngine(12, order=2, seed=5, sharpness=6.0, context_length=64)


async def visit(replica: Replica, client: Client, number: int) -> dict[int, str] | str:
    """The text of each choice; why it failed; or nothing where the client left."""
    for _ in range(client.comes_after):
        await asyncio.sleep(0)
    sampling = SamplingParams(client.temperature, max_tokens=client.max_tokens, seed=7)
    call = Call(
        f"c{number}",
        (client.prompt,),
        sampling,
        client.num_choices,
        client.tenant,
        mode=client.mode,
        max_tokens=client.max_tokens,
    )
    texts: dict[int, str] = {}
    async with aclosing(replica.serve(call)) as events:
        batches = 0
        async for batch in events:
            for event in batch:
                if isinstance(event, Failure):
                    return event.kind
                if isinstance(event, Piece):
                    texts[event.choice_index] = texts.get(event.choice_index, "") + event.text
            batches += 1
            if client.leaves_after is not None and batches > client.leaves_after:
                return {}
    return texts


async def idle(replica: Replica) -> None:
    for _ in range(2000):
        state = await replica.state()
        if state.num_running + state.num_waiting == 0:
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"requests are left: {state}")


@settings(max_examples=40)
@given(st.lists(clients, min_size=1, max_size=7))
def test_who_stays_is_answered_and_who_leaves_leaves_nothing(crowd: list[Client]) -> None:
    replica = make_replica({"limits": LIMITS}, engine=engine())
    plain = decoder("greedy", engine())

    async def run() -> list[Any]:
        visits = (visit(replica, client, number) for number, client in enumerate(crowd))
        answers = await asyncio.gather(*visits)
        await idle(replica)
        return answers

    try:
        answers = asyncio.run(run())
        for client, answer in zip(crowd, answers, strict=True):
            if isinstance(answer, str):
                assert answer == "busy"
                assert len(crowd) > LIMITS["max_requests"]
            for choice, text in answer.items() if isinstance(answer, dict) else ():
                sampling = SamplingParams(
                    client.temperature, max_tokens=client.max_tokens, seed=7 + choice
                )
                assert text == plain.generate(Request("p", client.prompt, sampling)).text
        cache = replica._stage.cache
        assert isinstance(cache, SuffixDrafter)
        assert not cache._active, "the cache still holds a request"
        assert replica._num_requests == 0
    finally:
        replica.end()
