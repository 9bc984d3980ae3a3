"""The figures of a sweep's page, as SVG: trials, tau against speed, the best against tau = 6."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from hvd_ray.tuning.contest import EVERYTHING
from hvd_ray.tuning.final import BEST, FIXED, PAPER_TAU
from hvd_ray.tuning.objective import SPEED
from hvd_ray.tuning.svg import (
    ACCENT,
    INK,
    MUTED,
    Scale,
    element,
    line,
    path,
    ramp,
    short,
    svg,
    text,
    tick_label,
)

WIDTH = 1120
_FEW = 6
"""Numbers with so few values are drawn as steps of equal height."""
SUFFIX_INK, GREEDY_INK = "#6d28d9", "#7b8794"

Trial = Mapping[str, Any]


# -- parallel coordinates ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Axis:
    """One upright axis: where a trial's value stands, and the labels beside it."""

    name: str
    place: Callable[[Trial], float]
    labels: Sequence[tuple[float, str]]


_TOP, _BOTTOM = 46.0, 300.0
_ABSENT_Y = _BOTTOM + 26.0


def parallel_coordinates(
    trials: Sequence[Trial], *, best: str, unit: str, log_names: Collection[str] = ()
) -> str:
    """One line a trial through its settings to its speed; dark is fast, the best stands out.

    Args:
        trials: rows of `sweep.json`; those without a speed are left out.
        best: names the best trial.
        unit: of the speed.
        log_names: settings that were searched by their logarithm.
    """
    shown = sorted((t for t in trials if t["metrics"]), key=lambda t: float(t["metrics"][SPEED]))
    axes = [*_setting_axes(shown, log_names), _speed_axis(shown, unit)]
    xs = Scale(0, max(1, len(axes) - 1), 70, WIDTH - 90)
    lines = []
    for rank, trial in enumerate(shown):
        points = [(xs(i), axis.place(trial)) for i, axis in enumerate(axes)]
        lines.append(_trial_line(trial, points, rank / max(1, len(shown) - 1), best=best))
    backs = [line(xs(i), _TOP, xs(i), _BOTTOM, stroke=MUTED) for i in range(len(axes))]
    fronts = [_axis_words(axis, xs(i), is_last=axis is axes[-1]) for i, axis in enumerate(axes)]
    label = "Parallel coordinates of the trials: settings from left to right, then speed"
    return svg(WIDTH, _ABSENT_Y + 14, *backs, *lines, *fronts, label=label)


def _setting_axes(trials: Sequence[Trial], log_names: Collection[str]) -> list[_Axis]:
    """An axis for each setting that differs between trials."""
    names = dict.fromkeys(name for trial in trials for name in trial["params"])
    axes = []
    for name in names:
        values = {t["params"][name] for t in trials if name in t["params"]}
        if len(values) > 1 or any(name not in t["params"] for t in trials):
            axes.append(_setting_axis(name, values, is_log=name in log_names))
    return axes


def _setting_axis(name: str, values: set[Any], *, is_log: bool) -> _Axis:
    is_number = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    is_whole = all(isinstance(v, int) for v in values)
    if not is_number or (is_whole and len(values) <= _FEW):
        order = sorted(values) if is_number else sorted(values, key=str)
        steps = Scale(-0.5, len(order) - 0.5, _BOTTOM, _TOP)
        place = {value: steps(index) for index, value in enumerate(order)}
        labels = [(y, str(value)) for value, y in place.items()]
        spread = 0.5 * (_BOTTOM - _TOP) / len(order)

        def spread_place(trial: Trial) -> float:
            """Apart by the trial's number, since many share a value."""
            y = place.get(trial["params"].get(name))
            return _ABSENT_Y if y is None else y + spread * _share(trial["number"])

        return _Axis(name, spread_place, labels)
    scale = Scale.over(sorted(values), start=_BOTTOM, end=_TOP, is_log=is_log)
    labels = [(scale(tick), tick_label(tick)) for tick in scale.ticks()]
    return _Axis(
        name, lambda t: scale(t["params"][name]) if name in t["params"] else _ABSENT_Y, labels
    )


def _speed_axis(trials: Sequence[Trial], unit: str) -> _Axis:
    speeds = [float(trial["metrics"][SPEED]) for trial in trials]
    scale = Scale.over(speeds, start=_BOTTOM, end=_TOP)
    labels = [(scale(tick), tick_label(tick)) for tick in scale.ticks(5)]
    return _Axis(unit, lambda t: scale(float(t["metrics"][SPEED])), labels)


def _trial_line(
    trial: Trial, points: Sequence[tuple[float, float]], share: float, *, best: str
) -> str:
    is_best = trial["trial"] == best
    words = ", ".join(f"{k} {_worded(v)}" for k, v in trial["params"].items())
    tip = f"trial {trial['number']}: {short(trial['metrics'][SPEED])}; {words}"
    return path(
        points,
        element("title", escape(tip)),
        stroke=ACCENT if is_best else ramp(share),
        stroke_width=3.5 if is_best else 1.6,
        stroke_linejoin="round",
        class_="trial",
        data_trial=trial["trial"],
    )


def _axis_words(axis: _Axis, x: float, *, is_last: bool) -> str:
    """Name and labels; those of the last axis stand on its right, where no line passes."""
    side, anchor = (1, "start") if is_last else (-1, "end")
    parts = [text(x, 22, axis.name, anchor="middle", font_weight=600, font_size=13)]
    for y, words in axis.labels:
        parts.append(line(x + 4 * side, y, x, y, stroke=MUTED))
        parts.append(text(x + 7 * side, y + 4, words, anchor=anchor, font_size=11, fill=MUTED))
    return "".join(parts)


def _share(number: int) -> float:
    """From -0.5 to 0.5, consecutive numbers far apart (the golden ratio's multiples)."""
    return number * 0.618034 % 1 - 0.5


# -- tau against speed ---------------------------------------------------------------------------

_PANEL_W, _PANEL_H = 270, 190


def tau_panels(curves: Mapping[str, Any], *, unit: str) -> str:
    """A small figure a workload: speed at every tau, beside the policies without one."""
    panels = []
    for name, curve in curves["workloads"].items():
        words = "all workloads" if name == EVERYTHING else name
        panel = _tau_panel(words, curve, curves["taus"])
        panels.append(svg(_PANEL_W, _PANEL_H, panel, label=f"{words}: {unit} against tau"))
    legend = svg(WIDTH, 22, _tau_legend(), label="What the lines mean")
    return legend + element("div", *panels, class_="panels")


def _tau_panel(name: str, curve: Mapping[str, Any], taus: Sequence[float]) -> str:
    levels = {"greedy": GREEDY_INK, "suffix": SUFFIX_INK, BEST: ACCENT}
    speeds = [float(value) for value in curve["speeds"]]
    y = Scale.over(
        [*speeds, *(curve[level] for level in levels)], start=_PANEL_H - 34, end=26
    ).widened(0.06)
    x = Scale.over([float(tau) for tau in taus], start=46, end=_PANEL_W - 12)
    parts = [text(46, 14, name, font_weight=600, font_size=13)]
    for tick in y.ticks():
        parts.append(line(46, y(tick), _PANEL_W - 12, y(tick)))
        parts.append(
            text(41, y(tick) + 4, tick_label(tick), anchor="end", font_size=11, fill=MUTED)
        )
    for tick in x.ticks(6):
        parts.append(
            text(
                x(tick), _PANEL_H - 18, tick_label(tick), anchor="middle", font_size=11, fill=MUTED
            )
        )
    if x.low <= PAPER_TAU <= x.high:
        at = x(PAPER_TAU)
        parts.append(line(at, 26, at, _PANEL_H - 34, stroke=MUTED, stroke_dasharray="2 3"))
    for level, colour in levels.items():
        dash = None if level == BEST else "6 4"
        place = y(curve[level])
        parts.append(
            line(
                46,
                place,
                _PANEL_W - 12,
                place,
                stroke=colour,
                stroke_width=2,
                stroke_dasharray=dash,
            )
        )
    points = [(x(float(tau)), y(value)) for tau, value in zip(taus, speeds, strict=True)]
    parts.append(path(points, stroke=INK, stroke_width=2))
    parts += [
        element(
            "circle",
            element("title", escape(f"{name}, tau {tau:g}: {short(value)}")),
            cx=cx,
            cy=cy,
            r=3.2,
            fill=INK,
        )
        for (cx, cy), tau, value in zip(points, taus, speeds, strict=True)
    ]
    return "".join(parts)


def _tau_legend() -> str:
    parts, x = [], 46.0
    for words, colour, dash in (
        ("the best predictor at each tau", INK, None),
        ("the best trial as it was tuned", ACCENT, None),
        ("suffix: always the cache", SUFFIX_INK, "6 4"),
        ("greedy: no drafts", GREEDY_INK, "6 4"),
        ("tau = 6", MUTED, "2 3"),
    ):
        parts.append(line(x, 10, x + 26, 10, stroke=colour, stroke_width=2, stroke_dasharray=dash))
        parts.append(text(x + 32, 14, words, font_size=12))
        x += 48 + 6.6 * len(words)
    return "".join(parts)


# -- the best trial against fixed tau ------------------------------------------------------------

_ROW_H = 26


def gap_figure(rows: Sequence[Mapping[str, Any]]) -> str:
    """A dot a workload: how much faster the best trial is than tau = 6, with its interval."""
    edges = [1.0]
    for row in rows:
        edges += [row["gap"]["ratio"], *(row["gap"]["interval"] or ())]
    x = Scale.over(edges, start=210, end=WIDTH - 190).widened(0.04)
    height = 30 + _ROW_H * len(rows) + 28
    parts = [line(x(1.0), 22, x(1.0), height - 26, stroke=INK, stroke_width=1.5)]
    for tick in x.ticks(6):
        parts.append(line(x(tick), 22, x(tick), height - 26))
        parts.append(
            text(x(tick), height - 10, tick_label(tick), anchor="middle", font_size=11, fill=MUTED)
        )
    parts += [_gap_row(row, x, 36 + _ROW_H * index) for index, row in enumerate(rows)]
    label = f"Speed of the best trial over {FIXED} by workload, with 95 % intervals"
    return svg(WIDTH, height, *parts, label=label)


def _gap_row(row: Mapping[str, Any], x: Scale, y: float) -> str:
    gap, is_whole = row["gap"], row["workload"] == EVERYTHING
    name = "all workloads" if is_whole else row["workload"]
    parts = [
        text(200, y + 4, name, anchor="end", font_weight=600 if is_whole else None, font_size=12)
    ]
    words = f"{gap['ratio']:.3f}"
    if gap["interval"] is not None:
        low, high = gap["interval"]
        parts.append(line(x(low), y, x(high), y, stroke=ACCENT, stroke_width=3))
        words += f"  [{low:.3f}, {high:.3f}]"
    parts.append(element("circle", cx=x(gap["ratio"]), cy=y, r=5, fill=ACCENT))
    parts.append(text(WIDTH - 180, y + 4, words, font_size=12))
    return "".join(parts)


def _worded(value: Any) -> str:
    return short(float(value)) if isinstance(value, float) else str(value)
