"""The progress of a long run over shards: a bar with rate and time left, or lines in a log."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

SECONDS_BETWEEN_LINES = 20


class ShardsProgress:
    """A `RunProgress` on one line of the terminal or, without one, a line now and then."""

    def __init__(self, bars: Progress, unit: str) -> None:
        self._bars = bars
        self._unit = unit
        self._task = bars.add_task("", total=None, unit=unit)
        self._total = 0
        self._last_line_s = monotonic()

    def stage(self, text: str) -> None:
        self._bars.update(self._task, description=text)
        self._say(text)

    def expect(self, total: int, *, unit: str | None = None) -> None:
        self._total = total
        self._unit = unit or self._unit
        self._bars.update(self._task, total=total, unit=self._unit)

    def advance(self, done: int, text: str) -> None:
        if done:
            self._bars.update(self._task, completed=done, description=text)
        if done and monotonic() - self._last_line_s >= SECONDS_BETWEEN_LINES:
            self._say(f"{done:,} of {self._total:,} {self._unit}; {text}")

    def _say(self, text: str) -> None:
        self._last_line_s = monotonic()
        if not self._bars.console.is_terminal:
            self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def shown_progress(unit: str) -> Iterator[ShardsProgress]:
    """A live line on stderr with rate and time left, gone at the end."""
    console = Console(file=sys.stderr)
    bars = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        _RateColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        disable=not console.is_terminal,
    )
    with bars:
        yield ShardsProgress(bars, unit)


class _RateColumn(ProgressColumn):
    """Items a second, over the last half minute."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.1f} {task.fields['unit']}/s" if task.speed else "")
