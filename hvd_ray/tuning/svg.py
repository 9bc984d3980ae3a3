"""A little SVG: escaped elements, scales with round ticks, and one ramp of colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

INK, MUTED, GRID = "#1f2933", "#616e7c", "#d9e2ec"
ACCENT = "#c2410c"
"""The best trial."""
_RAMP = ((191, 211, 230), (107, 155, 201), (8, 48, 107))
"""From slow to fast; also told apart in grey."""


def element(name: str, *children: str, **attributes: object) -> str:
    """`<name key="value">children</name>`; `_` in keys becomes `-`, None is left out.

    Children are markup already; attributes are escaped here.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_plain(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{given}>{''.join(children)}</{name}>"


def text(x: float, y: float, words: str, *, anchor: str = "start", **attributes: object) -> str:
    """A line of text, escaped, legible over lines too."""
    fill = attributes.pop("fill", INK)
    halo = {"stroke": "#fff", "stroke_width": 3, "paint_order": "stroke"}
    return element(
        "text", escape(words), x=x, y=y, text_anchor=anchor, fill=fill, **halo, **attributes
    )


def line(x1: float, y1: float, x2: float, y2: float, **attributes: object) -> str:
    stroke = attributes.pop("stroke", GRID)
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=stroke, **attributes)


def path(points: Sequence[tuple[float, float]], *children: str, **attributes: object) -> str:
    """A polyline through points."""
    steps = " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return element("path", *children, d=f"M{steps}", fill="none", **attributes)


def svg(width: float, height: float, *children: str, label: str) -> str:
    """A figure that scales with the page; `label` is what it shows, for those who hear it."""
    box = f"0 0 {width:g} {height:g}"
    title = element("title", escape(label))
    return element("svg", title, *children, viewBox=box, width="100%", role="img", aria_label=label)


def ramp(share: float) -> str:
    """The colour at `share` of the way from slow (0) to fast (1)."""
    place = min(max(share, 0.0), 1.0) * (len(_RAMP) - 1)
    index = min(int(place), len(_RAMP) - 2)
    rest = place - index
    mixed = [round(a + (b - a) * rest) for a, b in zip(_RAMP[index], _RAMP[index + 1], strict=True)]
    return f"rgb({mixed[0]},{mixed[1]},{mixed[2]})"


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values to places, linear or by logarithm."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    @classmethod
    def over(
        cls, values: Sequence[float], *, start: float, end: float, is_log: bool = False
    ) -> Scale:
        """Just wide enough for the values; never of no width."""
        low, high = min(values), max(values)
        if low == high:
            spread = abs(low) * 0.05 or 1.0
            low, high = (low / 1.05, high * 1.05) if is_log else (low - spread, high + spread)
        return cls(low, high, start, end, is_log)

    def widened(self, share: float) -> Scale:
        """With room at both ends."""
        room = (self.high - self.low) * share
        return Scale(self.low - room, self.high + room, self.start, self.end, self.is_log)

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self, count: int = 4) -> list[float]:
        """About so many round values within the scale."""
        if self.is_log:
            return self._log_ticks()
        raw = (self.high - self.low) / count
        magnitude = 10.0 ** math.floor(math.log10(raw))
        step = next(f * magnitude for f in (1, 2, 2.5, 5, 10) if f * magnitude >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [round(i * step, 12) for i in range(first, last + 1)]

    def _log_ticks(self) -> list[float]:
        exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        tried = [factor * 10.0**e for e in exponents for factor in (1, 2, 5)]
        return [tick for tick in tried if self.low * 0.999 <= tick <= self.high * 1.001]


def short(value: float) -> str:
    """A figure in few characters: 12,300, 431, 43.1, 1.08, 0.00031."""
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 1 or value == 0 else f"{value:.3g}"


def tick_label(value: float) -> str:
    """A round value without zeros at its end."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def _plain(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
