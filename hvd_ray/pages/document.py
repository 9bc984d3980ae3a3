"""The frame of a page: style, sections, tiles and tables. All text is escaped here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, slots=True)
class Markup:
    """HTML that is finished; everything else is text and is escaped."""

    html: str


def document(title: str, *sections: Markup, lead: str = "") -> str:
    """The page as one HTML document: no file, font or script from anywhere else."""
    first = f"<p class=lead>{escape(lead)}</p>" if lead else ""
    body = "".join(part.html for part in sections)
    return _DOCUMENT.format(title=escape(title), style=_STYLE, body=first + body)


def section(heading: str, *parts: Markup, caption: str = "") -> Markup:
    words = f"<p>{_words(caption)}</p>" if caption else ""
    inside = "".join(part.html for part in parts)
    return Markup(f"<section><h2>{escape(heading)}</h2>{words}{inside}</section>")


def tiles(figures: Sequence[tuple[str, str]]) -> Markup:
    """Boxes of a figure and what it is."""
    boxes = "".join(
        f"<div class=tile><b>{escape(figure)}</b><span>{escape(words)}</span></div>"
        for figure, words in figures
    )
    return Markup(f"<div class=tiles>{boxes}</div>")


def table(head: Sequence[str], body: Sequence[Sequence[str]], *, marked: str = "") -> Markup:
    """A table; the first column is words, the others are figures.

    Where there are many columns, an interval stands in small type below its figure.

    Args:
        head: names of the columns.
        body: rows of as many cells.
        marked: rows that begin with it stand out.
    """
    is_wide = len(head) >= WIDE
    headings = "".join(_cell("th", name, index) for index, name in enumerate(head))
    lines = []
    for row in body:
        kind = " class=best" if marked and row[0] == marked else ""
        cells = "".join(_cell("td", w, index, is_wide=is_wide) for index, w in enumerate(row))
        lines.append(f"<tr{kind}>{cells}</tr>")
    inside = f"<thead><tr>{headings}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return Markup(f"<div class=scroll><table>{inside}</table></div>")


def bullets(lines: Sequence[str]) -> Markup:
    return Markup("<ul>" + "".join(f"<li>{_words(line)}</li>" for line in lines) + "</ul>")


def paragraph(words: str) -> Markup:
    return Markup(f"<p>{_words(words)}</p>")


def code(text: str) -> Markup:
    return Markup(f"<pre>{escape(text)}</pre>")


def side_by_side(*parts: Markup) -> Markup:
    return Markup(f"<div class=panels>{''.join(part.html for part in parts)}</div>")


def _words(text: str) -> str:
    """Escaped; what stands between backticks, as the same line has it in a terminal, is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


WIDE = 7
"""Columns from which on a table takes little room for each."""
_INTERVAL = re.compile(r"([\d.]+) (\([^)]*\))")


def _cell(tag: str, words: str, index: int, *, is_wide: bool = False) -> str:
    kind = " class=num" if index else ""
    inside = escape(words)
    if tag == "th":  # a long name may break where its parts meet
        inside = inside.replace("_", "_<wbr>")
    elif is_wide and (found := _INTERVAL.fullmatch(words)):
        inside = f"{found[1]}<small> {escape(found[2])}</small>"
    return f"<{tag}{kind}>{inside}</{tag}>"


_DOCUMENT = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1f2933; --muted: #616e7c; --grid: #d9e2ec;
  --best: #fff4ec; --box: #f5f7fa; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14181d; --ink: #e4e7eb; --muted: #9aa5b1; --grid: #323f4b; --best: #3a2718;
    --box: #1f262d; } }
body { font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; color: var(--ink);
  max-width: 1080px; margin: 28px auto; padding: 0 24px; background: var(--page); }
h1 { font-size: 26px; margin: 0 0 12px; } h2 { font-size: 19px; margin: 34px 0 4px; }
p, li { max-width: 84ch; } p { margin: 4px 0 12px; }
.lead { font-size: 18px; font-weight: 600; }
svg { display: block; max-width: 100%; height: auto; font-family: inherit; }
svg text { font-family: system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
.panels { display: flex; flex-wrap: wrap; gap: 12px 28px; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 12px 0; }
.tile { border: 1px solid var(--grid); border-radius: 8px; padding: 10px 14px; min-width: 130px; }
.tile b { display: block; font-size: 19px; } .tile span { color: var(--muted); font-size: 13px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; margin: 8px 0 14px; }
th { text-align: left; border-bottom: 2px solid var(--muted); padding: 4px 10px 4px 0; }
td { border-bottom: 1px solid var(--grid); padding: 3px 10px 3px 0; white-space: nowrap; }
td.num, th.num { text-align: right; font-variant-numeric: tabular-nums; }
td small { display: block; font-size: 10.5px; line-height: 1.1; color: var(--muted); }
th { vertical-align: bottom; }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--page); }
tr.best td, tr.best td:first-child { font-weight: 600; background: var(--best); }
code { background: var(--box); border-radius: 4px; padding: 1px 4px; font-size: 0.9em; }
pre { background: var(--box); border: 1px solid var(--grid); border-radius: 6px; padding: 10px 12px;
  overflow-x: auto; font-size: 12.5px; white-space: pre-wrap; overflow-wrap: anywhere; }
@media print {
  :root { color-scheme: light; --page: #fff; --ink: #1f2933; --muted: #616e7c; --grid: #d9e2ec;
    --best: #fff4ec; --box: #f5f7fa; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  @page { size: A4; margin: 12mm; }
  body { margin: 0; padding: 0; font-size: 11px; max-width: none; }
  svg, tr, pre, .tile { break-inside: avoid; } h2, p { break-after: avoid; }
  table { font-size: 9.5px; } td small { font-size: 7.5px; } .scroll { overflow: visible; }
  th, td { padding-right: 6px; } th:first-child, td:first-child { position: static; }
}
"""
