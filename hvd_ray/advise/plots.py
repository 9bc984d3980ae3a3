"""The figures of an advice."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_ray.advise.contestants import GREEDY, ORACLE
from hvd_ray.advise.judging import ALL, Row
from hvd_ray.advise.result import Advice
from hvd_ray.pages.document import Markup
from hvd_ray.pages.plots import (
    GRID,
    INK,
    MUTED,
    colours,
    inline_svg,
    legend,
    marks,
    new_figure,
    title,
)

_SOURCES = ("none", "ngram", "suffix", "eagle3")
MAX_PANELS = 6


def speedup_plot(advice: Advice) -> Markup:
    """A mark with its interval for each system; hollow where something is assumed."""
    workloads = advice.workloads if len(advice.workloads) > 2 else [ALL]
    shown = workloads[:MAX_PANELS]
    systems = [name for name in advice.systems if name != GREEDY]
    figure, axes = new_figure(
        3.6 + 2.1 * len(shown), 0.9 + 0.26 * len(systems), num_axes=len(shown)
    )
    for ax, workload in zip(axes, shown, strict=True):
        for place, name in enumerate(reversed(systems)):
            _mark(ax, place, advice.row(workload, name))
        ax.axvline(1, color=INK, linewidth=0.9)
        labels = list(reversed(systems)) if ax is axes[0] else [""] * len(systems)
        ax.set_yticks(range(len(systems)), labels)
        ax.set_xlabel("speed-up over plain decoding")
        title(ax, "all traffic" if workload == ALL else workload)
    return inline_svg(figure, "Speed-up by system and workload, with 95 % intervals")


def _mark(ax, place: int, row: Row) -> None:  # type: ignore[no-untyped-def]
    colour = MUTED if row.system.startswith(ORACLE) else "#0b7fc2"
    if row.speedup_ci is not None:
        ax.plot(row.speedup_ci, [place, place], color=colour, linewidth=2, alpha=0.6)
    face = "none" if row.is_assumed else colour
    ax.plot([row.speedup], [place], "o", color=colour, markerfacecolor=face, markersize=6)


def route_plot(advice: Advice) -> Markup:
    """What each system verifies, as shares of the target passes over all traffic."""
    systems = [name for name in advice.systems if name != GREEDY]
    figure, (ax,) = new_figure(8.0, 0.9 + 0.26 * len(systems))
    colour = {**colours(_SOURCES), "none": GRID}
    left = [0.0] * len(systems)
    for source in _SOURCES:
        rows = [advice.row(ALL, name) for name in reversed(systems)]
        shares = [100 * row.source_share.get(source, 0.0) for row in rows]
        if any(shares):
            ax.barh(range(len(systems)), shares, left=left, color=colour[source], label=source)
        left = [start + share for start, share in zip(left, shares, strict=True)]
    ax.set_yticks(range(len(systems)), list(reversed(systems)))
    ax.set_xlabel("share of target passes, %")
    ax.set_xlim(0, 100)
    legend(ax, columns=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return inline_svg(figure, "Share of target passes by source of the verified draft")


def cap_plot(advice: Advice) -> Markup:
    """Emitted per pass against the cache's cap."""
    points = advice.filling.caps
    figure, (ax,) = new_figure(4.6, 2.9)
    labels = ["none", *(f"{_short(p.max_cached_tokens)}" for p in points[1:])]
    ax.plot(range(len(points)), [p.emitted_per_pass for p in points], "o-", color="#0b7fc2")
    ax.set_xticks(range(len(points)), labels)
    ax.set_xlabel("output tokens the cache may hold")
    ax.set_ylabel("emitted per pass (suffix)")
    ax.set_ylim(bottom=min(1.0, *(p.emitted_per_pass for p in points)))
    title(ax, "How much history")
    return inline_svg(figure, "Emitted per pass against the cap of the cache")


def fill_plot(advice: Advice) -> Markup:
    """Emitted per pass by the number of earlier outputs in the cache."""
    points = advice.filling.fills
    figure, (ax,) = new_figure(4.6, 2.9)
    places = range(len(points))
    ax.plot(places, [p.emitted_per_pass for p in points], "o-", color="#0b7fc2", label="history")
    without = [p.emitted_with_empty_cache for p in points]
    ax.plot(places, without, "s--", color="#d9650f", label="empty cache")
    labels = [
        str(p.outputs_from) if p.outputs_from == p.outputs_to else f"{p.outputs_from}+"
        for p in points
    ]
    ax.set_xticks(places, labels)
    ax.set_xlabel("earlier outputs in the cache")
    ax.set_ylabel("emitted per pass (suffix)")
    ax.set_ylim(bottom=1.0)
    legend(ax)
    title(ax, "How fast it fills")
    return inline_svg(figure, "Emitted per pass against the number of earlier outputs")


def tau_plot(advice: Advice) -> Markup:
    """`hvd_tau` by its threshold, beside what needs none."""
    figure, (ax,) = new_figure(4.6, 2.9)
    ax.plot([p.tau for p in advice.taus], [p.speedup for p in advice.taus], "o-", color="#0b7fc2",
            label="hvd_tau")  # fmt: skip
    for name, colour in (("hvd_cost", "#d9650f"), ("suffix", "#0f9d74")):
        if name in advice.systems:
            level = advice.row(ALL, name).speedup
            ax.axhline(level, color=colour, linestyle="--", linewidth=1.4, label=name)
    ax.set_xlabel("tau, tokens")
    ax.set_ylabel("speed-up")
    legend(ax)
    title(ax, "Speed against tau")
    return inline_svg(figure, "Speed-up of hvd_tau against tau")


def load_plot(advice: Advice) -> Markup:
    """Speed-up against requests at once; dotted where the cost table was extended."""
    figure, (ax,) = new_figure(4.6, 2.9)
    names = list(dict.fromkeys(point.system for point in advice.load))
    for name, (colour, shape) in marks(names).items():
        points = [point for point in advice.load if point.system == name]
        within = [point for point in points if not point.is_beyond_table]
        for kept, style in ((points, f"{shape}:"), (within, f"{shape}-")):
            ax.plot([p.concurrency for p in kept], [p.speedup for p in kept], style, color=colour,
                    label=name if kept is within else None)  # fmt: skip
    ax.axhline(1, color=INK, linewidth=0.9)
    ax.set_xscale("log", base=2)
    ticks = sorted({point.concurrency for point in advice.load})
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.set_xlabel("requests at once")
    ax.set_ylabel("speed-up")
    ax.set_ylim(bottom=0)
    legend(ax)
    title(ax, "As concurrency grows")
    return inline_svg(figure, "Speed-up against concurrency")


def _short(tokens: int) -> str:
    return f"{tokens / 1000:.0f}k" if tokens >= 1000 else str(tokens)


def all_plots(advice: Advice) -> Sequence[Markup]:
    """The small figures that apply."""
    plots = [cap_plot(advice), fill_plot(advice)]
    if advice.taus:
        plots.append(tau_plot(advice))
    if advice.load:
        plots.append(load_plot(advice))
    return plots
