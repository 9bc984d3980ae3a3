"""A result as a table for a terminal of 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvd_ray.bench.report import opening_lines, percent, title
from hvd_ray.bench.result import BASELINE, BenchResult, Row

if TYPE_CHECKING:
    from rich.console import RenderableType


def terminal_report(result: BenchResult) -> RenderableType:
    """The table for a terminal of 80 columns, and the notes below it."""
    from rich.console import Group
    from rich.text import Text

    lines = [*opening_lines(result), *result.notes]
    return Group(_terminal_table(result), *(Text(line) for line in lines))


def _terminal_table(result: BenchResult) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    rows = [*result.rows, *result.aggregate]
    caches = {row.cache for row in rows} - {"none"}
    table = Table(
        title=Text(title(result)),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("workload", max_width=14, overflow="fold")
    table.add_column("system", no_wrap=True)
    if len(caches) > 1:
        table.add_column("cache", no_wrap=True)
    clocked = ("tok/s", "speed-up", "95 %") if result.is_timed else ()
    for name in (*clocked, "/pass", "same"):
        table.add_column(name, justify="right", no_wrap=True)
    previous = ""
    for row in rows:
        if previous and row.workload != previous:
            table.add_section()
        workload = row.workload if row.workload != previous else ""
        cache = [row.cache.replace("none", "")] if len(caches) > 1 else []
        times = _time_cells(row) if result.is_timed else []
        counts = [f"{row.emitted_per_pass:.2f}", percent(row.identical_to_greedy)]
        table.add_row(Text(workload), row.system, *cache, *times, *counts)
        previous = row.workload
    return table


def _time_cells(row: Row) -> list[str]:
    low, high = row.speedup_ci
    interval = "too few" if row.ci_is_degenerate else f"{low:.2f}-{high:.2f}"
    return [
        f"{row.tokens_per_second:.1f}",
        f"{row.speedup_vs_greedy:.2f}x",
        "" if row.system == BASELINE else interval,
    ]
