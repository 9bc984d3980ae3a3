"""`hvd train --rivals`: kinds of predictors beside each other."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvd_ray.payoff.training_settings import TrainingSettings
    from hvd_ray.tuning.rivals import Rival

HEADINGS = ("prec.", "recall", "p@r.80", "r@p.88", "AP", "ECE", "us")


def show_rivals(labels: Path, settings: TrainingSettings, *, as_json: bool) -> None:
    """Print the table.

    Raises:
        UserError: bad labels.
    """
    from hvd_ray.commands.train_labels import read_labels_dir
    from hvd_ray.tuning.rivals import rivals

    rows = rivals(read_labels_dir(labels), settings, on_row=_say)
    if as_json:
        print(json.dumps({"rows": [row.as_json() for row in rows]}, allow_nan=False))
    else:
        _show(rows)


def _say(row: Rival) -> None:
    print(f"judged {row.name}", file=sys.stderr)


def _show(rows: Sequence[Rival]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    title = (
        "Accepted length >= 6 on held-out sessions. p@r.80: precision at a recall of 0.80; r@p.88: "
        "recall at a precision of 0.88; us: microseconds to judge one draft"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("predictor", overflow="fold", max_width=28)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        figures = list(row.as_json().values())[1:-1]
        cells = ["-" if figure is None else f"{figure:.3f}" for figure in figures]
        table.add_row(row.name, *cells, "-" if row.ask_us is None else f"{row.ask_us:,.0f}")
    Console().print(table)
