"""An advice for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_ray.advise.judging import ALL, Row
from hvd_ray.advise.page import figure, interval, system_label
from hvd_ray.advise.recommend import PREDICTOR, Recommendation
from hvd_ray.advise.result import Advice
from hvd_ray.payoff.quality import ALL_WORKLOADS

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_SOURCES = {"none": "plain", "ngram": "cache", "suffix": "cache", "eagle3": "head"}


def terminal_advice(advice: Advice, page: Path | None = None) -> RenderableType:
    """Headline, table, cache, load, predictor, what to type and what it rests on.

    Args:
        advice: what was found.
        page: where its page was written.
    """
    from rich.console import Group
    from rich.text import Text

    lines = [*advice.verdict.lines, "", *_cache_lines(advice), *_predictor_lines(advice)]
    last = ["Rests on:", *(f"- {line}" for line in advice.rests_on), ""]
    last += advised_lines(advice.recommendation, page)
    parts: list[RenderableType] = [Text(line) for line in lines]
    parts.insert(len(advice.verdict.lines), _system_table(advice))
    if advice.load:
        parts.append(_load_table(advice))
    return Group(*parts, *(Text(line) for line in last))


def _system_table(advice: Advice) -> Table:
    at = f"at concurrency {advice.traffic['concurrency']}"
    if advice.verdict.is_upper_bound:
        at = "without a cost table: speed-ups at most"
    table = _table(f"Replayed {at} (* assumed)")
    table.add_column("workload", max_width=14, no_wrap=True, overflow="ellipsis")
    table.add_column("system", no_wrap=True)
    for name in ("/pass", "speed-up (95 %)", "cache", "head", "plain"):
        table.add_column(name, justify="right", no_wrap=True)
    for workload in advice.workloads if len(advice.workloads) > 2 else [ALL]:
        rows = [row for row in advice.rows if row.workload == workload and row.system != "greedy"]
        for index, row in enumerate(rows):
            table.add_row("" if index else _plain(workload), *_cells(row))
        table.add_section()
    return table


def _cells(row: Row) -> list[str]:
    routed = dict.fromkeys(("cache", "head", "plain"), 0.0)
    for source, share in row.source_share.items():
        routed[_SOURCES[source]] += share
    return [
        system_label(row),
        f"{row.emitted_per_pass:.2f}",
        interval(row.speedup, row.speedup_ci),
        *(f"{100 * share:.0f} %" if share else "" for share in routed.values()),
    ]


def _load_table(advice: Advice) -> Table:
    table = _table("Speed-up by requests at once (~ beyond the cost table)")
    table.add_column("system", no_wrap=True)
    loads = sorted({point.concurrency for point in advice.load})
    for load in loads:
        table.add_column(str(load), justify="right", no_wrap=True)
    for name in dict.fromkeys(point.system for point in advice.load):
        points = [point for point in advice.load if point.system == name]
        mark = " *" if points[0].is_assumed else ""
        cells = [f"{p.speedup:.2f}{'~' if p.is_beyond_table else ''}" for p in points]
        table.add_row(name + mark, *cells)
    return table


def _cache_lines(advice: Advice) -> list[str]:
    filling = advice.filling
    caps = ", ".join(
        f"{'none' if p.max_cached_tokens == 1 else f'{p.max_cached_tokens:,}'} "
        f"{p.emitted_per_pass:.2f}"
        for p in filling.caps
    )
    fills = ", ".join(f"{p.outputs_from}+ {p.emitted_per_pass:.2f}" for p in filling.fills)
    return [
        f"Cache (suffix, /pass) by output tokens held: {caps}",
        f"  from a cold start, by outputs held when a request began: {fills}",
        f"  {filling.in_words}",
    ]


def _predictor_lines(advice: Advice) -> list[str]:
    names = {"predictor": "Predictor", "chance": "Its chance of 6", "score": "Score rule"}
    overall = [row for row in advice.quality if row.workload == ALL_WORKLOADS]
    return [
        f"{names[row.judge]} at accepted >= 6: precision {figure(row.quality.precision)}, "
        f"recall {figure(row.quality.recall)}"
        for row in overall
    ]


def advised_lines(advised: Recommendation, page: Path | None) -> Sequence[str]:
    """What to type, and where the configuration for Ray Serve stands."""
    if advised.system is None:
        return [f"Advice: {advised.in_words}."]
    lines = [f"Advice: {advised.system}", advised.vllm_command]
    if advised.placeholders:
        lines.append(f"({', '.join(advised.placeholders)}: put in your own)")
    if PREDICTOR in advised.placeholders:
        lines.append("(the predictor learnt here is kept by --save-predictor DIR)")
    if advised.needs_calibration:
        lines.append("(hvd_cost on Ray Serve: type `hvd calibrate` on that machine first)")
    where = f"at the end of {page}" if page else "on the page that --out PAGE.html writes"
    return [*lines, f"(for Ray Serve: the YAML is {where})"]


def _plain(workload: str) -> str:
    return "all traffic" if workload == ALL else workload


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    return Table(
        title=Text(title),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
