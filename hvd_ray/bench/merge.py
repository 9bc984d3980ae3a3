"""Counts of one run, times of another: quality needs many prompts, times need a machine alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hvd_ray.bench.result import BenchResult, CacheState, Row
from hvd_ray.errors import UserError

TIMES = (
    *("tokens_per_second", "speedup_vs_greedy", "speedup_ci", "ci_unit", "ci_is_degenerate"),
    *("draft_ms_per_cycle", "verify_ms_per_cycle", "without_loops"),
)
"""Columns that a clock decides."""
OWN_TIMES = ("cycle_costs", "against")
"""The same of a suite's own part."""


def with_times_of(counted: BenchResult, timed: BenchResult) -> BenchResult:
    """The first result with the times of the second; a note says which prompts each has.

    Raises:
        UserError: the second lacks a row of the first, or was measured on something else.
    """
    for one, other in zip(_measured_on(counted), _measured_on(timed), strict=True):
        if one != other:
            raise UserError(f"--times: a result of {other}, where the others are of {one}")
    if not timed.is_timed:
        raise UserError("--times: that run was not timed either; run it without --untimed")
    costs = {k: timed.provenance[k] for k in ("costs", "slim") if k in timed.provenance}
    options = {**(counted.provenance.get("options") or {}), "is_timed": True}
    return replace(
        counted,
        provenance={**counted.provenance, **costs, "options": options},
        notes=(_words(counted, timed), *timed.notes),
        rows=_merged(counted.rows, timed.rows),
        aggregate=_merged(counted.aggregate, timed.aggregate),
    )


def _measured_on(result: BenchResult) -> tuple[str, ...]:
    """What times must share with the counts beside which they stand; of the number format, the
    note tells."""
    together = (result.provenance.get("options") or {}).get("concurrency", 1)
    model = (result.provenance.get("config") or {}).get("model")
    return str(model), f"the {result.rows[0].engine} engine", f"{together} requests at once"


def own_with_times_of(own: Mapping[str, Any], timed: Mapping[str, Any] | None) -> dict[str, Any]:
    """A suite's own part with what the clock decides in it taken from another run, if it has it."""
    return {**own, **{name: (timed or {}).get(name, []) for name in OWN_TIMES}}


def _merged(counted: Sequence[Row], timed: Sequence[Row]) -> tuple[Row, ...]:
    known = {(row.workload, row.system, row.cache): row for row in timed}
    return tuple(_with_times(row, known) for row in counted)


def _with_times(row: Row, known: Mapping[tuple[str, str, CacheState], Row]) -> Row:
    found = known.get((row.workload, row.system, row.cache))
    if found is None:
        raise UserError(f"--times: holds no row of {row.system} on {row.workload}")
    times = {name: getattr(found, name) for name in TIMES}
    return replace(row, **times)


def _words(counted: BenchResult, timed: BenchResult) -> str:
    """How many prompts stand behind what."""
    few, many = (sum(row.prompts for row in r.rows[:1]) for r in (timed, counted))
    date, commit = (str(timed.provenance.get(k, ""))[:12] for k in ("created_at", "commit"))
    kinds = [" and ".join(sorted({row.dtype for row in r.rows})) for r in (timed, counted)]
    in_what, otherwise = (f" in {kind}" if kinds[0] != kinds[1] else "" for kind in kinds)
    return (
        f"Times are of a run alone{in_what} over the first {few} prompts of each workload "
        f"({date[:10]}, commit {commit}), everything else of {many}{otherwise}."
    )
