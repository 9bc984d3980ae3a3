"""One table for systems with a slim model: what they cost, how often they ask, what they lose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvd_ray.bench.result import BASELINE, BenchResult, Row
from hvd_ray.config import split_system
from hvd_ray.verify.break_even import BLOCK_ROWS

HEADINGS = (
    *("workload", "system", "escalated", "full/token", "slim/token", "unchecked"),
    *("speed-up", "agreement", "quality"),
)


def has_tiers(result: BenchResult) -> bool:
    return any(split_system(row.system)[1] != "full" for row in result.rows)


def tier_rows(result: BenchResult) -> list[list[str]]:
    """The table's cells, greedy's quality on top of each workload."""
    rows = [*result.rows, *result.aggregate]
    return [_cells(row) for row in rows]


def _cells(row: Row) -> list[str]:
    is_baseline = row.system == BASELINE
    low, high = row.speedup_ci
    interval = "(few)" if row.ci_is_degenerate else f"({low:.2f}-{high:.2f})"
    return [
        row.workload,
        row.system,
        _percent(row.escalated_share),
        _number(row.full_passes_per_token),
        _number(row.slim_passes_per_token) if row.slim_passes_per_token else "-",
        _percent(row.unchecked_share or None),
        f"{row.speedup_vs_greedy:.2f}"
        if is_baseline
        else f"{row.speedup_vs_greedy:.2f} {interval}",
        _percent(row.agreement_with_greedy),
        "-" if row.quality is None else f"{row.quality:.2f} {row.quality_metric}",
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def cost_line(provenance: Mapping[str, Any]) -> str:
    """What a slim pass costs here, where it was measured."""
    costs, slim = provenance.get("costs") or {}, provenance.get("slim") or {}
    if not slim:
        return "The slim model is not named in this result."
    figures = slim.get("figures", {})
    skipped = f"{100 * figures.get('skip_ratio', 0):.0f} % of the sublayers skipped"
    line = f"Slim model: {skipped}, found by {slim.get('method')}"
    ratio = _cost_ratio(costs)
    if ratio is None:
        return f"{line}; what its pass costs was not measured (`hvd calibrate`)."
    return f"{line}; its pass over {BLOCK_ROWS} rows costs {ratio:.2f} of the target's."


def _cost_ratio(costs: Mapping[str, Any]) -> float | None:
    rows: Sequence[int] = costs.get("rows") or ()
    if not costs.get("slim_ms") or BLOCK_ROWS not in rows:
        return None
    at = list(rows).index(BLOCK_ROWS)
    return float(costs["slim_ms"][at] / costs["verify_ms"][at])
