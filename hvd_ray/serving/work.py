"""The tasks of one call, and the way their events take to its event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence

from hvd_ray.serving.calls import Event, Failure, Opening, Piece
from hvd_ray.serving.loop import DecodeLoop, Task


class Work:
    """Made on the event loop; tasks report from the decoding thread."""

    def __init__(self, loop: DecodeLoop, *, limit_s: float) -> None:
        self.num_open = 0
        """Outputs that have not ended."""
        self.num_unopened = 0
        """Prompts that were not opened yet."""
        self._loop = loop
        self._tasks: list[Task] = []
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._event_loop = asyncio.get_running_loop()
        self._limit_s = limit_s
        self._deadline_s = self._event_loop.time() + limit_s
        self._lock = threading.Lock()
        self._is_cancelled = False

    def emit(self, event: Event) -> None:
        """From any thread."""
        try:
            self._event_loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the event loop has closed: nobody listens any more
            self._is_cancelled = True

    def submit(self, tasks: Sequence[Task]) -> None:
        """From any thread."""
        with self._lock:
            if not self._is_cancelled:
                self._tasks += tasks
                for task in tasks:
                    self._loop.submit(task)

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
        for task in self._tasks:
            self._loop.cancel(task)

    async def events(self) -> AsyncGenerator[tuple[Event, ...], None]:
        """Until every prompt was opened and every output has ended, or one has failed."""
        while self.num_open or self.num_unopened:
            batch = await self._next_events()
            failure = next((event for event in batch if isinstance(event, Failure)), None)
            if failure is not None:
                yield (failure,)
                return
            self.num_unopened -= sum(isinstance(event, Opening) for event in batch)
            self.num_open -= sum(
                isinstance(event, Piece) and event.finish_reason is not None for event in batch
            )
            yield batch

    async def _next_events(self) -> tuple[Event, ...]:
        left_s = self._deadline_s - self._event_loop.time()
        try:
            batch = [await asyncio.wait_for(self._events.get(), max(0.0, left_s))]
        except TimeoutError:
            message = f"the request took longer than {self._limit_s:g} s and was given up"
            return (Failure("timeout", message),)
        while not self._events.empty():
            batch.append(self._events.get_nowait())
        return tuple(batch)
