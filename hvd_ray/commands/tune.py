"""`hvd tune`: sweep predictor and policy on Ray Tune; the best becomes a challenger."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from hvd_ray.errors import UserError

EXAMPLE = (
    "Example: `hvd tune --config tune_configs/quick.yaml --labels labels --traces traces "
    "--out sweep space.depth=2`"
)
NUM_SHOWN = 5


def register(app: typer.Typer) -> None:
    app.command("tune", epilog=EXAMPLE)(tune)


def tune(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Of the sweep or the configuration, e.g. seed=7."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A sweep file. Default: as tune_configs/payoff.yaml.")
    ] = None,
    labels: Annotated[
        Path | None, typer.Option(metavar="DIR", help="What `hvd traces label` has written.")
    ] = None,
    traces: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The traces that were labelled.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The sweep's folder.")] = Path("sweep"),
    trials: Annotated[int | None, typer.Option(metavar="N", help="Trials in all.")] = None,
    concurrency: Annotated[int | None, typer.Option(metavar="N", help="Trials at once.")] = None,
    costs: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|pass",
            help="A cost table of `hvd calibrate`, or pass: count target passes. "
            "Default: this machine's table.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the sweep in --out, if there is one.")
    ] = False,
    no_register: Annotated[
        bool, typer.Option("--no-register", help="Do not register the best predictor.")
    ] = False,
    page: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Only draw the page of a finished sweep's folder again."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON on stdout.")] = False,
) -> None:
    """Search for the predictor and policy that replay validation sessions fastest.

    The best trial is reported on test sessions and registered as the challenger; `hvd promote`
    makes it the champion if it is better.
    """
    if page is not None:
        _draw(page, as_json=as_json)
        return
    if labels is None or traces is None:
        raise UserError("say where the data are: hvd tune --labels LABELS_DIR --traces TRACES_DIR")
    from hvd_ray.commands.traces_progress import shown_progress
    from hvd_ray.config import load_config
    from hvd_ray.tuning.run import SweepOptions, run_sweep
    from hvd_ray.tuning.space import load_sweep

    given = {"trials": trials, "concurrency": concurrency}
    flags = [f"{key}={value}" for key, value in given.items() if value is not None]
    sweep, others = load_sweep(config, [*(settings or ()), *flags])
    loaded = load_config(None, others, policies=["hvd_tau", "hvd_cost"])
    options = SweepOptions(
        labels=labels,
        traces=traces,
        out=out,
        costs=costs,
        is_resumed=resume,
        wants_registration=not no_register,
    )
    try:
        with shown_progress("items") as progress:
            result = run_sweep(options, sweep, loaded, progress=progress)
    except KeyboardInterrupt:
        print("hvd: interrupted; the same command with --resume goes on", file=sys.stderr)
        raise
    places = _places(out)
    if as_json:
        shown = {key: result[key] for key in ("unit", "best", "test", "run_id", "registered")}
        print(json.dumps({"out": str(out), "trials": len(result["trials"]), **shown, **places}))
    else:
        _show(result, places)


def _draw(folder: Path, *, as_json: bool) -> None:
    from hvd_ray.tuning.folder import SweepFolder
    from hvd_ray.tuning.page import write_page

    place = SweepFolder(folder)
    write_page(place.page, place.read_result())
    print(json.dumps({"page": str(place.page)}) if as_json else f"written: {place.page}")


def _places(out: Path) -> dict[str, str]:
    return {
        "predictor": str(out / "best"),
        "page": str(out / "sweep.html"),
        "tensorboard": f"tensorboard --logdir {out / 'trials'}",
    }


def _show(result: Mapping[str, Any], places: Mapping[str, str]) -> None:
    from rich.console import Console

    console = Console()
    console.print(_trials_table(result["trials"], result["unit"]))
    console.print(_test_table(result["test"], result["unit"]))
    for name, place in places.items():
        print(f"{name + ':':13}{place}{_needed(name)}")
    if result["registered"] is not None:
        print(f"registered:  {result['registered']} as challenger; next: hvd promote")


def _needed(name: str) -> str:
    """TensorBoard is not among our packages; Tune writes its files all the same."""
    is_lacking = name == "tensorboard" and find_spec(name) is None
    return " (first `pip install tensorboard`)" if is_lacking else ""


def _trials_table(rows: Sequence[Mapping[str, Any]], unit: str) -> Any:
    """The fastest trials on the validation sessions."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from hvd_ray.tuning.page import varied

    names = [name for name in varied(rows)[0] if name != "epochs"]
    good = sorted((row for row in rows if row["metrics"]), key=lambda row: -row["metrics"]["speed"])
    shown = good[:NUM_SHOWN]
    title = f"The best {len(shown)} of {len(rows)} trials, validation sessions"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("trial", justify="right")
    table.add_column(unit, justify="right", no_wrap=True)
    table.add_column("epochs", justify="right")
    table.add_column("settings", overflow="fold")
    for row in shown:
        params = row["params"]
        words = ", ".join(f"{name} {value_text(params[name])}" for name in names if name in params)
        epochs = f"{row['metrics']['epoch']:.0f}/{row['params']['epochs']}"
        table.add_row(str(row["number"]), f"{row['metrics']['speed']:,.2f}", epochs, Text(words))
    return table


def _test_table(rows: Sequence[Mapping[str, Any]], unit: str) -> Any:
    """The best trial beside fixed policies on the test sessions."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    names = list(rows[0]["speeds"])
    title = f"Test sessions, replayed {unit}; the best trial over {names[1]} with a 95 % interval"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("workload", overflow="fold", max_width=20)
    for name in (*names, f"best / {names[1]}"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        figures = [f"{row['speeds'][name]:,.2f}" for name in names]
        table.add_row(Text(row["workload"]), *figures, gap_text(row["gap"], digits=2))
    return table


def gap_text(gap: Mapping[str, Any], *, digits: int = 3) -> str:
    """`1.041 [1.012, 1.071]`, or the ratio alone where no interval can be given."""
    ratio = f"{gap['ratio']:.{digits}f}"
    if gap["interval"] is None:
        return ratio
    low, high = (f"{end:.{digits}f}" for end in gap["interval"])
    return f"{ratio} [{low}, {high}]"


def value_text(value: Any) -> str:
    """A setting in few characters."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
