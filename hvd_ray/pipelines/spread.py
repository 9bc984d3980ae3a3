"""Work without files dealt to workers: in this process, or on Ray with the very same answers.

For reports, whose answers are small and take minutes; what takes hours is in `shards`, where
workers keep on disk what they have done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from hvd_ray.errors import UserError
from hvd_ray.pipelines.cluster import connected
from hvd_ray.pipelines.shards import clear_failures
from hvd_ray.pipelines.suspects import MAX_DEATHS

Shared = TypeVar("Shared")
Item = TypeVar("Item")
Answer = TypeVar("Answer")

OnDone = Callable[[int, int], None]
"""Hears how many items are done, of how many."""


def nobody(_done: int, _total: int) -> None: ...


class Workers(Protocol):
    """Whoever works through items, one at a time each."""

    @property
    def num(self) -> int:
        """Items that are worked on at once."""
        ...

    def map(
        self,
        work: Callable[[Shared, Item], Answer],
        items: Sequence[Item],
        *,
        shared: Shared,
        on_done: OnDone = nobody,
    ) -> list[Answer]:
        """`work(shared, item)` for every item, in the order of the items.

        Args:
            work: a function of a module, pure, so that it may be done again where a worker died.
            items: small.
            shared: what every item needs; it goes to each worker once.
            on_done: called after every item.

        Raises:
            UserError: the work met a mistake of the user's, or workers died again and again.
        """
        ...


class InProcess:
    """One after the other, without Ray."""

    num = 1

    def map(
        self,
        work: Callable[[Shared, Item], Answer],
        items: Sequence[Item],
        *,
        shared: Shared,
        on_done: OnDone = nobody,
    ) -> list[Answer]:
        answers = []
        for item in items:
            answers.append(work(shared, item))
            on_done(len(answers), len(items))
        return answers


IN_PROCESS = InProcess()


@contextmanager
def workers(num: int) -> Iterator[Workers]:
    """So many workers, on Ray unless it is one.

    Raises:
        UserError: no Ray with so many CPUs.
    """
    assert num >= 1, num
    if num == 1:
        yield IN_PROCESS
        return
    with connected(num_cpus=num) as ray:
        yield _OnRay(ray, num)


class _OnRay:
    """A pool of actors; one that dies is started again and does its item again."""

    def __init__(self, ray: Any, num: int) -> None:
        from ray.util import ActorPool

        options = {"num_cpus": 1, "max_restarts": MAX_DEATHS, "max_task_retries": MAX_DEATHS}
        actor = ray.remote(**options)(_Worker)
        self.num = num
        self._ray = ray
        self._pool = ActorPool([actor.remote() for _ in range(num)])

    def map(
        self,
        work: Callable[[Shared, Item], Answer],
        items: Sequence[Item],
        *,
        shared: Shared,
        on_done: OnDone = nobody,
    ) -> list[Answer]:
        # In one piece: arrays that come out of the store as they are cannot be written to, and
        # numba compiles anew for such.
        ref = self._ray.put(self._ray.cloudpickle.dumps(shared))
        answers: dict[int, Answer] = {}

        def ask(worker: Any, numbered: tuple[int, Item]) -> Any:
            return worker.run.remote(work, [ref], *numbered)

        with clear_failures(self._ray, advice="repeat the command with fewer --workers"):
            for number, answer, refused in self._pool.map_unordered(ask, list(enumerate(items))):
                if refused:
                    raise UserError(refused)
                answers[number] = answer
                on_done(len(answers), len(items))
        return [answers[number] for number in range(len(items))]


class _Worker:
    """An actor: unpacks what is shared once, and does one item at a time."""

    def __init__(self) -> None:
        self._name = ""
        """Of what is unpacked; the reference itself would keep it in the store, too."""
        self._shared: Any = None

    def run(
        self, work: Callable[[Any, Any], Any], shared: Sequence[Any], number: int, item: Any
    ) -> tuple[int, Any, str]:
        """`(number, answer, refused)`: a mistake of the user's comes back as data.

        `shared` holds one reference: bare, Ray would fetch it anew for every item.
        """
        import ray

        (ref,) = shared
        if ref.hex() != self._name:
            self._shared = None  # not two at once
            self._shared = ray.cloudpickle.loads(ray.get(ref))
            self._name = ref.hex()
        try:
            return number, work(self._shared, item), ""
        except UserError as error:
            return number, None, str(error)
