"""`hvd fetch`: bring a target model onto this machine."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from hvd_ray.config import DEFAULT_MODEL
from hvd_ray.fetch import ModelRef, fetch_model, is_present


def register(app: typer.Typer) -> None:
    app.command("fetch", epilog="Example: `hvd fetch smollm2-135m`")(fetch)


def fetch(
    model: Annotated[
        str, typer.Argument(help="smollm2-135m, a hub id ORG/NAME, or a folder to check.")
    ] = DEFAULT_MODEL,
    force: Annotated[bool, typer.Option("--force", help="Fetch it anew.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON on stdout.")] = False,
) -> None:
    """Bring a target model onto this machine (into HVD_HOME); resumes where it was broken off."""
    if is_present(model) and not force:
        _answer(fetch_model(model), was_there=True, as_json=as_json)
        return
    with _shown_progress(model) as progress:
        ref = fetch_model(model, force=force, progress=progress)
    _answer(ref, was_there=False, as_json=as_json)


def _answer(ref: ModelRef, *, was_there: bool, as_json: bool) -> None:
    if as_json:
        answer = {"name": ref.name, "path": ref.path_or_id, "was_there": was_there}
        print(json.dumps(answer))
        return
    state = "is already there" if was_there else "is ready"
    print(f"{ref.name} {state}: {ref.path_or_id}")


class _TerminalProgress:
    """A `FetchProgress` on one line of the terminal."""

    def __init__(self, bars: Progress, *, name: str) -> None:
        self._bars = bars
        self._name = name
        self._task = bars.add_task(name, total=None)

    def stage(self, text: str, *, total: int | None = None) -> None:
        description = f"{self._name}: {text}"
        self._bars.remove_task(self._task)
        self._task = self._bars.add_task(description, total=total)
        if not self._bars.console.is_terminal:
            self._bars.console.print(description)

    def advance(self, done: int) -> None:
        self._bars.update(self._task, completed=done)


@contextmanager
def _shown_progress(name: str) -> Iterator[_TerminalProgress]:
    """A live line on the real stderr, gone at the end."""
    console = Console(file=sys.stderr)  # bound now: libraries' own stderr is silenced meanwhile
    bars = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        _BytesColumn(),
        _SpeedColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stderr=False,
        redirect_stdout=False,
        disable=not console.is_terminal,
    )
    with bars:
        yield _TerminalProgress(bars, name=name)


class _BytesColumn(DownloadColumn):
    def render(self, task: Task) -> Text:
        return Text() if task.total is None else super().render(task)


class _SpeedColumn(TransferSpeedColumn):
    def render(self, task: Task) -> Text:
        return Text() if task.total is None else super().render(task)
