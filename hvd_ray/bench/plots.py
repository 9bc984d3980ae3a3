"""Figures of a result; matplotlib without its global state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hvd_ray.bench.report import labels_of, title
from hvd_ray.bench.result import BASELINE, BenchResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_speedups(result: BenchResult) -> Figure:
    """Speed-up by workload, one mark with its interval for each system."""
    from matplotlib.figure import Figure

    rows = [row for row in [*result.rows, *result.aggregate] if row.system != BASELINE]
    workloads = list(dict.fromkeys(row.workload for row in rows))
    labels = labels_of(rows)
    figure = Figure(figsize=(max(6.0, 1.4 * len(workloads) + 2), 4), layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(1, color="black", linewidth=0.8, label="greedy")
    arms = list(dict.fromkeys(labels))
    for i, arm in enumerate(arms):
        of_arm = [row for row, label in zip(rows, labels, strict=True) if label == arm]
        shift = (i - (len(arms) - 1) / 2) * 0.8 / len(arms)
        places = [workloads.index(row.workload) + shift for row in of_arm]
        ratios = [row.speedup_vs_greedy for row in of_arm]
        errors = [
            [row.speedup_vs_greedy - row.speedup_ci[0] for row in of_arm],
            [row.speedup_ci[1] - row.speedup_vs_greedy for row in of_arm],
        ]
        axes.errorbar(places, ratios, yerr=errors, fmt="o", markersize=4, capsize=2, label=arm)
    # An interval of few prompts may reach far: it runs out of the frame, not the marks.
    highest = max(min(row.speedup_ci[1], 2 * row.speedup_vs_greedy) for row in rows)
    axes.set_ylim(0, 1.1 * max(1.0, highest))
    axes.set_xticks(range(len(workloads)), workloads, rotation=20, parse_math=False)
    axes.set_ylabel("speed-up against greedy")
    axes.set_title(title(result), fontsize=10, parse_math=False)
    axes.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


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
