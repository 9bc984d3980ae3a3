"""One table for systems with a slim model: what they cost, how often they ask, what they lose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from textwrap import fill
from typing import Any

from hvd_ray.bench.result import BASELINE, BenchResult, Row
from hvd_ray.config import split_system
from hvd_ray.verify.break_even import BLOCK_ROWS

SUMMARY = (
    *("mode", "slim / full cost", "asks the target", "full / token", "slim / token"),
    *("unchecked", "speed-up (95 %)", "agreement"),
)
"""Columns of the one table; a column of quality for each task follows."""
HEADINGS = (
    *("workload", "system", "escalated", "full/token", "slim/token", "unchecked"),
    *("speed-up", "agreement", "quality"),
)


def has_tiers(result: BenchResult) -> bool:
    return any(split_system(row.system)[1] != "full" for row in result.rows)


def tier_rows(result: BenchResult) -> tuple[list[str], list[list[str]]]:
    """Head and cells, greedy's quality on top of each workload."""
    rows = [*result.rows, *result.aggregate]
    return _shown(HEADINGS, map(_cells, rows), is_timed=result.is_timed)


def _shown(
    head: Sequence[str], body: Iterable[Sequence[str]], *, is_timed: bool
) -> tuple[list[str], list[list[str]]]:
    """Without the column of speed-ups where none were timed."""
    kept = [at for at, name in enumerate(head) if is_timed or not name.startswith("speed-up")]
    return [head[at] for at in kept], [[cells[at] for at in kept] for cells in body]


def _cells(row: Row) -> list[str]:
    is_baseline = row.system == BASELINE
    low, high = row.speedup_ci
    interval = "(few)" if row.ci_is_degenerate else f"({low:.2f}-{high:.2f})"
    speed = f"{row.speedup_vs_greedy:.2f}" + ("" if is_baseline else f" {interval}")
    return [
        row.workload,
        row.system,
        _percent(row.escalated_share),
        _number(row.full_passes_per_token),
        _number(row.slim_passes_per_token) if row.slim_passes_per_token else "-",
        _percent(row.unchecked_share or None),
        speed,
        _percent(row.agreement_with_greedy),
        "-" if row.quality is None else f"{row.quality:.2f} {row.quality_metric}",
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def tier_summary(result: BenchResult) -> tuple[list[str], list[list[str]]]:
    """Head and cells of the one table: a row for each mode over all tasks, its quality on each.

    Figures are over all workloads; quality is by task, greedy's own in the first row.
    """
    scored = {row.workload: row.quality_metric for row in result.rows if row.quality_metric}
    head = [*SUMMARY, *(f"{workload}, {metric}" for workload, metric in scored.items())]
    quality = {(row.system, row.cache, row.workload): row.quality for row in result.rows}
    ratio = slim_cost_ratio(result.provenance)
    body = []
    for row in result.aggregate:
        cells = _summary_cells(row, ratio)
        scores = [quality.get((row.system, row.cache, workload)) for workload in scored]
        body.append([*cells, *map(_number, scores)])
    return _shown(head, body, is_timed=result.is_timed)


def tier_summary_text(result: BenchResult) -> str:
    """The one table for a terminal: a block of lines for each mode, within 80 columns."""
    head, body = tier_summary(result)
    blocks = []
    for mode, *cells in body:
        pairs = [f"{name} {cell}" for name, cell in zip(head[1:], cells, strict=True)]
        blocks.append(
            "\n".join([mode, *(f"  {pair}" for pair in pairs if not pair.endswith(" -"))])
        )
    words = [cost_line(result.provenance)] if has_tiers(result) else []
    return "\n".join([*blocks, *map(_wrapped, [*words, *result.notes])])


def _wrapped(line: str) -> str:
    return fill(line, width=80, break_long_words=False)


def _summary_cells(row: Row, cost_ratio: float | None) -> list[str]:
    is_tiered = split_system(row.system)[1] != "full"
    speed = f"{row.speedup_vs_greedy:.2f} ({row.speedup_ci[0]:.2f}-{row.speedup_ci[1]:.2f})"
    if row.system == BASELINE or row.ci_is_degenerate:
        speed = f"{row.speedup_vs_greedy:.2f}"
    return [
        row.system,
        _number(cost_ratio) if is_tiered else "-",
        _percent(row.escalated_share) if is_tiered else "-",
        _number(row.full_passes_per_token),
        _number(row.slim_passes_per_token) if is_tiered else "-",
        _percent(row.unchecked_share or None),
        speed,
        _percent(row.agreement_with_greedy),
    ]


def cost_line(provenance: Mapping[str, Any]) -> str:
    """What a slim pass costs here, where it was measured."""
    slim = provenance.get("slim") or {}
    if not slim:
        return "The slim model is not named in this result."
    figures = slim.get("figures", {})
    skipped = f"{100 * figures.get('skip_ratio', 0):.0f} % of the sublayers skipped"
    line = f"Slim model: {skipped}, found by {slim.get('method')}"
    ratio = slim_cost_ratio(provenance)
    if ratio is None:
        return f"{line}; what its pass costs was not measured (`hvd calibrate`)."
    return f"{line}; its pass over {BLOCK_ROWS} rows costs {ratio:.2f} of the target's."


def slim_cost_ratio(provenance: Mapping[str, Any]) -> float | None:
    """A slim pass over a block, in passes of the target; None where it was not measured."""
    costs = provenance.get("costs") or {}
    rows: Sequence[int] = costs.get("rows") or ()
    if not costs.get("slim_ms") or BLOCK_ROWS not in rows:
        return None
    at = list(rows).index(BLOCK_ROWS)
    return float(costs["slim_ms"][at] / costs["verify_ms"][at])
