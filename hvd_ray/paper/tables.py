"""The suite's own tables, as headings, captions and cells; Markdown and the page share them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_ray.bench.report import across, arm_label, percent, speedup_cell
from hvd_ray.bench.result import ALL_WORKLOADS, BASELINE, BenchResult, Row
from hvd_ray.paper.beside import OURS, PAPERS_OWN, beside, cold, wins


@dataclass(frozen=True, slots=True)
class Table:
    """One table with what it says."""

    heading: str
    caption: str
    head: Sequence[str]
    body: Sequence[Sequence[str]]


def paper_tables(result: BenchResult, own: Mapping[str, Any]) -> list[Table]:
    """Those that this run has figures for; of a run that was not timed, what it has counted."""
    return [
        *_compared(result, own),
        *(_against(own) if result.is_timed else ()),
        *_routed(result),
        *_cold_and_warm(result),
        *(_cycle_costs(own) if result.is_timed else ()),
        *_lengths(own),
        *_predicted(own),
        *_replayed(own),
    ]


def readme_tables(result: BenchResult, own: Mapping[str, Any]) -> list[Table]:
    """Few enough for a README: speed-ups with a cold cache, wins, the papers' figures beside."""
    return [*([_speedups(result)] if result.is_timed else []), *_compared(result, own)]


def _speedups(result: BenchResult) -> Table:
    rows = [row for row in cold([*result.rows, *result.aggregate]) if row.system != BASELINE]
    columns = across(row.system for row in rows)
    cells = {(row.workload, row.system): speedup_cell(row) for row in rows}
    return Table(
        "Speed-up by workload",
        "Tokens per second over greedy's, cold cache, 95 % intervals where there are three "
        "prompts or sessions.",
        ["workload", *columns],
        [
            [workload, *(cells.get((workload, system), "-") for system in columns)]
            for workload in dict.fromkeys(row.workload for row in rows)
        ],
    )


def _routed(result: BenchResult) -> Iterator[Table]:
    """Cycles and where they were routed: over all workloads, and of ours by workload."""
    chosen = [
        *result.aggregate,
        *(row for row in cold(result.rows) if row.system in (OURS, PAPERS_OWN)),
    ]
    sources = sorted({source for row in chosen for source in row.source_share})
    yield Table(
        "Cycles and routes",
        "Cycles for 1,000 tokens, and the share of the cycles that verified a draft of each "
        "source; none: plain steps.",
        ["system", "workload", "cycles per 1,000", "emitted per pass", *sources],
        [
            [arm_label(row), row.workload]
            + [f"{row.cycles_per_1k_tokens:.0f}", f"{row.emitted_per_pass:.2f}"]
            + [percent(row.source_share.get(source, 0.0)) for source in sources]
            for row in chosen
        ],
    )


def _cold_and_warm(result: BenchResult) -> Iterator[Table]:
    """Systems that were measured in both states of the cache."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in [*result.aggregate, *result.rows]:
        found.setdefault((row.system, row.workload), {})[row.cache] = row
    both = [(key, pair) for key, pair in found.items() if {"cold", "warm"} <= set(pair)]
    if both:
        clocked = ("cold", "warm") if result.is_timed else ()
        yield Table(
            "Cold and warm caches",
            "Warm: before it began, the cache had seen the target's outputs for train prompts of "
            f"the workload. By system, '{ALL_WORKLOADS}' first.",
            ["system", "workload", *clocked, "cold /pass", "warm /pass"],
            [
                [system, workload, *(speedup_cell(pair[c]) for c in clocked)]
                + [f"{pair[c].emitted_per_pass:.2f}" for c in ("cold", "warm")]
                for (system, workload), pair in both
            ],
        )


def _compared(result: BenchResult, own: Mapping[str, Any]) -> Iterator[Table]:
    rows = beside(result, own)
    left_out = "" if result.is_timed else " This run was not timed: figures of speed are left out."
    yield Table(
        "Beside the papers",
        "Theirs are of other models on an H100 and stand here for orientation: [A] abstract, "
        f"[N] notes on the full text, unchecked.{left_out}",
        ["figure", "theirs", "ours", "from"],
        [[r.published.words, f"{r.published.value} {r.published.tag}", r.ours, r.published.paper]
         for r in rows],
    )  # fmt: skip
    for system in (OURS, PAPERS_OWN) if result.is_timed else ():
        won = wins(result, system)
        if won:
            yield Table(
                f"Workloads on which {system} is faster",
                "By tokens per second, cold cache; without regard to intervals.",
                ["than", "faster on", "of"],
                [[rival, str(faster), str(total)] for rival, faster, total in won],
            )


def _against(own: Mapping[str, Any]) -> Iterator[Table]:
    rows = own.get("against")
    if not rows:
        return
    rivals = list(dict.fromkeys(row["rival"] for row in rows))
    cells = {(row["workload"], row["rival"]): _ratio(row) for row in rows}
    yield Table(
        f"{OURS} against each other system",
        "Tokens per second over the other's, with the 95 % interval; cold cache. Above 1 it is "
        "faster. all: geometric mean.",
        ["workload", *rivals],
        [
            [workload, *(cells[workload, rival] for rival in rivals)]
            for workload in dict.fromkeys(row["workload"] for row in rows)
        ],
    )


def _ratio(row: Mapping[str, Any]) -> str:
    if row["is_degenerate"]:
        return f"{row['ratio']:.2f} (few)"
    return f"{row['ratio']:.2f} ({row['low']:.2f}-{row['high']:.2f})"


def _cycle_costs(own: Mapping[str, Any]) -> Iterator[Table]:
    if own["cycle_costs"]:  # vLLM does not tell them
        yield Table(
            "What a cycle costs",
            "Means in milliseconds, without the first cycle of a request, which also reads the "
            "prompt. Drafting holds look-up, decision and the drafter's own passes.",
            ["system", "cache", "cycles", "drafting", "target pass", "cycle"],
            [
                [c["system"], c["cache"], f"{c['cycles']:,}"]
                + [f"{c[name]:.2f}" for name in ("draft_ms", "verify_ms", "total_ms")]
                for c in own["cycle_costs"]
            ],
        )


def _lengths(own: Mapping[str, Any]) -> Iterator[Table]:
    classes = own["length_classes"]
    yield Table(
        "How long drafts were accepted",
        "Verified drafts of the cache by accepted length, in percent; high: 6 or more.",
        ["system", "cache", "workload", "drafts", "high", *classes],
        [
            [p["system"], p["cache"], p["workload"], f"{p['drafts']:,}", percent(p["high_share"])]
            + [f"{100 * count / p['drafts']:.0f}" for count in p["counts"]]
            for p in own["payoffs"]
        ],
    )
    yield Table(
        "How long drafts were, by source",
        "Number of drafts of each length.",
        ["system and cache", "source", *classes],
        [
            [arm, source, *(f"{count:,}" for count in counts)]
            for arm, sources in own["draft_lengths"].items()
            for source, counts in sources.items()
        ],
    )


def _predicted(own: Mapping[str, Any]) -> Iterator[Table]:
    if not own.get("predictor"):
        return
    yield Table(
        "The payoff predictor",
        "Accepted length of 6 or more, on every position of plain decoding's outputs with a draft.",
        ["workload", "judge", "positions", ">= 6", "precision", "recall", "AP", "calibration"],
        [
            [row["workload"], row["judge"], f"{row['num_positions']:,}", percent(row["base_rate"])]
            + [_figure(row[k]) for k in ("precision", "recall", "average_precision")]
            + [_figure(row["calibration_error"])]
            for row in own["predictor"]
        ],
    )
    yield Table(
        "Reliability",
        "Positions in classes of as many each, by expected accepted length.",
        ["class", "expected", "accepted", ">= 6"],
        [
            [
                str(index + 1),
                f"{p['expected']:.2f}",
                f"{p['accepted']:.2f}",
                percent(p["high_share"]),
            ]
            for index, p in enumerate(own["reliability"])
        ],
    )


def _replayed(own: Mapping[str, Any]) -> Iterator[Table]:
    if own.get("taus"):
        unit = "speed-up" if own["costs_are_measured"] else "passes saved"
        prices = " at the costs of the measured table" if own["costs_are_measured"] else ""
        yield Table(
            "Speed against tau",
            f"hvd_tau without a head, replayed{prices}; {unit} over plain decoding.",
            ["tau", "emitted per pass", unit, "precision", "recall", "from the cache"],
            [
                [
                    f"{p['tau']:g}",
                    f"{p['emitted_per_pass']:.2f}",
                    f"{p['speedup']:.2f}",
                    _figure(p["precision"]),
                    _figure(p["recall"]),
                    percent(p["source_share"].get("suffix", 0.0)),
                ]
                for p in own["taus"]
            ],
        )
    if own.get("filling"):
        yield Table(
            "Growth with the cache",
            "suffix, replayed: emitted per pass by the output tokens that the cache may hold.",
            ["output tokens", "emitted per pass"],
            [
                [
                    "none" if p["max_cached_tokens"] == 1 else f"{p['max_cached_tokens']:,}",
                    f"{p['emitted_per_pass']:.2f}",
                ]
                for p in own["filling"]["caps"]
            ],
        )


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
