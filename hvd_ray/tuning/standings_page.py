"""The standings as Markdown and as a page, with the reliability diagram of the predictor."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_ray.bench.report import markdown_table, predictor_line
from hvd_ray.home import atomic_path
from hvd_ray.pages.document import Markup, document, paragraph, section, table
from hvd_ray.payoff.features import HIGH_PAYOFF
from hvd_ray.payoff.quality import ReliabilityBin
from hvd_ray.tuning.contest import EVERYTHING
from hvd_ray.tuning.standings import LEAST_OF_ORACLE, LEAST_OVER_BEST, OURS, Standing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLE = "Every system on every workload, replayed"
DIAGRAM = "reliability.png"


def standings_json(
    rows: Sequence[Standing],
    bins: Sequence[ReliabilityBin],
    *,
    unit: str,
    about: Mapping[str, Any],
) -> dict[str, Any]:
    return {
        "format": 1,
        "unit": unit,
        "bars": {"over_best": LEAST_OVER_BEST, "of_oracle": LEAST_OF_ORACLE},
        "rows": [row.as_json() for row in rows],
        "reliability": [bin_.as_dict() for bin_ in bins],
        "provenance": dict(about),
    }


def standings_markdown(rows: Sequence[Standing], *, unit: str, who: str = "") -> str:
    """`who`: the line that names the predictor."""
    head, body = _grid(rows)
    parts = [f"# {TITLE}", _caption(unit), markdown_table(head, body), verdict(rows), who]
    return "\n\n".join(part for part in parts if part)


def verdict(rows: Sequence[Standing]) -> str:
    """Where the bars are reached, and by how much they are missed elsewhere."""
    whole, *each = rows
    short = [row for row in each if row.over_best < LEAST_OVER_BEST]
    found = f"{OURS} is at {LEAST_OVER_BEST} of the best other system or more on "
    found += f"{len(each) - len(short)} of {len(each)} workloads"
    if short:
        found += ", not on " + ", ".join(f"{r.workload} ({r.over_best:.3f})" for r in short)
    reached = "reached" if whole.of_oracle >= LEAST_OF_ORACLE else "missed"
    bar = f"the bar of {LEAST_OF_ORACLE} is {reached}"
    return f"{found}; over all it has {whole.of_oracle:.3f} of the oracle's speed: {bar}."


def write_standings(
    out: Path, rows: Sequence[Standing], bins: Sequence[ReliabilityBin], tree: Mapping[str, Any]
) -> list[Path]:
    """Write `replay.json`, `replay.md`, `replay.html` and the diagram; what was written."""
    unit, who = str(tree["unit"]), predictor_line(tree["provenance"])
    texts = {
        "replay.json": json.dumps(tree, indent=2, allow_nan=False),
        "replay.md": standings_markdown(rows, unit=unit, who=who),
        "replay.html": _page(rows, bins, unit, who),
    }
    for name, text in texts.items():
        with atomic_path(out / name) as draft:
            draft.write_text(text.rstrip() + "\n", encoding="utf-8")
    written = [out / name for name in texts]
    if bins:
        _write_diagram(out / DIAGRAM, bins)
        written.append(out / DIAGRAM)
    return written


def _page(rows: Sequence[Standing], bins: Sequence[ReliabilityBin], unit: str, who: str) -> str:
    from hvd_ray.pages.plots import inline_svg, new_figure

    head, body = _grid(rows)
    standing = section(
        "Speeds",
        table(head, body, marked=EVERYTHING),
        *map(paragraph, [verdict(rows), *([who] if who else [])]),
        caption=_caption(unit),
    )
    if not bins:
        return document(TITLE, standing)
    figure, (ax,) = new_figure(5.4, 4.6)
    _draw(ax, bins)
    diagram: Markup = section(
        "How far a chance can be believed",
        inline_svg(figure, "Reliability diagram of the predictor"),
        caption=_RELIABILITY,
    )
    return document(TITLE, standing, diagram)


def _caption(unit: str) -> str:
    return (
        f"{unit} by replay of held-out sessions. Rules, hvd_tau (tau 6) and hvd_cost fall back to "
        "the EAGLE-3 head where its drafts were labelled. `/ best`: hvd_cost over the best other "
        "system, with a 95 % interval from a paired bootstrap over sessions; `/ oracle`: over the "
        "cheapest way there is with these drafts."
    )


_RELIABILITY = (
    f"Positions with a draft of {HIGH_PAYOFF} tokens or more on held-out sessions, by the "
    f"predicted P(accepted >= {HIGH_PAYOFF}): the share for which it came true. On the diagonal a "
    "chance is what it says; the area of a mark is its number of positions."
)


def _grid(rows: Sequence[Standing]) -> tuple[list[str], list[list[str]]]:
    names = list(rows[0].summaries)
    body = []
    for row in rows:
        speeds = [
            f"{speed:.1f}" if speed >= 10 else f"{speed:.2f}" for speed in row.speeds.values()
        ]
        against = f"{row.over_best:.3f}"
        if not row.gap.estimate.is_degenerate:
            against += f" ({row.gap.estimate.low:.2f}-{row.gap.estimate.high:.2f})"
        cells = [row.workload, f"{row.num_tokens:,}", *speeds]
        body.append([*cells, against, row.best_rival, f"{row.of_oracle:.3f}"])
    return ["workload", "tokens", *names, "/ best", "best other", "/ oracle"], body


def _draw(ax: Axes, bins: Sequence[ReliabilityBin]) -> None:
    from hvd_ray.pages.plots import MUTED, SERIES

    most = max(bin_.num_positions for bin_ in bins)
    ax.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle="--")
    ax.plot([b.predicted for b in bins], [b.share for b in bins], color=SERIES[0], linewidth=1.2)
    ax.scatter(
        [b.predicted for b in bins],
        [b.share for b in bins],
        s=[15 + 300 * b.num_positions / most for b in bins],
        color=SERIES[0],
        alpha=0.8,
    )
    ax.set_xlabel(f"predicted P(accepted >= {HIGH_PAYOFF})")
    ax.set_ylabel("share that came true")
    ax.set_xlim(-0.05, 1.05)
    ax.set_ylim(-0.05, 1.05)


def _write_diagram(path: Path, bins: Sequence[ReliabilityBin]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, 4.6), layout="constrained")
    ax = figure.add_subplot()
    _draw(ax, bins)
    ax.grid(alpha=0.3)
    with atomic_path(path) as draft:
        figure.savefig(draft, format="png", dpi=110)
