"""Which layers to skip, without training: the published ways and ours.

- *DIMR* (VIA-SD): whole layers, random search with periodic Bayesian steps on the one-sided log
  margin by which the slim model prefers another token to the target's.
- *Dynamic programming* (CLaSp): whole layers; after each layer, for each number of skips, the
  hidden state nearest in cosine to the target's.
- *Knapsack* (KnapSpec): the same over attention and MLP separately, weighted by what each costs.
- *Ours*: sublayers, fewest wrong accepts under the gate at a given share of escalated blocks.

A searched point is a vector of one number for each (sub)layer; those with the smallest numbers are
skipped until the budget is met, so every point is valid and has the cost that was asked for.

Shapes: L layers, D width, N rows, J states of the dynamic programme.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

import numpy as np
import torch

from hvd_ray.engines.slim import SlimLayers
from hvd_ray.engines.torch_tiers import LayerWalk
from hvd_ray.verify.gate import RatioGate
from hvd_ray.verify.slim_window import Recorded, Tally, Window

Method = Literal["dimr", "dp", "knapsack", "ours", "prefix"]
Sublayer = tuple[str, int]
"""`("attention" | "mlp", layer)`."""
THETAS = tuple(round(0.05 * step, 2) for step in range(20))
MARGIN = 0.1
"""Between the two thresholds while they are swept together."""


@dataclass(frozen=True, slots=True)
class SublayerCosts:
    """What a sublayer costs a pass, and what no slim model saves."""

    attention_ms: float
    mlp_ms: float
    fixed_ms: float = 0.0
    """Embedding, final norm and output head."""

    def of(self, slim: SlimLayers) -> float:
        """Milliseconds of a slim pass."""
        kept_attention = slim.num_layers - len(slim.skipped_attention)
        kept_mlp = slim.num_layers - len(slim.skipped_mlp)
        return self.fixed_ms + kept_attention * self.attention_ms + kept_mlp * self.mlp_ms

    def ratio(self, slim: SlimLayers) -> float:
        """Cost of a slim pass over that of a whole one."""
        layer_ms = self.attention_ms + self.mlp_ms
        return self.of(slim) / (self.fixed_ms + slim.num_layers * layer_ms)


def measure_sublayers(window: Window, *, num_rows: int = 6, repeats: int = 9) -> SublayerCosts:
    """Time the parts of a pass over a few rows: medians, on this machine."""
    engine = window.engine
    walk = LayerWalk(engine.model)
    full = SlimLayers.prefix(1, num_layers=window.num_layers)
    attention = SlimLayers(full.num_layers, full.skipped_attention, frozenset())
    mlp = SlimLayers(full.num_layers, frozenset(), full.skipped_mlp)
    token_ids = np.ones(num_rows, np.int32)
    times: dict[int, list[float]] = {which: [] for which in range(4)}
    cache = engine.new_cache()
    engine.forward(np.ones(256, np.int32), cache, num_logits=1)
    with torch.inference_mode():
        for _ in range(repeats):
            for which, skipped in enumerate((None, full, attention, mlp)):
                started = perf_counter()
                hidden_BTD, _ = walk.run(
                    walk.embed(token_ids),
                    cache,
                    past=256,
                    layers=range(window.num_layers),
                    skipped=skipped,
                )
                walk.logits(hidden_BTD)
                times[which].append((perf_counter() - started) * 1e3)
                cache.truncate(256)
    whole, least, no_attention, no_mlp = (float(np.median(times[which])) for which in range(4))
    skipped_layers = window.num_layers - 1
    attention_ms = max(1e-3, (whole - no_attention + no_mlp - least) / 2 / skipped_layers)
    mlp_ms = max(1e-3, (whole - no_mlp + no_attention - least) / 2 / skipped_layers)
    fixed_ms = max(0.0, whole - window.num_layers * (attention_ms + mlp_ms))
    return SublayerCosts(attention_ms, mlp_ms, fixed_ms)


# -- points of a search ----------------------------------------------------------------------


def whole_layers(scores: Sequence[float], *, skip_ratio: float) -> SlimLayers:
    """The layers with the smallest scores left out."""
    count = num_skipped(len(scores), skip_ratio)
    order = np.argsort(np.asarray(scores), kind="stable")
    skipped = frozenset(int(layer) for layer in order[:count])
    return SlimLayers.without(skipped, num_layers=len(scores))


def num_skipped(num_layers: int, skip_ratio: float) -> int:
    return min(num_layers - 1, max(1, round(num_layers * skip_ratio)))


def sublayers(
    scores: Mapping[Sublayer, float], *, num_layers: int, costs: SublayerCosts, max_ratio: float
) -> SlimLayers:
    """Sublayers with the smallest scores left out, until the slim pass is cheap enough."""
    skipped: dict[str, set[int]] = {"attention": set(), "mlp": set()}
    slim: SlimLayers | None = None
    for kind, layer in sorted(scores, key=lambda sublayer: (scores[sublayer], sublayer)):
        skipped[kind].add(layer)
        slim = SlimLayers(num_layers, frozenset(skipped["attention"]), frozenset(skipped["mlp"]))
        if costs.ratio(slim) <= max_ratio or slim.num_skipped == 2 * num_layers - 1:
            break
    assert slim is not None, "no sublayers to choose from"
    return slim


def scores_of(slim: SlimLayers) -> dict[Sublayer, float]:
    """A point from which `sublayers` makes this slim model again, or one near it."""
    return {
        (kind, layer): 0.25 if layer in skipped else 0.75
        for kind, skipped in (("attention", slim.skipped_attention), ("mlp", slim.skipped_mlp))
        for layer in range(slim.num_layers)
    }


# -- what a point is worth -------------------------------------------------------------------


def log_margin(window: Window, slim: SlimLayers) -> float:
    """DIMR's cost: 0 where the slim model's arg max is the target's, else by how much it is not."""
    return window.tallies(slim, [RatioGate()])[0].mean_log_margin


def sweep_gates(window: Window, slim: SlimLayers) -> list[Tally]:
    """One tally for each of `THETAS` as `theta_escalate`."""
    gates = [RatioGate(min(1.0, theta + MARGIN), theta) for theta in THETAS]
    return window.tallies(slim, gates)


def wrong_accepts(tallies: Sequence[Tally], *, max_escalated: float) -> float:
    """Wrong share of unchecked tokens at the strictest gate that escalates few enough blocks."""
    affordable = [tally for tally in tallies if tally.escalated <= max_escalated]
    return (affordable[-1] if affordable else tallies[0]).wrong_rate


# -- dynamic programmes ----------------------------------------------------------------------


def best_layers(window: Window, *, skip_ratio: float, num_rows: int = 256) -> SlimLayers:
    """CLaSp: the skips whose hidden states stay nearest to the target's, by dynamic programming."""
    count = num_skipped(window.num_layers, skip_ratio)
    steps = [(("attention", layer), ("mlp", layer)) for layer in range(window.num_layers)]
    return _programme(window, steps, [1] * len(steps), budget=count, num_rows=num_rows)


def best_sublayers(
    window: Window, *, costs: SublayerCosts, max_ratio: float, num_rows: int = 256
) -> SlimLayers:
    """KnapSpec: attention and MLP apart, a skip weighing what it saves."""
    unit_ms = min(costs.attention_ms, costs.mlp_ms)
    weight = {
        "attention": max(1, round(costs.attention_ms / unit_ms)),
        "mlp": max(1, round(costs.mlp_ms / unit_ms)),
    }
    steps = [((kind, layer),) for layer in range(window.num_layers) for kind in weight]
    weights = [weight[kind] for ((kind, _),) in steps]
    whole_ms = costs.fixed_ms + window.num_layers * (costs.attention_ms + costs.mlp_ms)
    budget = max(1, round((1 - max_ratio) * whole_ms / unit_ms))
    return _programme(window, steps, weights, budget=budget, num_rows=num_rows)


@dataclass(slots=True)
class _State:
    hidden_BTD: torch.Tensor
    skipped: tuple[Sublayer, ...] = ()


@torch.inference_mode()
def _programme(
    window: Window,
    steps: Sequence[tuple[Sublayer, ...]],
    weights: Sequence[int],
    *,
    budget: int,
    num_rows: int,
) -> SlimLayers:
    """For each step and each weight skipped so far, the state nearest to the target's.

    Every state runs or skips the next step; of the states that arrive at the same weight, the one
    whose last `num_rows` rows have the greater mean cosine with the target's is kept.
    """
    walk, recorded = LayerWalk(window.engine.model), _longest(window, num_rows)
    embedded = walk.embed(recorded.token_ids[:-1])
    target, states = embedded, {0: _State(embedded)}
    for step, weight in zip(steps, weights, strict=True):
        target = _run(walk, window, target, step)
        arriving: dict[int, list[_State]] = {}
        for used, state in states.items():
            run = _State(_run(walk, window, state.hidden_BTD, step), state.skipped)
            arriving.setdefault(used, []).append(run)
            if used + weight <= budget:
                skip = _State(state.hidden_BTD, (*state.skipped, *step))
                arriving.setdefault(used + weight, []).append(skip)
        states = {
            used: max(found, key=lambda s: _cosine(s.hidden_BTD, target, num_rows))
            for used, found in arriving.items()
        }
    skipped = states[max(states)].skipped
    return SlimLayers(
        window.num_layers,
        frozenset(layer for kind, layer in skipped if kind == "attention"),
        frozenset(layer for kind, layer in skipped if kind == "mlp"),
    )


def _longest(window: Window, num_rows: int) -> Recorded:
    """The recording with the most output; its last 512 tokens are enough context."""
    longest = max(window.recordings, key=lambda recorded: recorded.num_rows)
    token_ids = longest.token_ids[-max(512, num_rows + 1) :]
    return Recorded(token_ids, max(1, len(token_ids) - longest.num_rows))


def _run(
    walk: LayerWalk, window: Window, hidden_BTD: torch.Tensor, step: tuple[Sublayer, ...]
) -> torch.Tensor:
    """One step over a whole sequence."""
    layer = step[0][1]
    kinds = {kind for kind, _ in step}
    only = SlimLayers(
        window.num_layers,
        frozenset(range(window.num_layers)) - ({layer} if "attention" in kinds else set()),
        frozenset(range(window.num_layers)) - ({layer} if "mlp" in kinds else set()),
    )
    ran, _ = walk.run(
        hidden_BTD,
        window.engine.new_cache(),
        past=0,
        layers=range(layer, layer + 1),
        skipped=only,
    )
    return ran


def _cosine(one_BTD: torch.Tensor, other_BTD: torch.Tensor, num_rows: int) -> float:
    similar_N = torch.cosine_similarity(
        one_BTD[0, -num_rows:].float(), other_BTD[0, -num_rows:].float(), dim=-1
    )
    return float(similar_N.mean())
