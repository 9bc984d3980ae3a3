"""`hvd calibrate`: what a target pass and a draft cost on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hvd_ray.errors import UserError

if TYPE_CHECKING:
    from hvd_ray.config import Config
    from hvd_ray.payoff.cost_file import CostFile

EXAMPLE = "Example: `hvd calibrate dtype=float32`"


def register(app: typer.Typer) -> None:
    app.command("calibrate", epilog=EXAMPLE)(calibrate)


def calibrate(
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="E.g. dtype=float32.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Passes measured for each number of rows.")] = 15,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|DIR",
            help="Default: under HVD_HOME, where hvd_cost looks. With --shapes: a folder.",
        ),
    ] = None,
    shapes: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Instead: random weights of these shapes, by comma: qwen3-4b, llama-3.1-8b, tiny.",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="cuda|cpu", help="With --shapes. Default: cuda.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON on stdout.")] = False,
) -> None:
    """Measure what a cycle costs here, for `hvd_cost`. Let nothing else run meanwhile."""
    if repeats < 1:
        raise UserError(f"--repeats must be 1 or more, got {repeats}")
    if shapes is not None or device is not None:
        from hvd_ray.commands.calibrate_shapes import calibrate_shapes

        calibrate_shapes(shapes, device, out, settings or (), repeats=repeats, as_json=as_json)
        return
    from hvd_ray.bench.result import check_writable
    from hvd_ray.config import load_config
    from hvd_ray.parts.costs import costs_path
    from hvd_ray.payoff.cost_file import write_costs

    if out is not None:
        check_writable(out)
    config = load_config(None, settings or (), policies=["hvd_cost+nested"])
    costs = _measure(config, repeats)
    path = out or costs_path(costs.key)
    write_costs(path, costs)
    if as_json:
        print(costs.model_dump_json(indent=2))
    else:
        _show(costs, path, shows_slim=config.tiers.slim is not None)


def _measure(config: Config, num_repeats: int) -> CostFile:
    """Measure; if something disturbed it, once more, and keep the calmer of the two."""
    from hvd_ray.bench.costs import measure_costs
    from hvd_ray.commands.traces_progress import shown_progress
    from hvd_ray.payoff.cost_file import CALM_SPREAD
    from hvd_ray.systems import load_engine

    with shown_progress("repeats") as progress:

        def measure(what: str) -> CostFile:
            progress.expect(num_repeats + 2)
            done = iter(range(1, num_repeats + 3))
            return measure_costs(
                engine,
                codec,
                config,
                num_repeats=num_repeats,
                on_repeat=lambda: progress.advance(next(done), what),
            )

        progress.stage(f"loading {config.model} ({config.dtype})")
        engine, codec = load_engine(config)
        costs = measure("target passes")
        if costs.spread > CALM_SPREAD:
            progress.stage("the repeats disagree; measuring once more")
            costs = min(
                costs, measure("target passes, again"), key=lambda measured: measured.spread
            )
    return costs


def _show(costs: CostFile, path: Path, *, shows_slim: bool) -> None:
    """Passes of the slim model that ships are measured too, for those who ask for tiers."""
    from rich.console import Console
    from rich.table import Table

    from hvd_ray.payoff.cost_file import CALM_SPREAD

    console = Console()
    key = costs.key
    console.print(
        f"A target pass in {key.dtype} on {key.device}, {key.num_threads} threads", highlight=False
    )
    table = Table()
    has_slim = shows_slim and costs.slim is not None
    for heading in ("rows", "ms", "of one row", *(["slim ms", "slim/full"] * has_slim)):
        table.add_column(heading, justify="right")
    for at, (rows, cost_ms) in enumerate(zip(costs.rows, costs.verify_ms, strict=True)):
        cells = [f"{rows}", f"{cost_ms:.1f}", f"{cost_ms / costs.verify_ms[0]:.2f}"]
        if has_slim:
            cells += [f"{costs.slim_ms[at]:.1f}", f"{costs.slim_ms[at] / cost_ms:.2f}"]
        table.add_row(*cells)
    console.print(table)
    drafts = ", ".join(f"{source} {cost:.3f} ms" for source, cost in costs.draft_ms.items())
    console.print(f"drafting, fixed: {drafts}", highlight=False)
    for source, token_ms in costs.draft_token_ms.items():
        console.print(f"and for each token: {source} {token_ms:.3f} ms", highlight=False)
    console.print(f"written: {path}", soft_wrap=True, highlight=False)
    if costs.spread > CALM_SPREAD:
        console.print(
            f"Careful: repeats differ by {costs.spread:.0%} of their median, twice over. "
            "Something else is running; measure again on a quiet machine.",
            highlight=False,
        )
