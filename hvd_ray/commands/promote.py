"""`hvd promote`: make the challenger the champion if it is better, or go back to what ships."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hvd_ray.commands.tune import gap_text, value_text
from hvd_ray.errors import UserError

if TYPE_CHECKING:
    from hvd_ray.config import Config
    from hvd_ray.tuning.promote import Promotion

EXAMPLE = "Example: `hvd promote`, after `hvd tune`; after `hvd train` with --traces TRACES_DIR"


def register(app: typer.Typer) -> None:
    app.command("promote", epilog=EXAMPLE)(promote)


def promote(
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="E.g. policy.tau=4, if you serve so."),
    ] = None,
    labels: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Default: those of the challenger's sweep.")
    ] = None,
    traces: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Default: those of the challenger's sweep.")
    ] = None,
    costs: Annotated[
        str | None,
        typer.Option(metavar="FILE|pass", help="Default: those of the sweep, or this machine's."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Promote it whatever the comparison says.")
    ] = False,
    shipped: Annotated[
        bool,
        typer.Option(
            "--shipped", help="Instead: no champion any more, so that what ships decides again."
        ),
    ] = False,
    config: Annotated[Path | None, typer.Option(help="A YAML file of settings.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON on stdout.")] = False,
) -> None:
    """Replay the test sessions with challenger and champion; exit 1 if the champion stays.

    Both decide as `hvd serve` would: by hvd_cost where there is a cost table, else by hvd_tau;
    policy.name or policy.tau fixes it. Without a champion what ships with hvd stands in its
    place. The alias moves only if the whole 95 % interval of the challenger's speed over the
    champion's lies above 1 or, where the challenger alone has the survival curve of hvd_cost, if
    it is not shown to be slower.
    """
    from hvd_ray.commands.traces_progress import shown_progress
    from hvd_ray.config import load_config
    from hvd_ray.tuning.promote import PromoteOptions
    from hvd_ray.tuning.promote import promote as run

    loaded = load_config(config, settings or ())
    if shipped:
        if force or any(given is not None for given in (labels, traces, costs)):
            raise UserError("--shipped compares nothing: no --labels, --traces, --costs, --force")
        _go_back(loaded, as_json=as_json)
        return
    options = PromoteOptions(labels=labels, traces=traces, costs=costs, is_forced=force)
    with shown_progress("traces") as progress:
        outcome = run(options, loaded, progress=progress)
    if as_json:
        print(json.dumps(outcome.as_json()))
    else:
        _show(outcome)
    raise typer.Exit(0 if outcome.is_promoted else 1)


def _go_back(config: Config, *, as_json: bool) -> None:
    """Take the champion's alias away.

    Raises:
        UserError: nothing ships for the target.
    """
    from hvd_ray.shipped import shipped_folder
    from hvd_ray.tracking.promotion import drop_champion

    if shipped_folder(config.model, "payoff") is None:
        raise UserError(f"no predictor ships for {config.model}: its champion stays")
    before = drop_champion(config=config)
    if as_json:
        print(json.dumps({"champion": None, "was": None if before is None else before.ref}))
        return
    print(f"what ships for {config.model} decides{' already' if before is None else ' again'}")
    if before is not None:
        print(f"was champion: {before.ref} (policy.predictor={before.ref})")


def _show(outcome: Promotion) -> None:
    from rich.console import Console

    if outcome.rows:
        Console().print(_table(outcome))
    for note in outcome.notes:
        print(note)
    if outcome.as_tuned is not None and outcome.tuned is not None:
        print(f"as tuned ({_words(outcome.tuned)}): {gap_text(outcome.as_tuned.gap.as_json())}")
    verdict = "promoted" if outcome.is_promoted else "not promoted"
    print(f"{verdict}: {outcome.reason}")
    if outcome.is_promoted:
        print(f"champion: {outcome.challenger.ref}")
        if outcome.to_serve is not None:
            print(f"to serve by it: {outcome.to_serve}")
        return
    print(f"goes on deciding: {outcome.incumbent}")
    print(f"challenger: {outcome.challenger.ref}")
    print(f"  try it:  policy.predictor={outcome.challenger.ref}")
    print("  take it: the same command with --force")


def _table(outcome: Promotion) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    title = (
        f"Test sessions, replayed {outcome.unit}\n{_words(outcome.policy)}: {outcome.policy_why}"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("workload", overflow="fold", max_width=24)
    for name in ("sessions", "challenger", "champion", "ratio [95 %]"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in outcome.rows:
        speeds = [f"{speed:,.2f}" for speed in row.speeds.values()]
        gap = gap_text(row.gap.as_json())
        table.add_row(Text(row.workload), str(row.num_sessions), *speeds, gap)
    return table


def _words(policy: Mapping[str, Any]) -> str:
    """`hvd_tau, tau 6`."""
    shown = {k: v for k, v in policy.items() if k != "policy"}
    return ", ".join([str(policy["policy"]), *(f"{k} {value_text(v)}" for k, v in shown.items())])
