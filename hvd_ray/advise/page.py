"""An advice as one page: what to expect, why, and what to type."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hvd_ray.advise.judging import ALL, Row
from hvd_ray.advise.plots import all_plots, route_plot, speedup_plot
from hvd_ray.advise.result import Advice
from hvd_ray.home import atomic_path
from hvd_ray.pages.document import (
    Markup,
    bullets,
    code,
    document,
    paragraph,
    section,
    side_by_side,
    table,
    tiles,
)
from hvd_ray.payoff.quality import QualityRow

ASSUMED_MARK = " *"
"""Behind the name of a system whose figures rest on something assumed."""


def write_page(path: Path, advice: Advice) -> None:
    """Draw the advice to `path`, whole or not at all."""
    with atomic_path(path) as draft:
        draft.write_text(page(advice), encoding="utf-8")


def page(advice: Advice) -> str:
    """The advice as one HTML document."""
    lines = advice.verdict.lines
    parts = [
        tiles(_tiles(advice)),
        bullets(lines[1:]) if len(lines) > 1 else Markup(""),
        section(
            "Speed-up by system",
            speedup_plot(advice),
            *_tables(advice),
            caption=f"{_measure(advice)}, replayed on the judged sessions, with 95 % intervals by "
            "bootstrap over sessions. Hollow marks and an asterisk: something is assumed. The "
            "oracle is the upper bound for any policy over the same drafts.",
        ),
        section("Where the steps go", route_plot(advice)),
        section("History, threshold and load", side_by_side(*all_plots(advice)), _filling(advice)),
        _predictor(advice.quality),
        _recommended(advice),
        section("What this rests on", bullets(advice.rests_on), _provenance(advice)),
    ]
    return document("Would speculative decoding help this traffic?", *parts, lead=lines[0])


def _measure(advice: Advice) -> str:
    if advice.verdict.is_upper_bound:
        return "Passes of plain decoding over each system's (no cost table: speed-ups at most)"
    return "Tokens a second over plain decoding's"


def system_label(row: Row) -> str:
    return row.system + (ASSUMED_MARK if row.is_assumed else "")


def interval(value: float, bounds: tuple[float, float] | None) -> str:
    """`1.52 (1.31-1.77)`, or the value alone where no interval can be given."""
    if bounds is None:
        return f"{value:.2f} (few)"
    return f"{value:.2f} ({bounds[0]:.2f}-{bounds[1]:.2f})"


def shares(row: Row) -> str:
    """`suffix 31 %, none 69 %`."""
    ordered = sorted(row.source_share.items(), key=lambda item: -item[1])
    return ", ".join(f"{source} {100 * share:.0f} %" for source, share in ordered)


def _tiles(advice: Advice) -> list[tuple[str, str]]:
    facts, overall = advice.traffic, advice.verdict.overall
    advised = advice.row(ALL, overall.system)
    bound = ": passes saved, faster by that at most" if advice.verdict.is_upper_bound else ""
    return [
        (overall.in_words, f"{overall.system}, the best that can be turned on{bound}"),
        (f"{advised.emitted_per_pass:.2f}", "tokens a target pass under it"),
        (f"{advice.row(ALL, 'oracle').speedup:.2f}x", "oracle without a head: the upper bound"),
        (f"{facts['traces']:,}", f"answers in {facts['sessions']:,} sessions"),
        (f"{facts['output_tokens']:,}", "output tokens in the log"),
    ]


def _tables(advice: Advice) -> list[Markup]:
    head = ["system", "emitted per pass", "speed-up", "accepted / drafted", "share of passes"]
    found = []
    for workload in advice.workloads if len(advice.workloads) > 2 else [ALL]:
        rows = [row for row in advice.rows if row.workload == workload]
        about = f"{rows[0].sessions} sessions, {rows[0].traces} answers, {rows[0].tokens:,} tokens"
        name = "all traffic" if workload == ALL else workload
        body = [
            [
                system_label(row),
                interval(row.emitted_per_pass, row.emitted_per_pass_ci),
                interval(row.speedup, row.speedup_ci),
                f"{row.accepted:,} / {row.drafted:,}",
                shares(row),
            ]
            for row in rows
        ]
        advised = advice.row(workload, advice.verdict.overall.system)
        found.append(paragraph(f"{name}: {about}"))
        found.append(table(head, body, marked=system_label(advised)))
    return found


def _filling(advice: Advice) -> Markup:
    return paragraph(
        f"Output tokens that the cache holds, and tokens a pass: {advice.filling.in_words}."
    )


def _predictor(rows: Sequence[QualityRow]) -> Markup:
    if not rows:
        return Markup("")
    head = ["workload", "judge", "positions", ">= 6", "precision", "recall", "average precision"]
    body = [
        [
            r.workload,
            r.judge,
            f"{r.quality.num_positions:,}",
            f"{100 * r.quality.base_rate:.1f} %",
            *(figure(f) for f in (r.quality.precision, r.quality.recall)),
            figure(r.quality.average_precision),
        ]
        for r in rows
    ]
    caption = (
        "Accepted length of 6 or more, called by an estimate above "
        f"{rows[0].quality.tau:g}; held-out sessions, every position with a draft."
    )
    return section("The payoff predictor on this traffic", table(head, body), caption=caption)


def figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _recommended(advice: Advice) -> Markup:
    advised = advice.recommendation
    if not advised.is_known:
        return section("Recommended configuration", caption=f"{advised.in_words}.".capitalize())
    words = "Turn nothing on." if advised.system is None else f"Turn on {advised.system}."
    if advised.placeholders:
        words += f" Put your own in place of {', '.join(advised.placeholders)}."
    if advised.needs_calibration:
        words += " On Ray Serve type `hvd calibrate` on that machine first."
    return section(
        "Recommended configuration",
        paragraph("vLLM:"),
        code(advised.vllm_command),
        paragraph("Ray Serve:"),
        code(advised.serve_yaml),
        caption=words,
    )


def _provenance(advice: Advice) -> Markup:
    about = advice.provenance
    changes = "+changes" if about.get("is_dirty") else ""
    commit = f"{str(about.get('commit'))[:12]}{changes}"
    facts = [about.get("command"), f"commit {commit}", str(about.get("created_at"))[:19]]
    return paragraph("; ".join(str(fact) for fact in facts if fact))
