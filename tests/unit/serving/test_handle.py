"""Many replicas behind a handle: stickiness, and where a call goes that one refuses."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError

from hvd_ray.serving.api_error import ApiError
from hvd_ray.serving.calls import Call, Failure, Opening, Piece, ReplicaFacts, ReplicaState
from hvd_ray.serving.handle import NUM_TRIES, HandleBackend
from hvd_ray.serving.relay import RelayCall, RelayHead

PIECE = Piece(0, "a", (1,), finish_reason="stop")
BUSY = Failure("busy", "full")


class FakeStream:
    def __init__(self, items: list[Any]) -> None:
        self._items = items
        self.is_cancelled = False

    async def __aiter__(self) -> AsyncIterator[Any]:
        for item in self._items:
            if isinstance(item, Exception):
                raise item
            yield item

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeHandle:
    """Answers each call with the next of its scripts, and notes for whom it was asked."""

    def __init__(self, *scripts: list[Any]) -> None:
        self._scripts = list(scripts)
        self.sessions: list[str | None] = []
        self.streams: list[FakeStream] = []

    def options(self, *, session_id: str | None = None, **_options: Any) -> Any:
        self.sessions.append(session_id)
        return self

    def remote(self, _call: Call) -> FakeStream:
        self.streams.append(FakeStream(self._scripts.pop(0)))
        return self.streams[-1]


def answer(handle: FakeHandle) -> list[Any]:
    async def run() -> list[Any]:
        backend = HandleBackend(handle)  # type: ignore[arg-type]
        call = Call("r", ("a",), session="s")
        return [event async for batch in backend.serve(call) for event in batch]

    return asyncio.run(run())


def test_a_session_goes_to_its_replica() -> None:
    handle = FakeHandle([(PIECE,)])
    assert answer(handle) == [PIECE]
    assert handle.sessions == ["s#0"]
    assert handle.streams[0].is_cancelled


@pytest.mark.parametrize("refusal", [(BUSY,), BackPressureError(1, 1), ActorDiedError()])
def test_a_refused_call_goes_elsewhere(refusal: Any) -> None:
    handle = FakeHandle([refusal], [(PIECE,)])
    assert answer(handle) == [PIECE]
    assert handle.sessions == ["s#0", "s#1"]  # the next on the ring: never the same one again


def test_a_death_before_the_first_token_goes_elsewhere() -> None:
    """A prompt that was read and waits is no answer yet."""
    opening = (Opening(0, 1),)
    handle = FakeHandle([opening, ActorDiedError()], [opening, (PIECE,)])
    assert answer(handle) == [Opening(0, 1), PIECE]
    assert len(handle.sessions) == 2


def test_a_prompt_that_is_only_read_is_an_answer() -> None:
    assert answer(FakeHandle([(Opening(0, 1),)])) == [Opening(0, 1)]


def test_a_death_after_the_first_part_is_the_streams_end() -> None:
    head = RelayHead(200, "text/event-stream", b"data: 1\n\n")
    handle = FakeHandle([head, ActorDiedError()], [head])

    async def run() -> list[Any]:
        backend = HandleBackend(handle)  # type: ignore[arg-type]
        return [event async for event in backend.relay(RelayCall("POST", "/", {}))]

    first, last = asyncio.run(run())
    assert first == head
    assert last.kind == "dead"
    assert len(handle.sessions) == 1


def test_when_all_refuse_the_client_is_told_once() -> None:
    handle = FakeHandle(*[[(BUSY,)] for _ in range(NUM_TRIES)])
    assert answer(handle) == [BUSY]
    assert len(handle.sessions) == NUM_TRIES


def test_a_bad_request_is_not_sent_twice() -> None:
    refused = Failure("bad_request", "no", "prompt")
    handle = FakeHandle([(refused,)])
    assert answer(handle) == [refused]


def test_a_death_in_the_middle_ends_the_answer() -> None:
    """What was shown cannot be taken back, so nothing is sent again."""
    handle = FakeHandle([(PIECE,), ActorDiedError()])
    events = answer(handle)
    assert events[0] == PIECE
    assert events[1].kind == "dead"
    assert len(handle.sessions) == 1


FACTS = ReplicaFacts("m", "/m", "toy", "float32", 512, ("auto",))


class FakeBroadcast:
    """Answers a broadcast at once, and a single call with `soon` or never."""

    def __init__(self, *results: Any, soon: ReplicaState | None = None) -> None:
        self._results, self._soon = results, soon

    @property
    def state(self) -> Any:
        return self

    async def remote(self) -> ReplicaState:
        if self._soon is None:
            await asyncio.sleep(3600)
        assert self._soon is not None
        return self._soon

    def broadcast(self, _method: str) -> Any:
        return self

    async def results_async(self, **_how: Any) -> list[Any]:
        return list(self._results)


def state_of(*results: Any) -> ReplicaState:
    return asyncio.run(HandleBackend(FakeBroadcast(*results)).state())  # type: ignore[arg-type]


def test_the_state_is_of_all_replicas_together() -> None:
    one = ReplicaState(FACTS, is_alive=True, num_running=2, num_cached_tokens=10, policy="suffix")
    two = replace(one, num_running=1, num_waiting=3, policy="hvd_tau", refused="no such file")
    dead = replace(one, is_alive=False, num_running=0, num_cached_tokens=0, fault="lost")
    found = state_of(one, two, dead, ActorDiedError())
    assert (found.num_running, found.num_waiting, found.num_cached_tokens) == (3, 3, 20)
    assert (found.num_replicas, found.num_alive, found.is_alive) == (3, 2, True)
    assert (found.policy, found.refused, found.fault) == ("suffix, hvd_tau", "no such file", "lost")
    assert not state_of(dead).is_alive


def test_the_figures_are_of_every_replica_that_answers() -> None:
    handle: Any = FakeBroadcast(("a", "x 1\n"), ActorDiedError(), ("b", "x 2\n"))
    found = asyncio.run(HandleBackend(handle).expositions())
    assert found == {"a": "x 1\n", "b": "x 2\n"}


def test_a_replica_that_takes_settings_on_is_waited_for() -> None:
    soon = ReplicaState(FACTS, is_alive=True, policy="suffix")
    assert asyncio.run(HandleBackend(FakeBroadcast(soon=soon)).state()) == soon  # type: ignore[arg-type]


def test_nobody_answers_for_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvd_ray.serving.handle.STATE_TIMEOUT_S", 0.01)
    with pytest.raises(ApiError) as caught:
        state_of(ActorDiedError())
    assert caught.value.status == 503
