"""Speculative cascades: the published rules written out, and the sampler's law by enumeration.

The rules (2405.19261; q' the slim model, q the target, r = 1 where the target is heeded):

- Chow: r = 1 iff max q' < 1 - alpha
- Diff: r = 1 iff max q' < max q - alpha
- OPT: r = 1 iff max q' < max q - alpha * TV(q', q)
- Token-v3: r(v) = 1 iff q(v) < (1 - alpha) max q

and what is sampled from: q'(v) (1 - r(v)) + q(v) * sum over u of r(u) q'(u).
"""

from __future__ import annotations

import itertools

import pytest
import torch

from hvd_ray.engines.toy_tiers import ToyTiers
from hvd_ray.types import Draft, SamplingParams, Source, VerificationName
from hvd_ray.verify import exact
from hvd_ray.verify.cascades import DEFERRALS, CascadeVerifier, mixture
from hvd_ray.verify.sampling import RowDistribution
from tests.unit.verify.enumeration import Chance, every_path
from tests.unit.verify.test_nested import PROMPT, VOCAB, engine, make_draft, state_for

Law = dict[tuple[int, ...], float]
Probs = list[float]

NUM_TENTATIVE = 2
ALPHAS: dict[VerificationName, tuple[float, ...]] = {
    "cascade_chow": (0.3, 0.5),
    "cascade_diff": (0.05, 0.2),
    "cascade_opt": (0.2, 0.8),
    "cascade_token_v3": (0.3, 0.6),
}
"""At each, some rows of the small models are the slim one's and some are not."""


def defers(rule: VerificationName, slim: Probs, full: Probs, alpha: float) -> list[bool]:
    """r(v) for each token, as published."""
    if rule == "cascade_token_v3":
        return [prob < (1 - alpha) * max(full) for prob in full]
    distance = sum(abs(a - b) for a, b in zip(slim, full, strict=True)) / 2
    bound = {
        "cascade_chow": 1 - alpha,
        "cascade_diff": max(full) - alpha,
        "cascade_opt": max(full) - alpha * distance,
    }[rule]
    return [max(slim) < bound] * len(full)


def published(rule: VerificationName, slim: Probs, full: Probs, alpha: float) -> Probs:
    """What a cascade samples from."""
    deferred = defers(rule, slim, full, alpha)
    mass = sum(prob for prob, is_deferred in zip(slim, deferred, strict=True) if is_deferred)
    return [
        (0.0 if is_deferred else own) + mass * theirs
        for own, theirs, is_deferred in zip(slim, full, deferred, strict=True)
    ]


# TV 0.4; max q' 0.5, max q 0.7.
SLIM, FULL = [0.5, 0.3, 0.2], [0.2, 0.7, 0.1]


@pytest.mark.parametrize(
    ("rule", "alpha", "wanted"),
    [
        ("cascade_chow", 0.4, FULL),  # 0.5 < 0.6
        ("cascade_chow", 0.6, SLIM),  # 0.5 >= 0.4
        ("cascade_diff", 0.1, FULL),  # 0.5 < 0.6
        ("cascade_diff", 0.3, SLIM),  # 0.5 >= 0.4
        ("cascade_opt", 0.4, FULL),  # 0.5 < 0.7 - 0.16
        ("cascade_opt", 0.6, SLIM),  # 0.5 >= 0.7 - 0.24
        ("cascade_token_v3", 0.1, [0.14, 0.79, 0.07]),  # q' keeps token 1, 0.7 of it is deferred
        ("cascade_token_v3", 0.8, [0.54, 0.44, 0.02]),  # tokens 0 and 1; 0.2 is deferred
        ("cascade_token_v3", 0.9, SLIM),  # all reach 0.07
    ],
)
def test_the_rules_by_hand(rule: VerificationName, alpha: float, wanted: Probs) -> None:
    slim_V, full_V = torch.tensor(SLIM), torch.tensor(FULL)
    got_V = mixture(slim_V, full_V, DEFERRALS[rule](slim_V, full_V, alpha))
    assert got_V.tolist() == pytest.approx(wanted, abs=1e-6)
    assert published(rule, SLIM, FULL, alpha) == pytest.approx(wanted, abs=1e-12)


def probs_after(tried: ToyTiers, prefix: tuple[int, ...]) -> tuple[Probs, Probs]:
    """`(slim, full)` of the next token."""
    both = tried.slim_logits_after(prefix), tried.target.logits_after(prefix)
    slim, full = (torch.softmax(logits_V.double(), dim=0).tolist() for logits_V in both)
    return slim, full


def published_law(tried: ToyTiers, rule: VerificationName, alpha: float, length: int) -> Law:
    """Of the first tokens: mixtures where the slim model was read, the target's own after that."""
    law: Law = {}
    for sequence in itertools.product(range(VOCAB), repeat=length):
        law[sequence] = 1.0
        for row, token in enumerate(sequence):
            slim, full = probs_after(tried, (PROMPT, *sequence[:row]))
            mixed = published(rule, slim, full, alpha) if row < NUM_TENTATIVE else full
            law[sequence] *= mixed[token]
    return law


def sampler_law(
    tried: ToyTiers,
    verifier: CascadeVerifier,
    kind: str,
    wanted: Law,
    monkeypatch: pytest.MonkeyPatch,
) -> Law:
    """One cycle by every path of its choices, what it leaves open filled up from `wanted`."""

    def cycle(chance: Chance) -> tuple[int, ...]:
        monkeypatch.setattr(exact, "pick", chance.pick)
        state = state_for(tried, chance)
        state.allows_loss = True
        return verifier.verify(make_draft(kind, chance, tried, NUM_TENTATIVE), state).token_ids

    law: Law = dict.fromkeys(wanted, 0.0)
    length, total = len(next(iter(wanted))), 0.0
    for emitted, prob in every_path(cycle):
        assert isinstance(emitted, tuple)
        total += prob
        begun = emitted[:length]
        goes_on = {s: p for s, p in wanted.items() if s[: len(begun)] == begun}
        for sequence, share in goes_on.items():
            law[sequence] += prob * share / sum(goes_on.values())
    assert total == pytest.approx(1, abs=1e-12)
    return law


@pytest.mark.parametrize("rule", ALPHAS)
@pytest.mark.parametrize(("kind", "length"), [("none", 3), ("deterministic", 2), ("sampled", 2)])
def test_the_law_is_the_published_mixture(
    rule: VerificationName, kind: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third token of a cycle without a draft is the bonus, which is the target's."""
    for seed, alpha in itertools.product(range(2), ALPHAS[rule]):
        tried = engine(seed)
        verifier = CascadeVerifier(tried, rule, alpha, NUM_TENTATIVE)
        wanted = published_law(tried, rule, alpha, length)
        got = sampler_law(tried, verifier, kind, wanted, monkeypatch)
        assert sum(abs(got[s] - wanted[s]) for s in wanted) / 2 < 1e-12


@pytest.mark.parametrize("rule", ALPHAS)
def test_the_small_models_try_both_sides_of_each_rule(rule: VerificationName) -> None:
    """Else the law above would be that of one model alone, whatever the rule."""
    sides = set()
    for seed, alpha, token in itertools.product(range(2), ALPHAS[rule], range(VOCAB)):
        sides |= set(defers(rule, *probs_after(engine(seed), (token,)), alpha))
    assert sides == {False, True}


@pytest.mark.parametrize("rule", ALPHAS)
def test_greedy_cascades_follow_the_rule_row_by_row(rule: VerificationName) -> None:
    """The slim model takes the draft's tokens or leaves them; each of its own meets the rule."""
    for seed, alpha in itertools.product(range(6), ALPHAS[rule]):
        tried = engine(seed)
        for draft_ids in itertools.product(range(VOCAB), repeat=2):
            verifier = CascadeVerifier(tried, rule, alpha, NUM_TENTATIVE)
            state = state_for(tried, Chance([]))
            state.allows_loss = True
            state.distribution = RowDistribution(
                SamplingParams(), state.context.token_ids.view().copy(), (), VOCAB
            )
            draft = Draft(Source.SUFFIX, draft_ids)
            emitted = verifier.verify(draft, state).token_ids
            assert emitted == greedily(tried, rule, alpha, draft_ids)
            assert state.verification == rule


def greedily(
    tried: ToyTiers, rule: VerificationName, alpha: float, draft_ids: tuple[int, ...]
) -> tuple[int, ...]:
    tentative: tuple[int, ...] = ()
    follows = True
    while len(tentative) < NUM_TENTATIVE or (follows and len(tentative) < 3):
        slim, _ = probs_after(tried, (PROMPT, *tentative))
        tentative += (slim.index(max(slim)),)
        follows = follows and tentative == draft_ids[: len(tentative)]
    emitted: tuple[int, ...] = ()
    for row in range(len(tentative) + 1):
        slim, full = probs_after(tried, (PROMPT, *emitted))
        best = full.index(max(full))
        if row == len(tentative):
            return (*emitted, best)
        token = tentative[row]
        chosen = best if defers(rule, slim, full, alpha)[token] else token
        emitted += (chosen,)
        if chosen != token:
            return emitted
    raise AssertionError
