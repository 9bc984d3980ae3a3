"""Our figures beside the papers': the same quantity, on this model and these workloads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_ray.bench.result import BASELINE, BenchResult, Row
from hvd_ray.paper.published import PUBLISHED, Published

OURS = "hvd_cost"
PAPERS_OWN = "hvd_tau"
"""The paper's own rule: a fixed threshold."""
AGENTIC = "agentic"
BY_THE_CLOCK = frozenset(
    {
        *("speedup", "over_suffix", "over_eagle3", "speedup_suffix", "wins_greedy", "wins_suffix"),
        *("cycle_ms_hybrid", "cycle_ms_cache", "cycle_ms_rule"),
    }
)
"""Published figures beside which ours stand only where the run was timed."""


@dataclass(frozen=True, slots=True)
class Beside:
    """A figure of a paper and ours, or why there is none."""

    published: Published
    ours: str


def beside(result: BenchResult, own: Mapping[str, Any]) -> list[Beside]:
    """Every published figure with what this run says of it; no speed where it was not timed."""
    ours = _ours(result, own)
    shown = [item for item in PUBLISHED if result.is_timed or item.key not in BY_THE_CLOCK]
    return [Beside(item, ours.get(item.key, "not measured")) for item in shown]


def wins(result: BenchResult, system: str) -> list[tuple[str, int, int]]:
    """`(rival, workloads on which the system is faster, workloads)` for each other arm."""
    mine = _by_workload(result, system)
    found = []
    for rival in dict.fromkeys(row.system for row in result.rows if row.system != system):
        theirs = _by_workload(result, rival)
        both = [name for name in mine if name in theirs]
        faster = sum(mine[n].tokens_per_second > theirs[n].tokens_per_second for n in both)
        if both:
            found.append((rival, faster, len(both)))
    return found


def ratio(
    result: BenchResult, system: str, rival: str, *, family: str | None = None
) -> float | None:
    """Geometric mean over workloads of the system's tokens per second over the rival's."""
    mine, theirs = _by_workload(result, system), _by_workload(result, rival)
    both = [n for n in mine if n in theirs and family in (None, mine[n].family)]
    if not both:
        return None
    logs = [math.log(mine[n].tokens_per_second / theirs[n].tokens_per_second) for n in both]
    return math.exp(sum(logs) / len(logs))


def cold(rows: Sequence[Row]) -> list[Row]:
    """Without the warm ones: what the papers measure."""
    return [row for row in rows if row.cache != "warm"]


def _by_workload(result: BenchResult, system: str) -> dict[str, Row]:
    return {row.workload: row for row in cold(result.rows) if row.system == system}


def _ours(result: BenchResult, own: Mapping[str, Any]) -> dict[str, str]:
    figures = {
        "speedup": ratio(result, OURS, BASELINE),
        "over_suffix": ratio(result, OURS, "suffix"),
        "over_eagle3": ratio(result, OURS, "eagle3", family=AGENTIC),
        "speedup_suffix": ratio(result, "suffix", "eagle3", family=AGENTIC),
    }
    found = {key: f"{value:.2f}x" for key, value in figures.items() if value is not None}
    won = {rival: f"{faster} of {all_}" for rival, faster, all_ in wins(result, OURS)}
    found |= {f"wins_{name}": won[name] for name in (BASELINE, "suffix") if name in won}
    rows = {row.system: row for row in cold(result.aggregate)}
    for key, system in (("cycles_eagle3", "eagle3"), ("cycles_hybrid", OURS)):
        if system in rows:
            found[key] = f"{rows[system].cycles_per_1k_tokens:.0f} ({system})"
    costs = {c["system"]: c["total_ms"] for c in own.get("cycle_costs", ()) if c["cache"] != "warm"}
    for key, system in (
        ("cycle_ms_hybrid", OURS),
        ("cycle_ms_cache", "suffix"),
        ("cycle_ms_rule", "rule_score"),
    ):
        if system in costs:
            found[key] = f"{costs[system]:.1f} ms ({system})"
    for row in own.get("predictor", ()):
        if (row["workload"], row["judge"]) == ("all", "predictor"):
            found |= {k: f"{row[k]:.3f}" for k in ("precision", "recall") if row[k] is not None}
    if own.get("taus"):
        best = max(own["taus"], key=lambda point: float(point["speedup"]))
        found["tau"] = f"{best['tau']:g} is the fastest in replay"
    drafted = rows.get("suffix")
    if drafted is not None and drafted.mean_accepted_drafted_only is not None:
        found["accepted_suffix"] = f"{drafted.mean_accepted_drafted_only:.2f}"
    return found
