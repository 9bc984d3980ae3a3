"""The decoding thread: turns, bounds, cancellation, faults."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import monotonic, sleep

import pytest

from hvd_ray.serving.loop import FAILURES_TO_DIE, DecodeLoop, FairQueue, LoopEndedError


@dataclass(eq=False)
class Recorded:
    """A task that notes what happens to it."""

    name: str
    log: list[str]
    num_slices: int = 3
    owner: str = "me"
    fault: Exception | None = None
    gate: threading.Event | None = None
    errors: list[tuple[BaseException, bool]] = field(default_factory=list)
    is_closed: bool = False

    def step(self) -> bool:
        if self.gate is not None:
            self.gate.wait(10)
        if self.fault is not None:
            raise self.fault
        self.log.append(self.name)
        self.num_slices -= 1
        return self.num_slices == 0

    def fail(self, error: BaseException, *, is_fatal: bool) -> None:
        self.errors.append((error, is_fatal))

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


@pytest.fixture
def loop() -> Iterator[DecodeLoop]:
    made = DecodeLoop(max_running=2)
    yield made
    made.end()


def until(condition: Callable[[], bool]) -> None:
    deadline = monotonic() + 10
    while not condition():
        assert monotonic() < deadline, "it never happened"
        sleep(0.001)


def test_tasks_take_turns_and_no_more_than_allowed_run(loop: DecodeLoop) -> None:
    log: list[str] = []
    gate = threading.Event()
    tasks = [Recorded(name, log, gate=gate) for name in "abc"]
    for task in tasks:
        loop.submit(task)
    until(lambda: loop.num_running == 2)
    assert loop.num_waiting == 1
    gate.set()
    until(lambda: all(task.is_closed for task in tasks))
    assert log[1:5] in (list("abab"), list("baba"))
    assert log.index("c") >= 5


def test_owners_are_served_in_rotation() -> None:
    queue, log = FairQueue(), []  # type: ignore[var-annotated]
    for name in ("a1", "a2", "a3", "b1", "c1"):
        queue.push(Recorded(name, log, owner=name[0]))
    assert [queue.pop().name for _ in range(5)] == ["a1", "b1", "c1", "a2", "a3"]  # type: ignore[attr-defined]


def test_a_cancelled_task_takes_no_further_slice(loop: DecodeLoop) -> None:
    log: list[str] = []
    running, waiting = Recorded("r", log, num_slices=10**9), Recorded("w", log, owner="you")
    other = Recorded("o", log, num_slices=10**9)
    for task in (running, other):
        loop.submit(task)
    until(lambda: len(log) > 2)
    loop.submit(waiting)
    loop.cancel(waiting)
    loop.cancel(running)
    until(lambda: running.is_closed)
    seen = log.count("r")
    sleep(0.01)
    assert log.count("r") == seen
    assert log.count("w") == 0
    assert not waiting.is_closed
    loop.cancel(other)
    until(lambda: loop.num_running == 0)


def test_a_fault_is_its_own_tasks(loop: DecodeLoop) -> None:
    log: list[str] = []
    broken, whole = Recorded("x", log, fault=RuntimeError("out of memory")), Recorded("y", log)
    loop.submit(broken)
    loop.submit(whole)
    until(lambda: whole.is_closed and broken.is_closed)
    assert [is_fatal for _, is_fatal in broken.errors] == [False]
    assert whole.errors == []
    assert loop.is_alive


def test_an_engine_that_only_fails_is_dead_and_everybody_is_told(loop: DecodeLoop) -> None:
    log: list[str] = []
    gate = threading.Event()
    tasks = [Recorded(str(i), log, fault=RuntimeError("lost"), gate=gate) for i in range(9)]
    for task in tasks:
        loop.submit(task)
    gate.set()
    until(lambda: not loop.is_alive)
    until(lambda: all(task.errors for task in tasks))
    assert sum(is_fatal for task in tasks for _, is_fatal in task.errors) == 9 - FAILURES_TO_DIE
    assert loop.fault == "RuntimeError: lost"
    with pytest.raises(LoopEndedError, match="lost"):
        loop.submit(Recorded("z", log))


def test_ending_tells_those_that_wait() -> None:
    loop, log = DecodeLoop(max_running=1), []  # type: ignore[var-annotated]
    tasks = [Recorded(name, log, num_slices=10**9) for name in "ab"]
    for task in tasks:
        loop.submit(task)
    until(lambda: bool(log))
    loop.end()
    assert all(task.errors[0][1] for task in tasks)
    assert not loop.is_alive


def test_a_stall_is_seen(loop: DecodeLoop) -> None:
    gate = threading.Event()
    loop.submit(Recorded("s", [], gate=gate))
    until(lambda: loop.stalled_s > 0.01)
    gate.set()
    until(lambda: loop.num_running == 0)
    assert loop.stalled_s == 0
