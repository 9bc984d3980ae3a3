"""Figures of a page: matplotlib's SVG, inline, in the colours of the page's own light or dark.

Ink, grid and muted words are drawn in colours of no other use and then become the page's variables,
so one drawing serves the light page, the dark one and paper.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from io import StringIO
from typing import TYPE_CHECKING

from hvd_ray.pages.document import Markup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#010203", "#010204", "#010205"
_VARIABLES = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)"}
SERIES = ("#0b7fc2", "#d9650f", "#0f9d74", "#b4589f", "#c99700", "#5b6ee1", "#8a8f98", "#c23b4b",
          "#2ab3c6", "#9a6a3a")  # fmt: skip
"""Told apart on white, on black and, by their order of lightness, mostly in grey."""
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "h")
"""As many as there are colours and one more, so that a pair of both comes back late."""
_HEADER = re.compile(r"^.*?(?=<svg)", re.S)
_METADATA = re.compile(r"<metadata>.*?</metadata>", re.S)


def new_figure(
    width: float, height: float, *, num_axes: int = 1, stacked: bool = False
) -> tuple[Figure, list[Axes]]:
    """A figure of so many inches with axes side by side or stacked, without pyplot's state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_alpha(0)
    rows, columns = (num_axes, 1) if stacked else (1, num_axes)
    axes = [figure.add_subplot(rows, columns, index + 1) for index in range(num_axes)]
    for ax in axes:
        _dress(ax)
    return figure, axes


def legend(ax: Axes, *, columns: int = 1, **where: object) -> None:
    """A legend in the page's ink, without a frame."""
    shown = ax.legend(ncols=columns, frameon=False, fontsize=9, labelcolor=INK, **where)
    shown.set_zorder(5)


def title(ax: Axes, words: str) -> None:
    ax.set_title(words, fontsize=10.5, color=INK, loc="left", fontweight="bold", parse_math=False)


def inline_svg(figure: Figure, label: str) -> Markup:
    """The figure as markup; `label` says what it shows to those who hear it."""
    from matplotlib import rc_context

    buffer = StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": label}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = _METADATA.sub("", _HEADER.sub("", buffer.getvalue()))
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    named = f'<svg role="img" aria-label="{escape(label, quote=True)}" '
    return Markup(text.replace("<svg ", named, 1))


def colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name, by its place."""
    return {name: SERIES[index % len(SERIES)] for index, name in enumerate(names)}


def marks(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """A colour and a shape for each name, by its place; no two alike."""
    shapes = {name: MARKS[index % len(MARKS)] for index, name in enumerate(names)}
    return {name: (colour, shapes[name]) for name, colour in colours(names).items()}


def _dress(ax: Axes) -> None:
    ax.patch.set_alpha(0)
    ax.tick_params(colors=MUTED, labelcolor=INK, labelsize=9)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(MUTED)
    ax.grid(color=GRID, linewidth=0.7)
    ax.set_axisbelow(True)
    for axis in (ax.xaxis, ax.yaxis):
        axis.label.set_color(INK)
        axis.label.set_fontsize(9.5)
