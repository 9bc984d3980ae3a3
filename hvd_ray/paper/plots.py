"""The suite's figures as inline SVG, each from what the suite has stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hvd_ray.pages.document import Markup
from hvd_ray.pages.plots import colours, inline_svg, legend, new_figure
from hvd_ray.pages.plots import title as axes_title


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


def _payoff_plot(own: Mapping[str, Any]) -> Markup:
    """Share of the verified cache drafts in each class of accepted length, over all workloads."""
    drawn = {
        f"{p['system']} {p['cache']}".removesuffix(" none"): _shares(p["counts"])
        for p in own["payoffs"]
        if p["workload"] == "all"
    }
    return _classes_plot(own, drawn, "accepted length, tokens", "Accepted lengths of cache drafts")


def _length_plot(own: Mapping[str, Any]) -> Markup:
    """Share of the drafts of each source in each class of length, all arms together."""
    sums: dict[str, list[int]] = {}
    for sources in own["draft_lengths"].values():
        for source, counts in sources.items():
            before = sums.setdefault(source, [0] * len(counts))
            sums[source] = [a + b for a, b in zip(before, counts, strict=True)]
    drawn = {source: _shares(counts) for source, counts in sums.items()}
    return _classes_plot(own, drawn, "draft length, tokens", "Lengths of drafts by source")


def _classes_plot(
    own: Mapping[str, Any], drawn: Mapping[str, Sequence[float]], label: str, words: str
) -> Markup:
    names = own["length_classes"]
    figure, (ax,) = new_figure(6.0, 3.0)
    width = 0.8 / max(1, len(drawn))
    for index, (name, colour) in enumerate(colours(list(drawn)).items()):
        places = [at + (index - (len(drawn) - 1) / 2) * width for at in range(len(names))]
        ax.bar(places, drawn[name], width, color=colour, label=name)
    ax.set_xticks(range(len(names)), names)
    ax.set_xlabel(label)
    ax.set_ylabel("share of drafts, %")
    legend(ax)
    return inline_svg(figure, words)


def _shares(counts: Sequence[int]) -> list[float]:
    return [100 * count / max(1, sum(counts)) for count in counts]


PLOTS: Mapping[str, Callable[[Mapping[str, Any]], Markup]] = MappingProxyType(
    {
        "What a cycle costs": _cost_plot,
        "How long drafts were accepted": _payoff_plot,
        "How long drafts were, by source": _length_plot,
        "Speed against tau": _tau_plot,
        "Growth with the cache": _growth_plot,
        "Reliability": _reliability_plot,
    }
)
"""By the heading of the table that each stands over."""
