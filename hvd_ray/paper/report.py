"""The suite's report: Markdown, and one page with the papers' figures drawn for this model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvd_ray.bench.page import result_sections
from hvd_ray.bench.report import markdown_report, markdown_table, title
from hvd_ray.bench.result import BenchResult
from hvd_ray.home import atomic_path
from hvd_ray.pages.document import Markup, document, section, table
from hvd_ray.pages.plots import inline_svg, legend, new_figure
from hvd_ray.pages.plots import title as axes_title
from hvd_ray.paper.tables import Table, paper_tables

MARKDOWN, PAGE = "paper.md", "paper.html"


def write_paper(out: Path, result: BenchResult, own: Mapping[str, Any]) -> list[Path]:
    """Write `paper.md` and `paper.html` into a folder; the paths written.

    Raises:
        UserError: the folder cannot be written.
    """
    texts = {MARKDOWN: paper_markdown(result, own), PAGE: paper_page(result, own)}
    for name, text in texts.items():
        with atomic_path(out / name) as draft:
            draft.write_text(text, encoding="utf-8")
    return [out / name for name in texts]


def paper_markdown(result: BenchResult, own: Mapping[str, Any]) -> str:
    """The bench's tables, then the suite's own."""
    parts = ["# The papers' comparison", markdown_report([result]).rstrip()]
    return "\n\n".join([*parts, own_markdown(result, own)]) + "\n"


def own_markdown(result: BenchResult, own: Mapping[str, Any], *, heading: str = "##") -> str:
    """The suite's own tables."""
    parts = []
    for item in paper_tables(result, own):
        parts += [f"{heading} {item.heading}", item.caption, markdown_table(item.head, item.body)]
    return "\n\n".join(parts)


def paper_page(result: BenchResult, own: Mapping[str, Any]) -> str:
    """One HTML document that needs nothing else."""
    parts = [*result_sections(result), *paper_sections(result, own)]
    return document(f"The papers' comparison: {title(result)}", *parts)


def paper_sections(result: BenchResult, own: Mapping[str, Any]) -> list[Markup]:
    """The suite's own tables with their figures."""
    return [_section(item, own) for item in paper_tables(result, own)]


def _section(item: Table, own: Mapping[str, Any]) -> Markup:
    drawn = {
        "What a cycle costs": _cost_plot,
        "Speed against tau": _tau_plot,
        "Growth with the cache": _growth_plot,
        "Reliability": _reliability_plot,
    }.get(item.heading)
    figure = [drawn(own)] if drawn is not None else []
    return section(item.heading, *figure, table(item.head, item.body), caption=item.caption)


def _cost_plot(own: Mapping[str, Any]) -> Markup:
    costs = own["cycle_costs"]
    names = [f"{cost['system']} {cost['cache']}".removesuffix(" none") for cost in costs]
    figure, (ax,) = new_figure(7.5, 0.9 + 0.28 * len(costs))
    places = range(len(costs) - 1, -1, -1)
    verify, draft = ([cost[key] for cost in costs] for key in ("verify_ms", "draft_ms"))
    ax.barh(places, verify, color="#0b7fc2", label="target pass")
    ax.barh(places, draft, left=verify, color="#d9650f", label="drafting")
    ax.set_yticks(places, names)
    ax.set_xlabel("milliseconds a cycle")
    legend(ax, columns=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return inline_svg(figure, "What a cycle costs, by system")


def _tau_plot(own: Mapping[str, Any]) -> Markup:
    points = own["taus"]
    figure, (ax,) = new_figure(6.0, 3.2)
    taus = [point["tau"] for point in points]
    for name in points[0]["workloads"]:
        ax.plot(taus, [p["workloads"][name] for p in points], color="#8a8f98", linewidth=0.9)
    ax.plot(taus, [p["speedup"] for p in points], "o-", color="#0b7fc2", label="all workloads")
    ax.set_xlabel("tau, tokens")
    ax.set_ylabel("speed-up")
    legend(ax)
    axes_title(ax, "hvd_tau, replayed; grey: each workload")
    return inline_svg(figure, "Speed against tau")


def _growth_plot(own: Mapping[str, Any]) -> Markup:
    points = own["filling"]["caps"]
    figure, (ax,) = new_figure(5.0, 3.0)
    ax.plot(range(len(points)), [p["emitted_per_pass"] for p in points], "o-", color="#0b7fc2")
    names = ["none", *(f"{p['max_cached_tokens']:,}" for p in points[1:])]
    ax.set_xticks(range(len(points)), names)
    ax.set_xlabel("output tokens the cache may hold")
    ax.set_ylabel("emitted per pass")
    return inline_svg(figure, "Emitted per pass against the size of the cache")


def _reliability_plot(own: Mapping[str, Any]) -> Markup:
    points = own["reliability"]
    figure, (ax,) = new_figure(4.0, 3.6)
    expected, accepted = ([p[key] for p in points] for key in ("expected", "accepted"))
    top = max(*expected, *accepted)
    ax.plot([0, top], [0, top], color="#8a8f98", linewidth=1)
    ax.plot(expected, accepted, "o-", color="#0b7fc2")
    ax.set_xlabel("expected accepted length")
    ax.set_ylabel("true accepted length")
    return inline_svg(figure, "Expected against true accepted length")
