"""The decoding thread: runs tasks in turn, one slice each, a bounded number at once.

The thread alone touches engine, drafters and policies, so none of them needs a lock. A task that
fails fails alone; an engine that does nothing but fail is declared dead, and everybody is told.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

_log = logging.getLogger(__name__)

FAILURES_TO_DIE = 5
"""Failures in a row, with no slice done between, after which the engine counts as broken."""


class Task(Protocol):
    """Work in slices, all of them on the decoding thread.

    `step` until it says that it is done; then, or once it is cancelled or has failed, `close`.
    """

    @property
    def owner(self) -> str:
        """Whose turn it takes: owners are served in rotation."""
        ...

    def step(self) -> bool:
        """Do one slice; True when nothing is left to do."""
        ...

    def fail(self, error: BaseException, *, is_fatal: bool) -> None:
        """Tell whoever waits; `is_fatal`: the thread ends with it."""
        ...

    def close(self) -> None:
        """Release everything; safe at any time, called once."""
        ...


@dataclass(slots=True)
class FairQueue:
    """First in, first out for each owner; owners take turns."""

    _of: OrderedDict[str, deque[Task]] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return sum(len(tasks) for tasks in self._of.values())

    def push(self, task: Task) -> None:
        self._of.setdefault(task.owner, deque()).append(task)

    def pop(self) -> Task:
        """The next task; its owner goes to the end of the line."""
        owner, tasks = next(iter(self._of.items()))
        task = tasks.popleft()
        del self._of[owner]
        if tasks:
            self._of[owner] = tasks
        return task

    def remove(self, task: Task) -> bool:
        tasks = self._of.get(task.owner)
        if tasks is None or task not in tasks:
            return False
        tasks.remove(task)
        if not tasks:
            del self._of[task.owner]
        return True


class LoopEndedError(RuntimeError):
    """The decoding thread has ended and takes no more work."""


class DecodeLoop:
    """One thread over many tasks."""

    def __init__(self, *, max_running: int, name: str = "decode") -> None:
        self.max_running = max_running
        self._waiting = FairQueue()
        self._running: list[Task] = []
        self._cancelled: set[int] = set()
        self._is_ending = False
        self._changed = threading.Condition()
        self._num_failures = 0
        self._last_slice_s = monotonic()
        self.fault: str | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # -- from any thread -------------------------------------------------------------------

    def submit(self, task: Task) -> None:
        """Take a task on.

        Raises:
            LoopEndedError: the thread has ended.
        """
        with self._changed:
            self._check()
            self._waiting.push(task)
            self._changed.notify()

    def cancel(self, task: Task) -> None:
        """End a task before its next slice; nothing happens if it has ended."""
        with self._changed:
            if self._waiting.remove(task):
                return
            if any(running is task for running in self._running):
                self._cancelled.add(id(task))
                self._changed.notify()

    def end(self, timeout_s: float = 10.0) -> None:
        """Stop after the current slice; what has not finished is told so."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()
        self._thread.join(timeout_s)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self.fault is None

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def stalled_s(self) -> float:
        """For how long there was work and no slice was finished."""
        return monotonic() - self._last_slice_s if self._running else 0.0

    def _check(self) -> None:
        if self._is_ending or not self.is_alive:
            raise LoopEndedError(self.fault or "the decoding thread has ended")

    # -- on the decoding thread ------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._await_work():
                for task in list(self._running):
                    self._advance(task)
            self._end_all(LoopEndedError("the server is shutting down"))
        except BaseException as error:  # noqa: BLE001 - whatever it is, nobody may wait for ever
            self._die(error)

    def _await_work(self) -> bool:
        """Admit what fits; False when the thread is to end."""
        with self._changed:
            while not (self._is_ending or self._running or len(self._waiting)):
                self._changed.wait()
            if self._is_ending:
                return False
            if not self._running:
                self._last_slice_s = monotonic()
            while len(self._waiting) and len(self._running) < self.max_running:
                self._running.append(self._waiting.pop())
        return True

    def _advance(self, task: Task) -> None:
        if id(task) in self._cancelled:
            self._leave(task)
            return
        try:
            is_done = task.step()
        except Exception as error:  # noqa: BLE001 - a request's fault must not end the others
            self._failed(task, error)
            return
        self._num_failures = 0
        self._last_slice_s = monotonic()
        if is_done:
            self._leave(task)

    def _failed(self, task: Task, error: Exception) -> None:
        self._num_failures += 1
        task.fail(error, is_fatal=False)
        self._leave(task)
        if self._num_failures >= FAILURES_TO_DIE:
            raise error

    def _leave(self, task: Task) -> None:
        with self._changed:
            self._running.remove(task)
            self._cancelled.discard(id(task))
        task.close()

    def _die(self, error: BaseException) -> None:
        self.fault = f"{type(error).__name__}: {error}"
        _log.critical("the decoding thread ended: %s", self.fault, exc_info=error)
        self._end_all(error)

    def _end_all(self, error: BaseException) -> None:
        with self._changed:
            self._is_ending = True
            ended = [*self._running, *(self._waiting.pop() for _ in range(len(self._waiting)))]
            self._running.clear()
        for task in ended:
            task.fail(error, is_fatal=True)
