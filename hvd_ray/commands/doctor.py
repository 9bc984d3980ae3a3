"""`hvd doctor`: is this machine ready, and if not, what to type."""

from collections.abc import Iterable
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from hvd_ray.doctor import Finding, as_json, examine, is_usable

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def register(app: typer.Typer) -> None:
    app.command("doctor", epilog="Example: `hvd doctor`")(doctor)


def doctor(
    in_json: Annotated[bool, typer.Option("--json", help="Answer in JSON on stdout.")] = False,
) -> None:
    """Check this machine: each line says ok, warn or fail, and what to type. Exit 1 on a fail."""
    text, err = "importing the heavy packages, up to half a minute", Console(stderr=True)
    if not err.is_terminal:
        err.print(text)
    with err.status(text):
        findings = list(_heard(examine(), is_shown=not in_json))
    if in_json:
        print(as_json(findings))
    raise typer.Exit(0 if is_usable(findings) else 1)


def _heard(findings: Iterable[Finding], *, is_shown: bool) -> Iterable[Finding]:
    """Show each finding as soon as it is known."""
    console = Console()
    for finding in findings:
        if is_shown:
            _show(finding, console=console)
        yield finding


def _show(finding: Finding, *, console: Console) -> None:
    line = Text.assemble((f"{finding.status:<5}", _STYLES[finding.status]), f"{finding.name:<17}")
    console.print(line.append(finding.detail), soft_wrap=True)
    if finding.remedy:
        console.print(Text(f"{'':5}type: {finding.remedy}"), soft_wrap=True)
