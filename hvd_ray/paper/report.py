"""The suite's report: Markdown, and one page with the papers' figures drawn for this model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvd_ray.bench.page import result_sections
from hvd_ray.bench.report import markdown_report, markdown_table, result_ending, title
from hvd_ray.bench.result import BenchResult
from hvd_ray.home import atomic_path
from hvd_ray.pages.document import Markup, document, section, table
from hvd_ray.paper.plots import PLOTS
from hvd_ray.paper.tables import Table, paper_tables, readme_tables

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


def paper_part(result: BenchResult, own: Mapping[str, Any]) -> str:
    """What of it stands in the README: the comparison, wins, and the papers' figures beside."""
    parts = [f"### {title(result)}"]
    for item in readme_tables(result, own):
        parts += [f"{item.heading}. {item.caption}", markdown_table(item.head, item.body)]
    return "\n\n".join([*parts, *result_ending(result)]) + "\n"


def paper_page(result: BenchResult, own: Mapping[str, Any]) -> str:
    """One HTML document that needs nothing else."""
    parts = [*result_sections(result), *paper_sections(result, own)]
    return document(f"The papers' comparison: {title(result)}", *parts)


def paper_sections(result: BenchResult, own: Mapping[str, Any]) -> list[Markup]:
    """The suite's own tables with their figures."""
    return [_section(item, own) for item in paper_tables(result, own)]


def _section(item: Table, own: Mapping[str, Any]) -> Markup:
    drawn = PLOTS.get(item.heading)
    figure = [drawn(own)] if drawn is not None else []
    return section(item.heading, *figure, table(item.head, item.body), caption=item.caption)
