"""Shards over Ray Data: a pool of actors takes them one by one, the largest first.

An actor is a few lines around a worker, a plain class with its own tests. Workers write their
rows themselves, part by part, so nothing of weight travels and a kill loses one part at the most.
"""

from __future__ import annotations

import re
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from hvd_ray.errors import UserError
from hvd_ray.pipelines.cluster import connected

POLL_INTERVAL_S = 0.5
MAX_ATTEMPTS = 3
"""How often the work is begun before the death of a worker ends it."""
SPARE_CPUS = 1
"""For Ray Data's own tasks: a pool that takes every CPU would wait for them for ever."""

Counts = Mapping[str, int]
Shard = TypeVar("Shard", contravariant=True)
Report = Callable[[Counts], None]


class ShardWorker(Protocol[Shard]):
    """Works through whole shards in one process; made once for each actor."""

    def run(self, shard: Shard, report: Report) -> None:
        """Do one shard; what an earlier run has finished is skipped.

        `report` takes what was done since it was last called.
        """
        ...


class RunProgress(Protocol):
    """Hears how a run goes."""

    def stage(self, text: str) -> None:
        """Something that takes its time begins."""
        ...

    def expect(self, total: int) -> None:
        """How many items this run has to do."""
        ...

    def advance(self, done: int, text: str) -> None:
        """`done` items are done in all; called from another thread."""
        ...


def run_shards(
    shards: Sequence[Any],
    make_worker: Callable[[], ShardWorker[Any]],
    *,
    num_workers: int,
    cpus_per_worker: int = 1,
    on_counts: Callable[[Counts], None],
) -> None:
    """Run every shard on some actor of a pool.

    Args:
        shards: in the order in which they are to be begun.
        make_worker: called in each actor.
        num_workers: actors at the most; never more than there are shards.
        cpus_per_worker: what each actor claims.
        on_counts: hears the sum of all reports, now and then, from another thread.

    Raises:
        UserError: a worker met a mistake of the user's, or died again and again.
    """
    if not shards:
        return
    size = min(num_workers, len(shards))
    with connected(num_cpus=size * cpus_per_worker + SPARE_CPUS) as ray:
        meter = ray.remote(num_cpus=0)(_Meter).remote()
        refs = [ray.put(shard) for shard in shards]
        with _clear_failures(ray), _listening(ray, meter, on_counts):
            for attempt in range(1, MAX_ATTEMPTS + 1):
                try:
                    _run_pool(ray, refs, make_worker, meter, size=size, num_cpus=cpus_per_worker)
                    break
                except ray.exceptions.RayActorError:
                    if attempt == MAX_ATTEMPTS:
                        raise


def _run_pool(
    ray: Any,
    refs: Sequence[Any],
    make_worker: Callable[[], ShardWorker[Any]],
    meter: Any,
    *,
    size: int,
    num_cpus: int,
) -> None:
    from ray.data import ActorPoolStrategy

    rows = ray.data.from_items(
        [{"shard": index} for index in range(len(refs))], override_num_blocks=len(refs)
    )
    with warnings.catch_warnings():  # Ray 2.60 has no other way to say `max_restarts` yet
        warnings.simplefilter("ignore", DeprecationWarning)
        done = rows.map_batches(
            _ShardActor,
            fn_constructor_args=(make_worker, refs, meter),
            batch_size=1,
            compute=ActorPoolStrategy(size=size, max_tasks_in_flight_per_actor=1),
            num_cpus=num_cpus,
            max_restarts=0,  # left to Ray, a prompt that kills its worker does so for ever
        )
    num_done = sum(len(batch["shard"]) for batch in done.iter_batches(batch_size=None))
    assert num_done == len(refs), f"{num_done} of {len(refs)} shards came back"


class _ShardActor:
    """A worker as Ray Data calls it: with the number of a shard, one at a time."""

    def __init__(
        self, make_worker: Callable[[], ShardWorker[Any]], refs: Sequence[Any], meter: Any
    ) -> None:
        self._worker = make_worker()
        self._refs = refs
        self._meter = meter
        self._unsent: Counter[str] = Counter()
        self._sent_s = 0.0

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        import ray

        for index in batch["shard"]:
            self._worker.run(ray.get(self._refs[int(index)]), self._report)
            self._send()
        return batch

    def _report(self, counts: Counts) -> None:
        self._unsent.update(counts)
        if time.monotonic() - self._sent_s >= POLL_INTERVAL_S:
            self._send()

    def _send(self) -> None:
        self._meter.add.remote(dict(self._unsent))
        self._unsent.clear()
        self._sent_s = time.monotonic()


class _Meter:
    """Adds up what the workers report."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, counts: dict[str, int]) -> None:
        self._counts.update(counts)

    def total(self) -> dict[str, int]:
        return dict(self._counts)


@contextmanager
def _listening(ray: Any, meter: Any, on_counts: Callable[[Counts], None]) -> Iterator[None]:
    """Pass the meter's counts on while the pool works, and once more at the end."""
    is_over = threading.Event()

    def listen() -> None:
        while not is_over.wait(POLL_INTERVAL_S):
            on_counts(ray.get(meter.total.remote()))

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield
    finally:
        is_over.set()
        listener.join()
    on_counts(ray.get(meter.total.remote()))


@contextmanager
def _clear_failures(ray: Any) -> Iterator[None]:
    """A mistake of the user's comes back as itself, the death of a worker as one line."""
    try:
        yield
    except ray.exceptions.RayError as error:
        for cause in _causes(error):
            if isinstance(cause, UserError):
                raise UserError(str(cause)) from None
            if isinstance(cause, ray.exceptions.RayActorError | ray.exceptions.OutOfMemoryError):
                raise UserError(
                    "a worker died, which want of memory can cause; what is finished is kept: "
                    "repeat the command to go on, if need be with fewer --workers "
                    f"({_last_words(cause)})"
                ) from None
        raise


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what is behind it: Ray keeps a task's own in `cause`."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        waiting += [getattr(current, "cause", None), current.__cause__, current.__context__]


_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def _last_words(error: BaseException) -> str:
    """The last line: Ray puts the worker's own exception there, under its traceback."""
    lines = [line.strip() for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
