"""What commands with `--workers` that keep nothing on disk show while they work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvd_ray.pipelines.shards import RunProgress
    from hvd_ray.pipelines.spread import OnDone, Workers


@contextmanager
def started_workers(num: int, progress: RunProgress) -> Iterator[Workers]:
    """So many workers; starting Ray takes its time.

    Raises:
        UserError: no Ray with so many CPUs.
    """
    from hvd_ray.pipelines.spread import workers

    if num > 1:
        progress.stage(f"starting {num} workers on Ray")
    with workers(num) as started:
        yield started


def bar(progress: RunProgress, text: str) -> OnDone:
    """A stage begins; give what moves its bar."""
    progress.stage(text)

    def told(done: int, total: int) -> None:
        progress.expect(total)
        progress.advance(done, text)

    return told
