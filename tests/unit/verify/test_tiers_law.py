"""The law of tiered verification at a temperature, by enumeration through the production code."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from hvd_ray.engines.toy_tiers import ToyTiers
from hvd_ray.payoff.network import Network
from hvd_ray.types import Draft, Source
from hvd_ray.verify.audit import Audit
from hvd_ray.verify.gate import FEATURE_NAMES, Gate, LearnedGate, RatioGate
from hvd_ray.verify.tiers import TieredVerifier
from tests.unit.verify.enumeration import Chance, every_path
from tests.unit.verify.test_nested import PROMPT, VOCAB, engine, state_for

Outcomes = dict[tuple[int, ...], float]


def outcomes_of(gate: Gate, draft_ids: tuple[int, ...], tried: ToyTiers, budget: float) -> Outcomes:
    """What a block may emit, and how likely each is."""

    def block(chance: Chance) -> tuple[int, ...]:
        verifier = TieredVerifier(tried, gate, Audit(max_miss_rate=1), loss_budget=budget)
        state = state_for(tried, chance)
        state.allows_loss = True
        return verifier.verify(Draft(Source.SUFFIX, draft_ids), state).token_ids

    outcomes: Outcomes = {}
    for emitted, prob in every_path(block):
        assert isinstance(emitted, tuple)
        outcomes[emitted] = outcomes.get(emitted, 0.0) + prob
    assert sum(outcomes.values()) == pytest.approx(1, abs=1e-12)
    return outcomes


def whose_tokens(outcomes: Outcomes, draft_ids: tuple[int, ...], tried: ToyTiers) -> list[str]:
    """Whose law each token of a block has, given the draft's tokens before it."""
    whose: list[str] = []
    for row in range(len(draft_ids) + 1):
        before = draft_ids[:row]
        going = {e: p for e, p in outcomes.items() if len(e) > row and e[:row] == before}
        assert not (going and before in outcomes), "whether a token is kept depended on the token"
        if not going:
            break
        law_V = np.zeros(VOCAB)
        for emitted, prob in going.items():
            law_V[emitted[row]] += prob / sum(going.values())
        prefix = (PROMPT, *before)
        laws = {
            "slim": tried.slim_logits_after(prefix),
            "target": tried.target.logits_after(prefix),
        }
        near = [
            name
            for name, logits_V in laws.items()
            if np.abs(torch.softmax(logits_V.double(), dim=0).numpy() - law_V).max() < 1e-12
        ]
        assert near, (
            f"draft {draft_ids}, token {row}: neither the slim model's law nor the target's"
        )
        whose += near
    return whose


def learned_gate(seed: int) -> LearnedGate:
    """Of random weights: some tokens pass, some do not."""
    rng = np.random.default_rng(seed)
    num_features = len(FEATURE_NAMES)
    sizes = ((num_features, 6), (6, 1))
    layers = [
        (rng.normal(size=size).astype(np.float32), rng.normal(size=size[1]).astype(np.float32))
        for size in sizes
    ]
    low_F, high_F = np.full(num_features, -9, np.float32), np.full(num_features, 9, np.float32)
    return LearnedGate(Network(layers, low_F=low_F, high_F=high_F), theta=0.5)


GATES = {
    "strict": RatioGate(0.9, 0.5),
    "lax": RatioGate(0.6, 0.2),
    "never escalates": RatioGate(0.5, 0.0),
    "learned": learned_gate(11),
}


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("budget", [99.0, 1.0])
def test_every_token_is_the_slim_models_or_the_targets(name: str, budget: float) -> None:
    """And nothing drawn decides which: no mixture of the two, nothing kept for what it is."""
    kinds: set[str] = set()
    for seed, draft_ids in itertools.product(range(3), itertools.product(range(VOCAB), repeat=2)):
        tried = engine(seed)
        outcomes = outcomes_of(GATES[name], draft_ids, tried, budget)
        kinds |= set(whose_tokens(outcomes, draft_ids, tried))
    assert "slim" in kinds
    assert "target" in kinds or name == "never escalates"
