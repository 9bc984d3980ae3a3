"""Shards over Ray Data: a pool of actors takes them one by one, the largest first.

An actor is a few lines around a worker, a plain class with its own tests. Workers write their
rows themselves, part by part, so nothing of weight travels and a kill loses one part at the most.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

from hvd_ray.errors import UserError
from hvd_ray.pipelines.cluster import connected
from hvd_ray.pipelines.suspects import MAX_DEATHS

POLL_INTERVAL_S = 0.5
MAX_ATTEMPTS = MAX_DEATHS + 1
"""How often the pool is begun without getting any further before dying workers end the run; once
more than it takes to give up the trace that kills them."""
KEPT = "kept"
"""What a worker reports for each part that it has written: the run got further for good."""
GO_ON = "what is finished is kept: repeat the command to go on, if need be with fewer --workers"
SPARE_CPUS = 1
"""For Ray Data's own tasks: a pool that takes every CPU would wait for them for ever."""

Counts = Mapping[str, int]
Shard = TypeVar("Shard", contravariant=True)
Report = Callable[[Counts], None]


class ShardWorker(Protocol[Shard]):
    """Works through whole shards in one process; made once for each actor."""

    def run(self, shard: Shard, report: Report) -> None:
        """Do one shard; what an earlier run has finished is skipped.

        `report` takes what was done since it was last called: `done` items, and one `KEPT` for
        each part on disk.
        """
        ...


class RunProgress(Protocol):
    """Hears how a run goes."""

    def stage(self, text: str) -> None:
        """Something that takes its time begins."""
        ...

    def expect(self, total: int, *, unit: str | None = None) -> None:
        """How many items this run has to do, and what they are where not always the same."""
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
    gpus_per_worker: float = 0,
    on_counts: Callable[[Counts], None],
) -> None:
    """Run every shard on some actor of a pool.

    Args:
        shards: in the order in which they are to be begun.
        make_worker: called in each actor.
        num_workers: actors at the most; never more than there are shards.
        cpus_per_worker, gpus_per_worker: what each actor claims.
        on_counts: hears the sum of all reports, now and then, from another thread.

    Raises:
        UserError: a worker met a mistake of the user's, or died again and again.
    """
    if not shards:
        return
    size = min(num_workers, len(shards))
    needed = size * cpus_per_worker + SPARE_CPUS
    with connected(num_cpus=needed, num_gpus=size * gpus_per_worker) as ray:
        meter = ray.remote(num_cpus=0, max_restarts=-1)(_Meter).remote()
        refs = [ray.put(shard) for shard in shards]
        pool = partial(
            _run_pool,
            *(ray, refs, make_worker, meter),
            size=size,
            num_cpus=cpus_per_worker,
            num_gpus=gpus_per_worker,
        )
        reading = _MeterReading(ray, meter)
        with clear_failures(ray, advice=GO_ON), _listening(reading, on_counts):
            _persist(pool, reading, death=ray.exceptions.RayActorError)


def _persist(
    pool: Callable[[], None], reading: Callable[[], Counts], *, death: type[Exception]
) -> None:
    """Begin the pool again after a worker's death, as long as parts got written in between."""
    attempts_left, kept_before = MAX_ATTEMPTS, 0
    while True:
        try:
            pool()
            return
        except death:
            attempts_left -= 1
            if (kept := reading().get(KEPT, 0)) > kept_before:
                attempts_left, kept_before = MAX_ATTEMPTS, kept
            if not attempts_left:
                raise


def _run_pool(
    ray: Any,
    refs: Sequence[Any],
    make_worker: Callable[[], ShardWorker[Any]],
    meter: Any,
    *,
    size: int,
    num_cpus: int,
    num_gpus: float,
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
            num_gpus=num_gpus or None,
            # Left to Ray, a prompt that kills its worker does so for ever, and a shard whose node
            # is gone waits for ever for another. A new pool makes do with the nodes that are left.
            max_restarts=0,
        )
    num_done = 0
    for batch in done.iter_batches(batch_size=None):
        if refused := next(filter(None, map(str, batch["refused"])), None):
            raise UserError(refused)
        num_done += len(batch["shard"])
    assert num_done == len(refs), f"{num_done} of {len(refs)} shards came back"


class _ShardActor:
    """A worker as Ray Data calls it: with the number of a shard, one at a time."""

    def __init__(
        self, make_worker: Callable[[], ShardWorker[Any]], refs: Sequence[Any], meter: Any
    ) -> None:
        self._make_worker = make_worker
        self._worker: ShardWorker[Any] | None = None
        self._refs = refs
        self._meter = meter
        self._name = secrets.token_hex(8)
        self._counts: Counter[str] = Counter()
        self._sent_s = 0.0

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Do the shards; a mistake of the user's comes back as data.

        Raised, it would reach the driver as Ray's own exception with ours in its text alone.
        """
        import ray

        refused = ""
        try:
            self._worker = self._worker or self._make_worker()
            for index in batch["shard"]:
                self._worker.run(ray.get(self._refs[int(index)]), self._report)
                self._send()
        except UserError as error:
            refused = str(error)
        return {**batch, "refused": [refused] * len(batch["shard"])}

    def _report(self, counts: Counts) -> None:
        self._counts.update(counts)
        if time.monotonic() - self._sent_s >= POLL_INTERVAL_S:
            self._send()

    def _send(self) -> None:
        self._meter.note.remote(self._name, dict(self._counts))
        self._sent_s = time.monotonic()


class _Meter:
    """Adds up what the workers report; one that was killed learns it again from the living."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = {}

    def note(self, worker: str, counts: dict[str, int]) -> None:
        self._counts[worker] = counts

    def total(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for counts in self._counts.values():
            total.update(counts)
        return dict(total)


class _MeterReading:
    """The meter's counts; what it said last, while it is being revived."""

    def __init__(self, ray: Any, meter: Any) -> None:
        self._ray, self._meter = ray, meter
        self._latest: Counts = {}

    def __call__(self) -> Counts:
        try:
            self._latest = self._ray.get(self._meter.total.remote())
        except self._ray.exceptions.RayActorError:
            return self._latest
        return self._latest


@contextmanager
def _listening(
    reading: Callable[[], Counts], on_counts: Callable[[Counts], None]
) -> Iterator[None]:
    """Pass the meter's counts on while the pool works, and once more at the end."""
    is_over = threading.Event()

    def listen() -> None:
        while not is_over.wait(POLL_INTERVAL_S):
            on_counts(reading())

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield
    finally:
        is_over.set()
        listener.join()
    on_counts(reading())


@contextmanager
def clear_failures(ray: Any, *, advice: str) -> Iterator[None]:
    """A mistake of the user's comes back as itself, the death of a worker as one line."""
    try:
        yield
    except ray.exceptions.RayError as error:
        for cause in _causes(error):
            if isinstance(cause, UserError):
                raise UserError(str(cause)) from None
            if isinstance(cause, ray.exceptions.RayActorError | ray.exceptions.OutOfMemoryError):
                raise UserError(
                    "a worker died, which want of memory can cause; "
                    f"{advice} ({_last_words(cause)})"
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
