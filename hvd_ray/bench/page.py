"""Results as one page that needs nothing else: light, dark or printed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_ray.bench.report import (
    TIERS_CAPTION,
    exactness_line,
    labels_of,
    provenance_line,
    speedup_cell,
    title,
)
from hvd_ray.bench.result import BASELINE, BenchResult, Row
from hvd_ray.bench.tier_report import cost_line, has_tiers, tier_summary
from hvd_ray.home import atomic_path
from hvd_ray.pages.document import Markup, bullets, document, paragraph, section, table
from hvd_ray.pages.plots import colours, inline_svg, legend, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def write_bench_page(
    path: Path, results: Sequence[BenchResult], more: Sequence[Sequence[Markup]] = ()
) -> None:
    """Draw results to one file, whole or not at all.

    Args:
        path: of the page.
        results: one after the other.
        more: further sections of each result, where it has some.
    """
    parts = []
    for index, result in enumerate(results):
        parts += result_sections(result)
        parts += more[index] if index < len(more) else ()
    with atomic_path(path) as draft:
        draft.write_text(document("Benchmark", *parts), encoding="utf-8")


def result_sections(result: BenchResult) -> list[Markup]:
    """A result's plot, tables and notes."""
    rows = [*result.rows, *result.aggregate]
    has_rivals = any(row.system != BASELINE for row in rows) and result.is_timed
    drawn = [speedup_plot(result), _speedups(rows)] if has_rivals else []
    words = "Tokens a second over greedy's, prompts interleaved, with 95 % intervals by bootstrap."
    tiers = []
    if has_tiers(result):
        about = f"{TIERS_CAPTION} {cost_line(result.provenance)}"
        tiers = [section("Tiers", table(*tier_summary(result)), caption=about)]
    return [
        section(
            title(result),
            *drawn,
            paragraph(exactness_line(result)),
            bullets(result.notes) if result.notes else Markup(""),
            paragraph(provenance_line(result)),
            caption=words if has_rivals else "",
        ),
        *tiers,
        section("Cycles and routes", _cycles(rows)),
    ]


def _cycles(rows: Sequence[Row]) -> Markup:
    head = ["workload", "system", "emitted per pass", "cycles per 1,000", "accepted / drafted"]
    body = [
        [
            row.workload,
            row.system if row.cache == "none" else f"{row.system} {row.cache}",
            f"{row.emitted_per_pass:.2f}",
            f"{row.cycles_per_1k_tokens:.0f}",
            f"{row.accepted:,} / {row.drafted:,}",
            ", ".join(f"{s} {100 * share:.0f} %" for s, share in row.source_share.items()),
        ]
        for row in rows
    ]
    return table([*head, "share of passes"], body)


def _speedups(rows: Sequence[Row]) -> Markup:
    drafting = [row for row in rows if row.system != BASELINE]
    labels = labels_of(drafting)
    across = list(dict.fromkeys(labels))
    cells = {(r.workload, name): speedup_cell(r) for r, name in zip(drafting, labels, strict=True)}
    workloads = dict.fromkeys(row.workload for row in drafting)
    body = [[w, *(cells.get((w, name), "-") for name in across)] for w in workloads]
    return table(["workload", *across], body, marked="all")


def speedup_plot(result: BenchResult) -> Markup:
    """A mark with its interval for each arm and workload."""
    rows = [row for row in [*result.rows, *result.aggregate] if row.system != BASELINE]
    labels = labels_of(rows)
    workloads = list(dict.fromkeys(row.workload for row in rows))
    arms = list(dict.fromkeys(labels))
    figure, (ax,) = new_figure(max(8.0, 1.1 * len(workloads) + 3), 4.2)
    for index, (arm, colour) in enumerate(colours(arms).items()):
        shift = (index - (len(arms) - 1) / 2) * 0.8 / len(arms)
        for row, label in zip(rows, labels, strict=True):
            if label == arm:
                _mark(ax, workloads.index(row.workload) + shift, row, colour)
        ax.plot([], [], "o", color=colour, label=arm)
    ax.axhline(1, color="#8a8f98", linewidth=1)
    ax.set_xticks(range(len(workloads)), workloads, rotation=25, ha="right", parse_math=False)
    ax.set_ylabel("speed-up against greedy")
    highest = max((min(r.speedup_ci[1], 2 * r.speedup_vs_greedy) for r in rows), default=1.0)
    ax.set_ylim(0, 1.1 * max(1.0, highest))
    legend(ax, columns=5, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return inline_svg(figure, "Speed-up against greedy by workload and system")


def _mark(ax: Axes, place: float, row: Row, colour: str) -> None:
    ax.plot([place, place], row.speedup_ci, color=colour, linewidth=1.3, alpha=0.7)
    ax.plot([place], [row.speedup_vs_greedy], "o", color=colour, markersize=4)
