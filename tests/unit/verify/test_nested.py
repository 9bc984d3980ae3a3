"""Nested verification: its exact law by enumeration, the breakages it could hide, the sampler."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from hvd_ray.config import Config
from hvd_ray.context import DecodeContext
from hvd_ray.engines.toy import ToyCodec, ToyEngine
from hvd_ray.engines.toy_tiers import ToyTiers
from hvd_ray.systems import Parts, build_decoder
from hvd_ray.types import NO_DRAFT, Draft, Request, SamplingParams, Source, TokenBuffer
from hvd_ray.verify import exact, nested
from hvd_ray.verify.exact import VerifyState
from hvd_ray.verify.nested import NestedVerifier, Tentative
from hvd_ray.verify.sampling import RowDistribution
from tests.unit.verify.enumeration import Chance, every_path

VOCAB = 3
LENGTH = 3
"""Tokens whose joint law is compared."""
PROMPT = 1

Law = dict[tuple[int, ...], float]


def engine(seed: int, *, vocab_size: int = VOCAB) -> ToyTiers:
    target = ToyEngine(vocab_size, order=1, seed=seed, sharpness=1.0)
    return ToyTiers(target, closeness=0.3)


def drafter_probs(tried: ToyTiers, token: int) -> torch.Tensor:
    """A third model: what a sampled draft comes from."""
    rng = np.random.default_rng([99, tried.target.seed, token])
    return torch.from_numpy(rng.dirichlet(np.ones(VOCAB)))


def make_draft(kind: str, chance: Chance, tried: ToyTiers, length: int) -> Draft:
    if kind == "none":
        return NO_DRAFT
    tokens, rows = [PROMPT], []
    for _ in range(length):
        rows.append(drafter_probs(tried, tokens[-1]))
        own = int(rows[-1].argmax())
        tokens.append(chance.choose(rows[-1].tolist()) if kind == "sampled" else own)
    proposal = torch.stack(rows).numpy() if kind == "sampled" else None
    return Draft(Source.EAGLE3, tuple(tokens[1:]), proposal_probs_KV=proposal)


def state_for(tried: ToyTiers, chance: Chance) -> VerifyState:
    tokens = TokenBuffer([PROMPT])
    context = DecodeContext(tokens, 1, max_tokens=LENGTH + 1, room=LENGTH)
    distribution = RowDistribution(
        SamplingParams(temperature=1.0), tokens.view().copy(), (), tried.target.vocab_size
    )
    return VerifyState(
        context,
        tried.new_cache(),
        distribution,
        chance,  # type: ignore[arg-type]  # both stand in for streams of numbers
        chance,  # type: ignore[arg-type]
    )


def law_of(
    tried: ToyTiers, kind: str, monkeypatch: pytest.MonkeyPatch, *, draft_len: int = 2
) -> Law:
    """The joint law of the first tokens: one cycle, then the target's own law for what is left."""
    verifier = NestedVerifier(tried, num_tentative=2, is_sampled=True)

    def cycle(chance: Chance) -> tuple[int, ...]:
        monkeypatch.setattr(exact, "pick", chance.pick)
        draft = make_draft(kind, chance, tried, draft_len)
        return verifier.verify(draft, state_for(tried, chance)).token_ids

    law: Law = dict.fromkeys(itertools.product(range(VOCAB), repeat=LENGTH), 0.0)
    total = 0.0
    for emitted, prob in every_path(cycle):
        assert isinstance(emitted, tuple)
        total += prob
        for rest in itertools.product(range(VOCAB), repeat=max(0, LENGTH - len(emitted))):
            sequence = (*emitted, *rest)[:LENGTH]
            law[sequence] += prob * chain_prob(tried, sequence, start=len(emitted))
    assert total == pytest.approx(1, abs=1e-12)
    return law


def chain_prob(tried: ToyTiers, sequence: tuple[int, ...], *, start: int = 0) -> float:
    """The target's probability of the tokens from `start` on."""
    tokens, prob = (PROMPT, *sequence), 1.0
    for index in range(start, LENGTH):
        probs_V = torch.softmax(tried.target.logits_after([tokens[index]]).double(), dim=0)
        prob *= float(probs_V[tokens[index + 1]])
    return prob


def distance(tried: ToyTiers, law: Law) -> float:
    """Total variation from the target's law."""
    return sum(abs(prob - chain_prob(tried, sequence)) for sequence, prob in law.items()) / 2


@pytest.mark.parametrize("kind", ["none", "deterministic", "sampled"])
def test_the_two_level_law_is_the_targets(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(6):
        tried = engine(seed)
        assert distance(tried, law_of(tried, kind, monkeypatch)) < 1e-12


def test_resampling_from_the_slim_model_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first silent breakage: q' instead of (q' - p)+ after the inner rejection."""

    def broken(draft_ids, proposal_KV, target_probs, uniform):  # type: ignore[no-untyped-def]
        for row, token in enumerate(draft_ids):
            if uniform() * float(proposal_KV[row][token]) >= float(target_probs(row)[token]):
                return (*draft_ids[:row], exact.pick(target_probs(row), uniform()))
        return (*draft_ids, exact.pick(target_probs(len(draft_ids)), uniform()))

    sound = exact.accept_sampled

    def at_the_inner_tier(draft_ids, proposal_KV, target_probs, uniform):  # type: ignore[no-untyped-def]
        first = drafter_probs(tried, PROMPT)
        is_inner = bool(torch.equal(proposal_KV[0], first))
        rule = broken if is_inner else sound
        return rule(draft_ids, proposal_KV, target_probs, uniform)

    monkeypatch.setattr(exact, "accept_sampled", at_the_inner_tier)
    distances = []
    for seed in range(4):
        tried = engine(seed)
        distances.append(distance(tried, law_of(tried, "sampled", monkeypatch)))
    assert np.mean(distances) > 0.01


def test_discarding_after_looking_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second: a tentative token is looked at and then left out."""
    sound = nested.tentative_run

    def choosy(*args: object, **kwargs: object) -> Tentative:
        run = sound(*args, **kwargs)  # type: ignore[arg-type]
        keep = next((i for i, token in enumerate(run.token_ids) if token == 2), len(run.token_ids))
        rows = run.logits_KV[:keep] if keep and run.logits_KV is not None else None
        return replace(run, token_ids=run.token_ids[:keep], logits_KV=rows)

    monkeypatch.setattr(nested, "tentative_run", choosy)
    distances = []
    for seed in range(4):
        tried = engine(seed)
        distances.append(distance(tried, law_of(tried, "none", monkeypatch)))
    assert np.mean(distances) > 0.01


def sample_law(system: str, tried: ToyTiers, settings: dict[str, object], num_draws: int) -> Law:
    config = Config.model_validate({"tiers": settings})
    decoder = build_decoder(
        system, engine=tried, codec=ToyCodec(), config=config, parts=Parts(tiers=tried)
    )
    counts: Law = dict.fromkeys(itertools.product(range(VOCAB), repeat=LENGTH), 0)
    for seed in range(num_draws):
        sampling = SamplingParams(temperature=1.0, max_tokens=LENGTH, seed=seed, ignore_eos=True)
        request = Request(f"r{seed}", (PROMPT, 2, PROMPT), sampling, scope=f"s{seed}")
        counts[decoder.generate(request).token_ids] += 1
    return counts


@pytest.mark.parametrize("system", ["nested", "self_spec"])
@pytest.mark.parametrize("is_sampled", [False, True])
def test_the_sampler_follows_the_targets_law(system: str, is_sampled: bool) -> None:
    tried, num_draws = engine(3), 3000
    counts = sample_law(system, tried, {"is_sampled": is_sampled, "num_tentative": 2}, num_draws)
    expected = {sequence: num_draws * chain_prob(tried, sequence) for sequence in counts}
    common = [sequence for sequence, count in expected.items() if count >= 10]
    observed = [counts[sequence] for sequence in common]
    wanted = [expected[sequence] for sequence in common]
    observed.append(num_draws - sum(observed))
    wanted.append(num_draws - sum(wanted))
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    assert chisquare(observed, wanted).pvalue > 1e-3


def test_the_slim_model_saves_passes_of_the_target() -> None:
    target = ToyEngine(vocab_size=12, order=1, seed=4, sharpness=8.0)
    tried = ToyTiers(target, closeness=0.9)
    plain = decode("greedy", tried)
    assert decode("self_spec", tried).token_ids == plain.token_ids
    assert decode("self_spec", tried).num_target_passes < 0.5 * plain.num_target_passes


def decode(system: str, tried: ToyTiers):  # type: ignore[no-untyped-def]
    decoder = build_decoder(
        system, engine=tried, codec=ToyCodec(), config=Config(), parts=Parts(tiers=tried)
    )
    sampling = SamplingParams(max_tokens=60, ignore_eos=True)
    return decoder.generate(Request("r", (1,), sampling))


def test_a_run_ends_with_its_room() -> None:
    tried = engine(1)
    state = state_for(tried, Chance([]))
    state.context.room = 2
    state.distribution.sampling = SamplingParams()
    run = nested.tentative_run(tried, NO_DRAFT, state, num_tokens=9)
    assert len(run.token_ids) == 2
    assert run.num_passes == 2
