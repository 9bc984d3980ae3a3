"""Figures of a result; matplotlib without its global state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hvd_ray.bench.report import HEADLINE, labels_of, title
from hvd_ray.bench.result import BASELINE, BenchResult, Row
from hvd_ray.pages.plots import marks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, PANEL_HEIGHT = 10.5, 2.5
"""Inches: shown a thousand pixels wide, its words are as large as those around it."""
WORKLOADS_A_PANEL = 6


def plot_speedups(result: BenchResult) -> Figure:
    """Speed-up by workload, one mark with its interval for each system."""
    from matplotlib.figure import Figure

    count = num_panels(result)
    figure = Figure(figsize=(WIDTH, 1.0 + PANEL_HEIGHT * count), layout="constrained")
    panels = [figure.add_subplot(count, 1, index + 1) for index in range(count)]
    draw_speedups(panels, result)
    for axes in panels:
        axes.grid(axis="y", alpha=0.3)
    figure.suptitle(title(result), fontsize=11, parse_math=False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=9.5)
    return figure


def num_panels(result: BenchResult) -> int:
    """Rows of axes: of many workloads side by side none could be read."""
    return -(-len(_by_workload(result)) // WORKLOADS_A_PANEL)


def draw_speedups(panels: Sequence[Axes], result: BenchResult) -> None:
    """The marks, workload after workload, into as many axes as `num_panels` says."""
    found = _by_workload(result)
    names = list(found)
    looks = marks(list(dict.fromkeys(label for rows in found.values() for label in rows)))
    # An interval of few prompts may reach far: it runs out of the frame, not the marks.
    highest = max(row.speedup_vs_greedy for rows in found.values() for row in rows.values())
    for index, axes in enumerate(panels):
        shown = names[index * WORKLOADS_A_PANEL : (index + 1) * WORKLOADS_A_PANEL]
        axes.axhline(1, color="#8a8f98", linewidth=1)
        for at, label in enumerate(looks):
            shift = (at - (len(looks) - 1) / 2) * 0.8 / len(looks)
            places = {name: place + shift for place, name in enumerate(shown)}
            _draw_arm(axes, {places[n]: found[n][label] for n in shown if label in found[n]}, label,
                      looks[label])  # fmt: skip
        axes.set_xticks(range(len(shown)), shown, parse_math=False)
        axes.set_xlim(-0.5, min(len(names), WORKLOADS_A_PANEL) - 0.5)
        axes.set_ylim(0, 1.25 * max(1.0, highest))
        axes.set_ylabel("speed-up")


def _draw_arm(axes: Axes, rows: Mapping[float, Row], label: str, look: tuple[str, str]) -> None:
    """One arm's marks at their places; `hvd_cost` larger than the others."""
    colour, shape = look
    is_headline = label.split()[0] == HEADLINE
    for place, row in rows.items():
        axes.plot([place] * 2, row.speedup_ci, color=colour, linewidth=1.3, alpha=0.6)
    ratios = [row.speedup_vs_greedy for row in rows.values()]
    size = 7.5 if is_headline else 4.5
    axes.plot(list(rows), ratios, shape, color=colour, markersize=size, label=label)


def _by_workload(result: BenchResult) -> dict[str, dict[str, Row]]:
    """By workload and label, without the baseline."""
    rows = [row for row in [*result.rows, *result.aggregate] if row.system != BASELINE]
    found: dict[str, dict[str, Row]] = {}
    for row, label in zip(rows, labels_of(rows), strict=True):
        found.setdefault(row.workload, {})[label] = row
    return found


def plot_frontier(curves: Mapping[str, Sequence[Mapping[str, float]]]) -> Figure:
    """What tiers lose for what they save: one curve for each slim model, a mark each threshold.

    Args:
        curves: by label, points with `speed_vs_full` and `wrong_rate`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.axvline(1, color="black", linewidth=0.8, label="full verification")
    for label, points in curves.items():
        known = [point for point in points if point["escalated"] < 1]
        xs = [point["speed_vs_full"] for point in known]
        ys = [100 * point["wrong_rate"] for point in known]
        axes.plot(xs, ys, marker="o", markersize=3, linewidth=0.8, label=label)
    axes.set_xlabel("tokens per cost, over those of full verification")
    axes.set_ylabel("wrong tokens among the unchecked, %")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    return figure
