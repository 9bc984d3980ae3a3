"""`hvd report`: tables and plots from the results of `hvd bench`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command(
        "report",
        epilog="Example: `hvd report bf16.json float32.json --out docs/bench --readme README.md`",
    )(report)


def report(
    results: Annotated[
        list[Path], typer.Argument(metavar="RESULT.json...", help="Results of `hvd bench --out`.")
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write bench.md and the plots there.")
    ] = None,
    readme: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Put the tables between the comments `bench:begin` and `bench:end` there.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Say in JSON what was written; without --out, the rows.")
    ] = False,
) -> None:
    """Show results as Markdown, or write them with their plots."""
    from hvd_ray.bench.report import check_readme, markdown_report, update_readme, write_report
    from hvd_ray.bench.result import check_writable, read_result

    read = [read_result(path) for path in results]
    if readme is not None:
        check_readme(readme)
        check_writable(readme)
    written: list[Path] = []
    if out is not None:
        check_writable(out / "bench.md")
        written += write_report(read, out)
    if readme is not None:
        plots = [path for path in written if path.suffix == ".png"]
        links = [Path(os.path.relpath(path, readme.parent)).as_posix() for path in plots]
        update_readme(readme, read, images=links)
        written.append(readme)
    if as_json:
        found = {"written": [str(path) for path in written]}
        print(json.dumps(found if written else [result.as_json() for result in read], indent=2))
    elif written:
        print("\n".join(f"written: {path}" for path in written))
    else:
        print(markdown_report(read), end="")
