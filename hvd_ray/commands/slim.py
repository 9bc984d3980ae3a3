"""`hvd slim`: find which layers a cheap verifier may skip; teach it when to ask the target."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from hvd_ray.errors import UserError

Traces = Annotated[Path, typer.Argument(help="What `hvd traces collect` has written.")]
Settings = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="E.g. dtype=float32.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Answer in JSON on stdout.")]


def register(app: typer.Typer) -> None:
    slim = typer.Typer(
        name="slim",
        help="Find a slim model of the target, and train the gate in front of it.",
        no_args_is_help=True,
    )
    slim.command(
        "search", epilog="Example: `hvd slim search traces --out slim --skip 0.3 --trials 64`"
    )(search)
    slim.command("gate", epilog="Example: `hvd slim gate traces tiers.slim=slim/slim.json`")(gate)
    slim.command("plot", epilog="Example: `hvd slim plot slim15 slim30 slim45 --out loss.png`")(
        plot
    )
    app.add_typer(slim)


def search(
    traces: Traces,
    settings: Settings = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the results go.")] = Path("slim"),
    skip: Annotated[float, typer.Option(help="Share of the layers to skip.")] = 0.45,
    methods: Annotated[
        str, typer.Option(help="By comma: prefix, dp, knapsack, dimr, ours.")
    ] = "prefix,dp,knapsack,dimr,ours",
    trials: Annotated[int, typer.Option(help="Of each searched method.")] = 48,
    tokens: Annotated[int, typer.Option(help="Recorded tokens to search on.")] = 4000,
    escalated: Annotated[
        float, typer.Option(help="Share of escalated blocks at which wrong accepts are counted.")
    ] = 0.3,
    concurrency: Annotated[int, typer.Option(help="Trials at once.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Search on recorded greedy outputs of training prompts; judge on some held out.

    Name the result with tiers.slim=DIR/slim.json.
    """
    from hvd_ray.commands.arguments import names_in
    from hvd_ray.commands.traces_progress import shown_progress
    from hvd_ray.config import load_config
    from hvd_ray.tuning.slim import SlimOptions, run_slim_search

    options = SlimOptions(
        traces=traces,
        out=out,
        skip_ratio=skip,
        methods=names_in(methods) or (),  # type: ignore[arg-type]
        num_trials=trials,
        num_tokens=tokens,
        max_escalated=escalated,
        concurrency=concurrency,
    )
    config = load_config(None, settings or (), policies=["nested"])
    with shown_progress("trials") as progress:
        result = run_slim_search(options, config, progress=progress)
    if "warning" in result:
        print(f"hvd: {result['warning']}", file=sys.stderr)
    if as_json:
        print(json.dumps({"out": str(out), **result}))
    else:
        _show(result, out)


def gate(
    traces: Traces,
    settings: Settings = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Default: beside the slim model's file.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Recorded tokens to learn from.")] = 12_000,
    as_json: AsJson = False,
) -> None:
    """Teach the gate of `tiered_learned`, on features that need no pass of the target."""
    from hvd_ray.commands.traces_progress import shown_progress
    from hvd_ray.config import load_config
    from hvd_ray.systems import slim_path
    from hvd_ray.tuning.slim_gate import GateOptions, run_gate_training

    config = load_config(None, settings or (), policies=["tiered_learned"])
    options = GateOptions(traces, out or slim_path(config).parent, tokens)
    with shown_progress("stages") as progress:
        result = run_gate_training(options, config, progress=progress)
    if as_json:
        print(json.dumps({"out": str(options.out), **result}))
        return
    print(f"{'theta':>6} {'asks the target':>16} {'wrong tokens':>13}")
    for point in result["curve"]:
        print(f"{point['theta']:>6} {point['escalated']:>16.1%} {point['wrong_rate']:>13.1%}")
    print(f"{result['num_blocks']} held-out blocks; written: {options.out}")


def plot(
    searches: Annotated[list[Path], typer.Argument(help="Folders of `hvd slim search`.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="A picture: .png or .svg.")] = Path(
        "frontier.png"
    ),
    every_method: Annotated[
        bool, typer.Option("--all", help="Every method; without it the best of each search.")
    ] = False,
) -> None:
    """Draw what tiers lose against what they save, over thresholds and slim models.

    Costs are those that the first search measured, so that all curves share an axis.
    """
    from hvd_ray.bench.plots import plot_frontier
    from hvd_ray.bench.result import check_writable
    from hvd_ray.home import atomic_path
    from hvd_ray.tuning.slim import frontier_curves, read_search

    if out.suffix not in PICTURES:
        raise UserError(f"--out must end with {' or '.join(PICTURES)}, got {out}")
    check_writable(out)
    curves = frontier_curves(list(map(read_search, searches)), every_method=every_method)
    with atomic_path(out) as draft:
        plot_frontier(curves).savefig(draft, dpi=110, format=out.suffix[1:])
    best = max(curves.values(), key=lambda points: max(map(speed_within_loss, points)))
    point = max(best, key=speed_within_loss)
    print(f"written: {out}")
    print(
        f"with at most {MOST_WRONG:.0%} of the unchecked tokens wrong, the fastest of "
        f"{sum(map(len, curves.values()))} points is at {speed_within_loss(point):.2f} of full "
        "verification"
    )


PICTURES = (".png", ".svg")
MOST_WRONG = 0.05
"""The default of `tiers.max_miss_rate`."""


def speed_within_loss(point: Mapping[str, float]) -> float:
    """Tokens per cost over full verification's; 0 where too many unchecked tokens are wrong."""
    return point["speed_vs_full"] if point["wrong_rate"] <= MOST_WRONG else 0.0


def _show(result: Mapping[str, Any], out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table()
    for heading in ("method", "skipped", "cost", "agrees", "log margin", "wrong"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for row in result["rows"]:
        table.add_row(
            row["method"],
            f"{row['skip_ratio']:.0%}",
            f"{row['cost_ratio']:.2f}",
            f"{row['agreement']:.1%}",
            f"{row['log_margin']:.3f}",
            f"{row['wrong_accepts']:.1%}",
        )
    console.print(table)
    console.print(f"best: {result['best']}; written: {out / 'slim.json'}", highlight=False)
