"""Figures of a result; matplotlib without its global state."""

from __future__ import annotations

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
