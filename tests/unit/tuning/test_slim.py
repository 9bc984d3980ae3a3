"""The frontier of several searches on one axis of cost."""

import pytest

from hvd_ray.tuning.slim import frontier_curves


def search(method: str, skipped: list[int], scale: float, escalated: float = 0.5):
    """Of a target of four layers whose sublayers take `scale` ms each, and nothing else."""
    cost = (8 - 2 * len(skipped)) / 8
    point = {"escalated": escalated, "wrong_rate": 0.1, "speed_vs_full": 0.9 / (cost + escalated)}
    row = {"method": method, "skip_ratio": len(skipped) / 4, "curve": [point]}
    layers = {"skipped_attention": skipped, "skipped_mlp": skipped}
    timed = {"attention_ms": scale, "mlp_ms": scale, "fixed_ms": 0.0}
    return {
        "best": method,
        "rows": [{**row, **layers}],
        "num_layers": 4,
        "provenance": {"sublayer_ms": timed},
    }


def test_a_machine_that_was_slower_then_moves_no_curve():
    curves = frontier_curves([search("dp", [1], 1.0), search("knapsack", [1, 2], 3.0)])
    assert list(curves) == ["dp, 25% skipped", "knapsack, 50% skipped"]
    (dp,), (knapsack,) = curves.values()
    assert dp["speed_vs_full"] == pytest.approx(0.9 / 1.25)
    assert knapsack["speed_vs_full"] == pytest.approx(0.9 / 1.0)


def test_costs_are_those_of_the_first_search():
    first, other = search("dp", [1], 1.0), search("ours", [1, 2], 1.0)
    first["provenance"]["sublayer_ms"]["fixed_ms"] = 8.0
    (point,) = frontier_curves([first, other])["ours, 50% skipped"]
    assert point["speed_vs_full"] == pytest.approx(0.9 / (0.75 + 0.5))
