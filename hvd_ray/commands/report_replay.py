"""`hvd report --replay`: all systems replayed on labelled, held-out traces."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_ray.errors import UserError

if TYPE_CHECKING:
    from hvd_ray.config import Config
    from hvd_ray.payoff.quality import ReliabilityBin
    from hvd_ray.pipelines.shards import RunProgress
    from hvd_ray.tuning.standings import Standing


def show_replay(
    labels: Path,
    traces: Path | None,
    *,
    costs: str | None,
    predictor: str | None,
    num_workers: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Replay, and print the table or write it with its page.

    Raises:
        UserError: no traces, labels of other traces, no predictor with a curve, no costs.
    """
    from hvd_ray.commands.traces_progress import shown_progress

    if traces is None:
        raise UserError("--replay needs --traces DIR, the traces that were labelled")
    with shown_progress("pieces") as progress:
        rows, bins, tree = _replayed(labels, traces, costs, predictor, num_workers, progress)
    written = []
    if out is not None:
        from hvd_ray.tuning.standings_page import write_standings

        written = write_standings(out, rows, bins, tree)
    if as_json:
        found = {"written": [str(path) for path in written]}
        print(json.dumps(found if written else tree, indent=2, allow_nan=False))
    else:
        _show(rows, tree)
        print("".join(f"written: {path}\n" for path in written), end="")


def _replayed(
    labels: Path,
    traces: Path,
    costs: str | None,
    reference: str | None,
    num_workers: int,
    progress: RunProgress,
) -> tuple[list[Standing], tuple[ReliabilityBin, ...], dict[str, Any]]:
    from hvd_ray.commands.workers import bar, started_workers
    from hvd_ray.config import Config, DraftingConfig
    from hvd_ray.parts.payoff import find_payoff
    from hvd_ray.payoff.dataset import TEST, label_set
    from hvd_ray.payoff.estimator import PredictorEstimator
    from hvd_ray.payoff.features import FeatureExtractor
    from hvd_ray.payoff.quality import reliability
    from hvd_ray.pipelines.label import token_classes_of
    from hvd_ray.provenance import provenance
    from hvd_ray.tuning.data import LabelNote, label_table, open_material
    from hvd_ray.tuning.pieces import look_up_pieces
    from hvd_ray.tuning.pricing import find_pricing
    from hvd_ray.tuning.standings import standings
    from hvd_ray.tuning.standings_page import standings_json

    suffix = LabelNote.read(labels).suffix  # drafts as they were labelled, of whatever factor
    drafting = DraftingConfig(suffix=suffix)
    material = open_material(labels, traces, Config(drafting=drafting))
    config = _configured(material.model, reference).model_copy(update={"drafting": drafting})
    pricing = find_pricing(costs, config)
    if material.model_drafter is not None:
        pricing.check_model_price(labels)
    payoff = find_payoff(config)
    if not payoff.has_survival:
        raise UserError(
            f"predictor {payoff.reference}: gives no survival curve, which hvd_cost needs; "
            "name another with --predictor"
        )
    classes = token_classes_of(material.model, material.tokenizer_sha)
    estimator = PredictorEstimator(payoff.predictor, FeatureExtractor(classes))
    with started_workers(num_workers, progress) as workers:
        told = bar(progress, "looking up the test drafts")
        found = look_up_pieces(material.shards(), suffix, workers=workers, on_done=told)
        if not found:
            raise UserError(f"{traces}: holds no trace of the test split to replay")
        test = material.with_models(found)
        told = bar(progress, "replaying all systems")
        rows = standings(test, estimator, pricing.table, config, workers=workers, on_done=told)
    bins = reliability(payoff.predictor, label_set(label_table(labels), split=TEST))
    facts = {"traces_hash": material.note.traces_hash, **pricing.about, **payoff.facts}
    about = provenance(config=config, labels=labels.name, **facts)
    return rows, bins, standings_json(rows, bins, unit=pricing.unit, about=about)


def _configured(model: str, reference: str | None) -> Config:
    from hvd_ray.config import load_config

    given = [f"model={json.dumps(model)}"]
    given += [] if reference is None else [f"policy.predictor={json.dumps(reference)}"]
    return load_config(None, given, policies=["hvd_tau", "hvd_cost"])


def _show(rows: Sequence[Standing], tree: Mapping[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from hvd_ray.bench.report import predictor_line
    from hvd_ray.tuning.standings import OURS
    from hvd_ray.tuning.standings_page import verdict

    title = f"Held-out sessions, replayed {tree['unit']}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("workload", overflow="fold", max_width=20)
    for name in ("greedy", OURS, "best other"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("which", overflow="fold")
    for name in ("/ best", "/ oracle"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        speeds = [row.speeds[name] for name in ("greedy", OURS, row.best_rival)]
        figures = [f"{speed:.2f}" for speed in speeds]
        ratios = (f"{row.over_best:.3f}", f"{row.of_oracle:.3f}")
        table.add_row(Text(row.workload), *figures, row.best_rival, *ratios)
    Console().print(table)
    print(verdict(rows))
    print(predictor_line(tree["provenance"]))
