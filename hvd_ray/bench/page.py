"""Results as one page that needs nothing else: light, dark or printed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hvd_ray.bench.plots import PANEL_HEIGHT, WIDTH, draw_speedups, num_panels
from hvd_ray.bench.report import (
    TIERS_CAPTION,
    across,
    labels_of,
    opening_lines,
    provenance_line,
    speedup_cell,
    title,
)
from hvd_ray.bench.result import BASELINE, BenchResult, Row
from hvd_ray.bench.tier_report import cost_line, has_tiers, tier_summary
from hvd_ray.home import atomic_path
from hvd_ray.pages.document import Markup, bullets, document, paragraph, section, table
from hvd_ray.pages.plots import inline_svg, legend, new_figure


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
    words += " In the figure wide intervals run out of the frame." if drawn else ""
    tiers = []
    if has_tiers(result):
        about = f"{TIERS_CAPTION} {cost_line(result.provenance)}"
        tiers = [section("Tiers", table(*tier_summary(result)), caption=about)]
    return [
        section(
            title(result),
            *drawn,
            *map(paragraph, opening_lines(result)),
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
    columns = across(labels)
    cells = {(r.workload, name): speedup_cell(r) for r, name in zip(drafting, labels, strict=True)}
    workloads = dict.fromkeys(row.workload for row in drafting)
    body = [[w, *(cells.get((w, name), "-") for name in columns)] for w in workloads]
    return table(["workload", *columns], body, marked="all")


def speedup_plot(result: BenchResult) -> Markup:
    """A mark with its interval for each arm and workload."""
    count = num_panels(result)
    figure, panels = new_figure(WIDTH, 0.6 + PANEL_HEIGHT * count, num_axes=count, stacked=True)
    draw_speedups(panels, result)
    legend(panels[0], columns=5, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return inline_svg(figure, "Speed-up against greedy by workload and system")
