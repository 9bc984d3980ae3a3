"""`hvd demo`: the main job on a real model, as the single commands do it, one after the other."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Annotated

import typer

from hvd_ray.config import DEFAULT_MODEL
from hvd_ray.errors import UserError
from hvd_ray.home import file_lock

DTYPES = ("bfloat16", "float32")
INTERRUPTED = 130
"""What a command that is run in this process returns after Ctrl-C: typer swallows the exception."""


def register(app: typer.Typer) -> None:
    app.command("demo", epilog="Example: `hvd demo --limit 5 --max-tokens 128`")(demo)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much the demo does.

    Raises:
        UserError: a size is not positive.
    """

    limit: int = 3
    """Prompts of each workload that are measured."""
    max_tokens: int = 64
    """Output tokens of a request, collected or measured."""
    exact_limit: int = 1
    """Prompts of each workload whose outputs are compared in float32."""
    exact_tokens: int = 32
    collect_limit: int | None = None
    """Prompts of each workload to collect from; None: all."""
    calibrate_repeats: int = 9

    def __post_init__(self) -> None:
        for flag, value in (("--limit", self.limit), ("--max-tokens", self.max_tokens)):
            if value < 1:
                raise UserError(f"{flag} must be 1 or more, got {value}")


FAST = Sizes(limit=1, max_tokens=16, exact_tokens=8, collect_limit=2, calibrate_repeats=3)


@dataclass(frozen=True, slots=True)
class Stage:
    """One command of `hvd` and what it is for."""

    heading: str
    command: tuple[str, ...]
    done: Path | None = None
    """Where its command is noted once it is done; None where doing it again is quick or wanted."""

    def is_done(self) -> bool:
        """Whether this very command has been done before; with other flags it is another."""
        if self.done is None or not self.done.exists():
            return False
        return self.done.read_text(encoding="utf-8") == shlex.join(self.command)


def demo(
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="Measured prompts a workload. Default: 3.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Output tokens a request. Default: 64.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(metavar="N", help="Engines, and labellers, side by side.")
    ] = None,
    model: Annotated[str, typer.Option(help="The target.")] = DEFAULT_MODEL,
    fast: Annotated[
        bool, typer.Option("--fast", help="Tiny sizes: see that it runs, not what it gains.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Forget what an earlier run of these sizes made.")
    ] = False,
) -> None:
    """Fetch, calibrate, collect traces, label, train, register, measure. Resumable.

    Started again it keeps the traces, labels and predictor it has made and measures anew.
    """
    sizes = _sizes(FAST if fast else Sizes(), limit, max_tokens)
    folder = _folder(sizes, model)
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
    started = monotonic()
    stages = plan_demo(sizes, model=model, folder=folder, num_workers=workers)
    with file_lock(folder, on_wait=lambda: _refuse_a_second(folder)):
        for number, stage in enumerate(stages, start=1):
            _run(stage, number, len(stages))
    _say_goodbye(folder, seconds=monotonic() - started)
    if (difference := _first_inexact(folder)) is not None:
        print(f"hvd: {difference}", file=sys.stderr)
        raise typer.Exit(1)


def _refuse_a_second(folder: Path) -> None:
    raise UserError(f"another demo of these sizes is running and writes to {folder}; let it end")


def plan_demo(
    sizes: Sizes, *, model: str, folder: Path, num_workers: int | None = None
) -> list[Stage]:
    """The commands, in their order; each can be typed on its own."""
    traces, labels, predictor = folder / "traces", folder / "labels", folder / "predictor"
    exact = ("--limit", str(sizes.exact_limit), "--max-tokens", str(sizes.exact_tokens))
    measured = ("--limit", str(sizes.limit), "--max-tokens", str(sizes.max_tokens))
    bench = ("bench", "--predictor", str(predictor), f"model={model}")
    workers = () if num_workers is None else ("--workers", str(num_workers))
    collect_limit = () if sizes.collect_limit is None else ("--limit", str(sizes.collect_limit))
    results = [folder / f"bench-{dtype}.json" for dtype in DTYPES]
    return [
        Stage("The target model", ("fetch", model)),
        *_calibration(folder, model, sizes.calibrate_repeats),
        Stage(
            "Traces: what the target answers to the shipped prompts",
            (
                *("traces", "collect", "--model", model, "--out", str(traces), *workers),
                *("--policy", "suffix", "--max-tokens", str(sizes.max_tokens), *collect_limit),
            ),
        ),
        Stage(
            "Labels: what the cache's draft was worth at every position",
            ("traces", "label", str(traces), "--out", str(labels), *workers),
        ),
        Stage(
            "A payoff predictor, judged on held-out sessions and registered",
            ("train", str(labels), "--kind", "survival", "--out", str(predictor), f"model={model}"),
            done=folder / "trained",
        ),
        Stage(
            "Exactness against plain decoding, with that predictor, in float32",
            (*bench, *exact, "--dtype", "float32", "--out", str(results[1])),
        ),
        Stage(
            "Speed against plain decoding, with that predictor, in bfloat16",
            (*bench, *measured, "--dtype", "bfloat16", "--track", "--out", str(results[0])),
        ),
        Stage("Report", ("report", *map(str, results), "--out", str(folder / "report"))),
    ]


def _calibration(folder: Path, model: str, num_repeats: int) -> list[Stage]:
    """Cost tables of this machine, for `hvd_cost`."""
    return [
        Stage(
            f"Costs: what a pass of the target takes here, in {dtype}",
            ("calibrate", "--repeats", str(num_repeats), f"model={model}", f"dtype={dtype}"),
            done=folder / f"calibrated-{dtype}",
        )
        for dtype in DTYPES
    ]


def _sizes(sizes: Sizes, limit: int | None, max_tokens: int | None) -> Sizes:
    from dataclasses import replace

    given = {"limit": limit, "max_tokens": max_tokens}
    return replace(sizes, **{k: v for k, v in given.items() if v is not None})


def _folder(sizes: Sizes, model: str) -> Path:
    """Where a demo of these sizes keeps what it makes: others, or other versions, never clash."""
    from hvd_ray.bench.workloads import load_shipped, workload_hash
    from hvd_ray.config import Config
    from hvd_ray.home import runs_dir
    from hvd_ray.payoff.features import FEATURE_VERSION
    from hvd_ray.traces.schema import SCHEMA_VERSION

    made_of = {
        "model": model,
        "max_tokens": sizes.max_tokens,
        "collect_limit": sizes.collect_limit,
        "prompts": workload_hash(load_shipped().prompts),
        "config": Config().model_dump(mode="json"),
        "versions": [FEATURE_VERSION, SCHEMA_VERSION],
    }
    digest = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()
    return runs_dir() / f"demo-{digest[:8]}"


def _run(stage: Stage, number: int, num_stages: int) -> None:
    """Run a command as if it had been typed, in this process."""
    from rich.console import Console
    from rich.rule import Rule

    console = Console()
    console.print(Rule(f"{number}/{num_stages}  {stage.heading}", align="left", style="bold"))
    print(f"$ hvd {shlex.join(stage.command)}", flush=True)
    if stage.is_done():
        print("done before\n", flush=True)
        return
    started = monotonic()
    _hvd(stage.command)
    if stage.done is not None:
        stage.done.parent.mkdir(parents=True, exist_ok=True)
        stage.done.write_text(shlex.join(stage.command), encoding="utf-8")
    print(f"[{monotonic() - started:.0f} s]\n", flush=True)


def _hvd(command: Sequence[str]) -> None:
    """Run it to its end.

    Raises:
        KeyboardInterrupt: the user ended it.
        typer.Exit: it ended with another code than 0.
    """
    from typer.main import get_command

    from hvd_ray.cli import build_app

    try:
        status = get_command(build_app()).main(args=list(command), standalone_mode=False)
    except typer.Abort:  # its word for the end of input
        raise KeyboardInterrupt from None
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    if status:
        raise typer.Exit(status)


def _say_goodbye(folder: Path, *, seconds: float) -> None:
    from hvd_ray.config import Config
    from hvd_ray.tracking import OFF, tracking_uri

    made = {
        "traces": folder / "traces",
        "labels": folder / "labels",
        "predictor": folder / "predictor",
        "results": folder / "bench-bfloat16.json",
        "in float32": folder / "bench-float32.json",
        "tables, plots": folder / "report",
    }
    print(f"All of it took {seconds / 60:.1f} minutes. What was made:")
    for name, path in made.items():
        print(f"  {name:14}{path}")
    if tracking_uri(Config()) != OFF:
        print("  runs and the registered predictor: type `hvd ui`")


def _first_inexact(folder: Path) -> str | None:
    """The first float32 output that differs from greedy's, in words; there must be none."""
    from hvd_ray.bench.report import exactness_notes
    from hvd_ray.bench.result import read_result

    return next(iter(exactness_notes(read_result(folder / "bench-float32.json").rows)), None)
