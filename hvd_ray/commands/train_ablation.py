"""`hvd train --ablate`: what each group of features adds."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_ray.errors import UserError

if TYPE_CHECKING:
    from hvd_ray.config import Config
    from hvd_ray.payoff.training_settings import TrainingSettings
    from hvd_ray.tuning.ablation import AblationRow, ReplayJudge

FIGURES = ("precision", "recall", "precision_at_recall", "average_precision", "speed")
HEADINGS = ("prec.", "recall", "p@r.80", "AP")


def show_ablation(
    labels: Path,
    config: Config,
    settings: TrainingSettings,
    *,
    traces: Path | None,
    costs: str | None,
    as_json: bool,
) -> None:
    """Print the table: the whole first, then the change that leaving out each group makes.

    Raises:
        UserError: bad labels, traces of other labels, costs without traces.
    """
    from hvd_ray.commands.train_labels import read_labels_dir
    from hvd_ray.tuning.ablation import ablate

    if costs is not None and traces is None:
        raise UserError("--costs prices the replay of --traces DIR, which is missing")
    data = read_labels_dir(labels)
    judge, unit = (None, "") if traces is None else _judge(labels, traces, costs, config)
    rows = ablate(data, settings, judge=judge, on_row=_say)
    if as_json:
        print(json.dumps({"unit": unit, "rows": [row.as_json() for row in rows]}, allow_nan=False))
    else:
        _show(rows, unit)


def _judge(
    labels: Path, traces: Path, costs: str | None, config: Config
) -> tuple[ReplayJudge, str]:
    from hvd_ray.payoff.dataset import TEST
    from hvd_ray.pipelines.label import token_classes_of
    from hvd_ray.tuning.ablation import ReplayJudge
    from hvd_ray.tuning.data import open_material
    from hvd_ray.tuning.pricing import PASS, find_pricing

    material = open_material(labels, traces, config)
    pricing = find_pricing(costs or PASS, config)
    print("looking up the test drafts", file=sys.stderr)
    test = material.replay_set(material.shards(), lambda trace: trace.split == TEST)
    classes = token_classes_of(material.model, material.tokenizer_sha)
    return ReplayJudge(test, classes, pricing.table), pricing.unit


def _say(row: AblationRow) -> None:
    print(f"trained without {row.without} ({row.num_features} features)", file=sys.stderr)


def _show(rows: Sequence[AblationRow], unit: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    title = (
        "Accepted length >= 6 on held-out sessions: all features, then the change without one group"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("without", no_wrap=True)
    for heading in ("features", *HEADINGS, *([unit] if unit else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    whole = rows[0]
    for row in rows:
        names = FIGURES if unit else FIGURES[:-1]
        cells = [_cell(getattr(row, n), None if row is whole else getattr(whole, n)) for n in names]
        table.add_row(row.without, str(row.num_features), *cells)
    Console().print(table)


def _cell(value: Any, reference: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if reference is None else f"{value - reference:+.3f}"
