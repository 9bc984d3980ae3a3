"""Slim models on disk, the window they are judged on, and each way of finding them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from hvd_ray.engines.slim import SlimLayers
from hvd_ray.engines.torch_engine import TorchEngine
from hvd_ray.errors import UserError
from hvd_ray.payoff.network import Network
from hvd_ray.types import Draft, Source
from hvd_ray.verify.gate import FEATURE_NAMES, GateRows, LearnedGate, RatioGate, Tier, gate_features
from hvd_ray.verify.gate_file import GateCard, read_gate, write_gate
from hvd_ray.verify.gate_training import GateExamples, examples_of, train_gate
from hvd_ray.verify.slim_file import Escalation, SlimFile, read_slim, write_slim
from hvd_ray.verify.slim_search import (
    SublayerCosts,
    best_layers,
    best_sublayers,
    log_margin,
    scores_of,
    sublayers,
    sweep_gates,
    whole_layers,
    wrong_accepts,
)
from hvd_ray.verify.slim_window import Block, Recorded, SlimView, Tally, Window

LAYERS = 4


@pytest.fixture(scope="module")
def window() -> Window:
    """Recordings of a random Llama whose layers 1 and 2 do nothing at all."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = LlamaForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        for layer in (1, 2):
            model.model.layers[layer].self_attn.o_proj.weight.zero_()
            model.model.layers[layer].mlp.down_proj.weight.zero_()
    engine = TorchEngine.from_model(model)
    return Window(engine, tuple(recording(engine, seed) for seed in range(4)))


def recording(engine: TorchEngine, seed: int) -> Recorded:
    """A greedy output with right and wrong drafts."""
    tokens = np.random.default_rng(seed).integers(1, 60, 6).astype(np.int32).tolist()
    prompt_len, blocks = len(tokens), []
    for _ in range(24):
        rows = engine.forward(np.array(tokens, np.int32), engine.new_cache(), num_logits=1)
        tokens.append(int(rows.logits_TV[-1].argmax()))
    output = tokens[prompt_len:]
    for position in range(0, 18, 4):
        guess = output[position : position + 3]
        if position % 8:
            guess[1] = (guess[1] + 1) % 60
        blocks.append(Block(position, Draft(Source.SUFFIX, tuple(guess), (0.9, 0.8, 0.7))))
    return Recorded(np.array(tokens, np.int32), prompt_len, tuple(blocks))


IDLE = SlimLayers.without(frozenset({1, 2}), num_layers=LAYERS)
BUSY = SlimLayers.without(frozenset({0, 3}), num_layers=LAYERS)
COSTS = SublayerCosts(attention_ms=1.0, mlp_ms=2.0, fixed_ms=3.0)


def test_a_slim_model_that_loses_nothing_is_never_wrong(window: Window) -> None:
    (tally,) = window.tallies(IDLE, [RatioGate()])
    assert tally.agreement == 1
    assert tally.mean_log_margin == pytest.approx(0, abs=1e-6)
    assert tally.num_blocks == 20
    assert (tally.num_wrong, log_margin(window, IDLE)) == (0, pytest.approx(0, abs=1e-6))
    assert log_margin(window, BUSY) > 0.5


def test_blocks_are_walked_as_decoding_walks_them() -> None:
    """By hand, on rows that are made up."""
    recorded = Recorded(
        np.array([9, 1, 2, 3, 4], np.int32), 1, (Block(0, Draft(Source.SUFFIX, (1, 7))),)
    )
    logits_RV = torch.full((4, 10), -9.0)
    for row, (token, logit) in enumerate([(1, 5.0), (2, 5.0), (3, 5.0), (4, 5.0)]):
        logits_RV[row, token] = logit
    view = SlimView(recorded, logits_RV, np.array([1, 2, 3, 4], np.int32))

    def walked(probability_of_7: float, gate: RatioGate) -> Tally:
        logits_RV[1, 7] = 5.0 + float(np.log(probability_of_7))
        tally = Tally()
        view.count(gate, tally)
        return tally

    escalated = walked(0.2, RatioGate(0.9, 0.5))
    assert (escalated.num_escalated, escalated.num_committed) == (1, 0)
    rewritten = walked(0.6, RatioGate(0.9, 0.5))  # by the slim model's own token, the right one
    assert (rewritten.num_committed, rewritten.num_wrong) == (2, 0)
    accepted = walked(0.95, RatioGate(0.9, 0.5))
    assert (accepted.num_committed, accepted.num_wrong) == (2, 1)


def test_dynamic_programming_skips_the_layers_that_do_nothing(window: Window) -> None:
    assert best_layers(window, skip_ratio=0.5, num_rows=16) == IDLE
    found = best_sublayers(window, costs=COSTS, max_ratio=COSTS.ratio(IDLE), num_rows=16)
    assert COSTS.ratio(found) <= COSTS.ratio(IDLE) + 1e-9
    assert found.skipped_mlp == IDLE.skipped_mlp
    assert found.skipped_attention == IDLE.skipped_attention


def test_the_best_layers_are_the_best_of_all(window: Window) -> None:
    every = [
        SlimLayers.without(frozenset(pair), num_layers=LAYERS)
        for pair in itertools.combinations(range(LAYERS), 2)
    ]
    assert min(every, key=lambda slim: log_margin(window, slim)) == IDLE


def test_points_have_the_cost_that_was_asked_for() -> None:
    slim = whole_layers([0.9, 0.1, 0.2, 0.8], skip_ratio=0.5)
    assert slim == IDLE
    again = sublayers(scores_of(slim), num_layers=LAYERS, costs=COSTS, max_ratio=COSTS.ratio(slim))
    assert again == slim
    for seed in range(20):
        drawn = np.random.default_rng(seed).random(2 * LAYERS)
        scores = dict(zip(scores_of(slim), drawn.tolist(), strict=True))
        found = sublayers(scores, num_layers=LAYERS, costs=COSTS, max_ratio=0.6)
        assert COSTS.ratio(found) <= 0.6


def test_costs_count_what_is_kept() -> None:
    assert COSTS.of(IDLE) == 3 + 2 * 1 + 2 * 2
    assert COSTS.ratio(IDLE) == pytest.approx(9 / 15)


def test_wrong_accepts_are_read_at_the_strictest_gate_one_can_afford(window: Window) -> None:
    tallies = sweep_gates(window, BUSY)
    shares = [tally.escalated for tally in tallies]
    assert shares == sorted(shares), "a higher threshold asks more often"
    at = max(i for i, share in enumerate(shares) if share <= 0.5)
    assert wrong_accepts(tallies, max_escalated=0.5) == tallies[at].wrong_rate


# -- the learned gate ------------------------------------------------------------------------


def test_features_are_what_their_names_say() -> None:
    probs_TV = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]])
    row = dict(zip(FEATURE_NAMES, gate_features((0, 1), (0.8, 0.4), probs_TV)[1], strict=True))
    expected = {
        **{"draft_prob": 0.4, "draft_top_prob": 0.6, "draft_margin": -0.2},
        "draft_entropy": -(0.4 * np.log(0.4) + 0.6 * np.log(0.6)),
        **{"slim_prob": 0.3, "slim_top_prob": 0.6, "ratio": 0.5, "agrees": 0.0},
        "slim_entropy": -sum(p * np.log(p) for p in (0.1, 0.3, 0.6)),
        "divergence": 0.4 * np.log(0.4 / 0.3) + 0.6 * np.log(0.6 / 0.7),
        **{"position": 1, "draft_len": 2},
    }
    assert row == pytest.approx(expected, rel=1e-5)


def learnable(count: int = 400) -> GateExamples:
    """The target chooses what the slim model gives more than one half."""
    rng = np.random.default_rng(0)
    features_NF = rng.random((count, len(FEATURE_NAMES))).astype(np.float32)
    features_NF[:, FEATURE_NAMES.index("draft_len")] = 4
    return GateExamples(features_NF, features_NF[:, FEATURE_NAMES.index("slim_prob")] > 0.5)


def test_a_gate_learns_and_survives_its_file(tmp_path: Path) -> None:
    examples, slim = learnable(), slim_file()
    gate = LearnedGate(train_gate(examples), theta=0.5)
    right = np.array(gate.probs(examples.features_NF)) > 0.5
    assert (right == examples.is_chosen_N).mean() > 0.95
    write_gate(tmp_path, gate.network, GateCard(slim=slim.key, weights_sha256=""))
    again, card = read_gate(tmp_path, slim=slim, theta=0.5)
    assert card.slim == slim.key
    assert again.probs(examples.features_NF[:9]) == gate.probs(examples.features_NF[:9])
    other = slim.model_copy(update={"skipped_mlp": (0,)})
    with pytest.raises(UserError, match="made for another slim model"):
        read_gate(tmp_path, slim=other, theta=0.5)
    (tmp_path / "gate.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match="not the card's"):
        read_gate(tmp_path, slim=slim, theta=0.5)


def test_a_learned_gate_prefers_the_draft_then_its_own_then_the_target() -> None:
    gate = LearnedGate(train_gate(learnable()), theta=0.8)
    unsure = [0.26, 0.25, 0.25, 0.24]
    probs_TV = torch.tensor([[0.95, 0.05, 0, 0], [0.05, 0.95, 0, 0], unsure, unsure])
    rows = GateRows(Draft(Source.SUFFIX, (0, 0, 0), (0.5, 0.5, 0.5)), probs_TV, (0, 1, 0, 0))
    judged = gate.judge(rows)
    assert judged.tiers == (Tier.ACCEPT, Tier.SLIM, Tier.FULL)
    assert not judged.keeps_bonus


def test_no_network_lets_a_forbidden_token_stand() -> None:
    """`min_tokens` leaves the end of text no chance at all, and greedy decoding would commit it."""
    num_features = len(FEATURE_NAMES)
    bound_F = np.ones(num_features, np.float32)
    sure = Network([(np.zeros((num_features, 1), np.float32), 9 * bound_F[:1])],
                   low_F=-bound_F, high_F=bound_F)  # fmt: skip
    probs_TV = torch.tensor([[0.2, 0.8], [0.0, 1.0], [0.0, 1.0]])
    rows = GateRows(Draft(Source.SUFFIX, (0, 0)), probs_TV, (1, 1, 1))
    assert LearnedGate(sure, theta=0.9).judge(rows).tiers == (Tier.ACCEPT, Tier.SLIM)


def test_examples_stop_where_the_recording_departs(window: Window) -> None:
    examples = examples_of(window.views(IDLE))
    right, wrong = 3, 2  # known rows of a draft that is right, and of one wrong at its second
    blocks = [b for recorded in window.recordings for b in recorded.blocks]
    known = sum(wrong if block.position % 8 else right for block in blocks)
    assert len(examples) == 2 * known
    assert (~examples.is_chosen_N).sum() == sum(bool(block.position % 8) for block in blocks)


def test_too_few_examples_are_refused() -> None:
    with pytest.raises(UserError, match="too few or too much alike"):
        train_gate(learnable(20))


# -- files -----------------------------------------------------------------------------------


def slim_file() -> SlimFile:
    return SlimFile(
        model="fingerprint",
        num_layers=LAYERS,
        skipped_attention=(1, 2),
        skipped_mlp=(1, 2),
        method="dp",
        escalation=Escalation(theta=(0.0, 0.5, 1.0), escalated=(0.0, 0.4, 1.0)),
    )


def test_a_slim_model_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "slim.json"
    write_slim(path, slim_file())
    again = read_slim(path, model="fingerprint")
    assert again == slim_file()
    assert again.layers == IDLE
    assert Escalation().at(0.25) is None


def test_between_two_measured_thresholds_the_dearer_counts() -> None:
    measured = Escalation(theta=(0.0, 0.5, 0.9), escalated=(0.0, 0.4, 0.8))
    assert [measured.at(theta) for theta in (0.0, 0.01, 0.5, 0.51, 0.95)] == [0, 0.4, 0.4, 0.8, 0.8]


DAMAGED_CURVES = [
    ({"theta": [0.0, 0.5], "escalated": [0.1]}, "escalation: .*2 thresholds but 1 shares"),
    ({"theta": [0.5, 0.5], "escalated": [0.1, 0.2]}, "escalation: .*do not rise"),
    (
        {"theta": [0.5], "escalated": [-0.1]},
        r"escalation\.escalated\.0: .*greater than or equal to 0",
    ),
    ({"theta": [0.5], "escalated": [1.5]}, r"escalation\.escalated\.0: .*less than or equal to 1"),
    ({"theta": [-1], "escalated": [0.5]}, r"escalation\.theta\.0: "),
    ({"theta": [0.5], "escalated": [float("nan")]}, r"escalation\.escalated\.0: "),
]


@pytest.mark.parametrize(("curve", "message"), DAMAGED_CURVES)
def test_a_damaged_curve_is_refused_where_it_is_read(
    tmp_path: Path, curve: dict[str, object], message: str
) -> None:
    def damage(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | {"escalation": curve}))

    slim, path = slim_file(), tmp_path / "slim.json"
    write_slim(path, slim)
    damage(path)
    with pytest.raises(UserError, match=message):
        read_slim(path)
    write_gate(tmp_path, train_gate(learnable()), GateCard(slim=slim.key, weights_sha256=""))
    damage(tmp_path / "gate.json")
    with pytest.raises(UserError, match=message):
        read_gate(tmp_path, slim=slim, theta=0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "other"}, "made for target other, here it is fingerprint"),
        ({"format_version": 7}, "format version 7"),
        ({"num_layers": 2}, "skips layer 2 of 2"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    path = tmp_path / "slim.json"
    path.write_text(json.dumps(slim_file().model_dump(mode="json") | change))
    with pytest.raises(UserError, match=message):
        read_slim(path, model="fingerprint")
    with pytest.raises(UserError, match="no slim model at"):
        read_slim(tmp_path / "absent.json")
