"""Exactness of verification: analytic on random small vocabularies, chi-square on the sampler."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from hvd_ray.context import DecodeContext
from hvd_ray.engines.toy import ToyCache
from hvd_ray.randomness import RandomStream, pick, seeded_generator
from hvd_ray.types import Draft, SamplingParams, Source, TokenBuffer
from hvd_ray.verify.exact import VerifyState, accept_sampled, accept_while_equal, choose_tokens
from hvd_ray.verify.sampling import RowDistribution
from tests.unit.verify.longhand import longhand

VOCAB = 5


def random_probs(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.dirichlet(np.full(VOCAB, 0.6), size=shape))


def first_token_law(proposal_V: torch.Tensor, probs_V: torch.Tensor) -> torch.Tensor:
    """Exact law of the first emitted token, by integrating over the three uniform numbers.

    The acceptance test and the residual are probed through the public function with uniforms just
    inside each interval, so a wrong residual or a wrong ratio shows.
    """
    law_V = torch.zeros(VOCAB, dtype=torch.float64)
    for token in range(VOCAB):
        mass = float(proposal_V[token])
        if mass == 0:
            continue
        accept = min(1.0, float(probs_V[token]) / mass)
        law_V[token] += mass * accept
        if accept < 1.0:
            law_V += mass * (1 - accept) * residual_law(token, accept, proposal_V, probs_V)
    return law_V


def residual_law(
    token: int, accept: float, proposal_V: torch.Tensor, probs_V: torch.Tensor
) -> torch.Tensor:
    """Law of the replacement after a rejection, read off the function's own answers on a grid."""
    grid = 20_000
    counts_V = torch.zeros(VOCAB, dtype=torch.float64)
    for point in range(0, grid, 20):
        uniforms = iter([(1 + accept) / 2, (point + 0.5) / grid])
        emitted = accept_sampled(
            [token],
            proposal_V[None],
            lambda _: probs_V,
            uniforms.__next__,
        )
        assert len(emitted) == 1, "the token must have been rejected"
        counts_V[emitted[0]] += 1
    return counts_V / counts_V.sum()


def test_sampled_draft_has_the_target_law() -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        proposal_V, probs_V = random_probs(rng), random_probs(rng)
        distance = (first_token_law(proposal_V, probs_V) - probs_V).abs().sum() / 2
        assert distance < 2e-3  # the grid's own resolution


@pytest.mark.parametrize("is_sampled", [False, True])
def test_joint_law_of_three_tokens(is_sampled: bool) -> None:
    """Chi-square over all triples: a Markov target, drafts of two tokens; `make exactness` draws
    50,000 for each sampling parameter."""
    rng = np.random.default_rng(1)
    target_VV, proposal_VV = random_probs(rng, VOCAB), random_probs(rng, VOCAB)
    draws = 10_000
    counts: dict[tuple[int, ...], int] = dict.fromkeys(itertools.product(range(VOCAB), repeat=3), 0)
    for number in range(draws):
        uniforms = np.random.default_rng([2, number])
        counts[_three_tokens(target_VV, proposal_VV, uniforms, is_sampled)] += 1
    expected = {
        (a, b, c): float(target_VV[0, a] * target_VV[a, b] * target_VV[b, c]) for a, b, c in counts
    }
    # merge the rare triples, as the chi-square approximation wants
    common = [key for key, mass in expected.items() if mass * draws >= 10]
    observed = [counts[key] for key in common]
    wanted = [expected[key] * draws for key in common]
    rest = draws - sum(observed)
    observed.append(rest)
    wanted.append(draws - sum(wanted))
    assert chisquare(observed, wanted).pvalue > 1e-3


def _three_tokens(
    target_VV: torch.Tensor,
    proposal_VV: torch.Tensor,
    uniforms: np.random.Generator,
    is_sampled: bool,
) -> tuple[int, ...]:
    """Decode three tokens from state 0 with drafts of two."""
    tokens: list[int] = [0]
    while len(tokens) < 4:
        draft: list[int] = []
        for _ in range(2):
            last = (tokens + draft)[-1]
            row_V = proposal_VV[last]
            draft.append(pick(row_V, uniforms.random()) if is_sampled else int(row_V.argmax()))
        prefix = [tokens[-1], *draft]
        if is_sampled:
            emitted = accept_sampled(
                draft,
                torch.stack([proposal_VV[token] for token in prefix[:-1]]),
                lambda row, prefix=prefix: target_VV[prefix[row]],  # type: ignore[misc]
                uniforms.random,
            )
        else:
            emitted = accept_while_equal(
                draft,
                lambda row, prefix=prefix: pick(target_VV[prefix[row]], uniforms.random()),  # type: ignore[misc]
            )
        tokens.extend(emitted)
    return tuple(tokens[1:4])


def test_a_sampled_draft_is_judged_by_the_requests_own_settings() -> None:
    """Cases S02 and S08: temperature, top-k and penalties act before the ratio, on every row."""
    rng = np.random.default_rng(5)
    logits_TV = torch.from_numpy(rng.normal(0, 1.5, (3, VOCAB)).astype(np.float32))
    proposal_KV = random_probs(rng, 2)
    sampling = SamplingParams(temperature=0.7, top_k=3, frequency_penalty=1.5, ignore_eos=True)
    distribution = RowDistribution(sampling, np.zeros(1, dtype=np.int32), (), VOCAB)
    context = DecodeContext(TokenBuffer((0,)), 1, max_tokens=9, room=2)
    first_V, second_VV = np.zeros(VOCAB), np.zeros((VOCAB, VOCAB))
    for number in range(3_000):
        uniforms = np.random.default_rng([6, number])
        tokens = tuple(pick(row_V, uniforms.random()) for row_V in proposal_KV)
        draft = Draft(Source.EAGLE3, tokens, proposal_probs_KV=proposal_KV.numpy())
        state = VerifyState(context, ToyCache(), distribution, RandomStream(None), uniforms)
        emitted = choose_tokens(logits_TV, draft, state)
        first_V[emitted[0]] += 1
        if len(emitted) > 1:
            second_VV[emitted[0], emitted[1]] += 1
    most = int(second_VV.sum(axis=1).argmax())
    for seen_V, row, before in ((first_V, 0, ()), (second_VV[most], 1, (most,))):
        law_V = distribution.probs(logits_TV[row], np.array(before, dtype=np.int32)).numpy()
        assert not seen_V[law_V == 0].any(), "a token that top-k forbids"
        possible_V = law_V > 0
        expected_V = law_V[possible_V] / law_V.sum() * seen_V.sum()
        assert chisquare(seen_V[possible_V], expected_V).pvalue > 1e-3


def test_dropping_a_sampled_draft_after_looking_is_caught() -> None:
    """The second silent breakage: the same chi-square fails when looked-at tokens are dropped."""
    rng = np.random.default_rng(3)
    probs_V = random_probs(rng)
    counts = np.zeros(VOCAB)
    for number in range(20_000):
        uniforms = np.random.default_rng([4, number])
        token = pick(probs_V, uniforms.random())  # drafter and target agree
        if token == int(probs_V.argmax()):  # a policy that looks, and drops what it does not like
            token = pick(probs_V, uniforms.random())
        counts[token] += 1
    assert chisquare(counts, probs_V.numpy() * 20_000).pvalue < 1e-6


def test_accept_while_equal_stops_at_the_first_difference() -> None:
    assert accept_while_equal([4, 5, 6], [4, 5, 9, 7].__getitem__) == (4, 5, 9)
    assert accept_while_equal([4, 5], [4, 5, 6].__getitem__) == (4, 5, 6)
    assert accept_while_equal([], [3].__getitem__) == (3,)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.5},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.3},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 0.8},
        {"logit_bias": {2: 3.0}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_sampler_follows_a_plain_restatement(changes: dict[str, object]) -> None:
    """Chi-square of the sampler against the parameter's definition written out longhand."""
    values = {"temperature": 1.0, **changes}
    sampling = SamplingParams(**values)  # type: ignore[arg-type]
    logits = np.array([1.2, 0.3, -0.4, 0.9, -1.0], dtype=np.float32)
    prompt, output = np.array([4], np.int32), np.array([0, 0, 3], np.int32)
    expected = longhand(logits.astype(np.float64), sampling, prompt, output)
    distribution = RowDistribution(sampling, prompt, (), VOCAB)
    probs_V = distribution.probs(torch.from_numpy(logits), output)
    np.testing.assert_allclose(probs_V.numpy(), expected, atol=1e-7)
    draws = seeded_generator(5).random(50_000)
    counts = np.bincount([pick(probs_V, uniform) for uniform in draws], minlength=VOCAB)
    kept = expected > 0
    assert counts[~kept].sum() == 0
    assert chisquare(counts[kept], expected[kept] * len(draws)).pvalue > 1e-3


def test_penalties_see_the_draft_before_each_row() -> None:
    """Case S04: row i is penalised for the draft tokens before it."""
    sampling = SamplingParams(frequency_penalty=2.0)
    distribution = RowDistribution(sampling, np.array([1], np.int32), (), VOCAB)
    logits_V = torch.tensor([0.0, 3.0, 0.0, 0.0, 0.0])
    output = np.array([1, 1], np.int32)
    assert float(distribution.logits(logits_V, output[:1])[1]) == 1.0
    assert float(distribution.logits(logits_V, output)[1]) == -1.0
    assert float(logits_V[1]) == 3.0, "the engine's logits are left alone"


def test_penalties_are_taken_where_the_logits_lie() -> None:
    """`meta`, like a GPU, refuses a sum with what lies on the CPU."""
    sampling = SamplingParams(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3)
    distribution = RowDistribution(sampling, np.array([1], np.int32), (), VOCAB)
    logits_V = torch.empty(VOCAB, device="meta")
    assert distribution.logits(logits_V, np.array([1, 1, 2], np.int32)).is_meta


def test_min_tokens_masks_the_right_rows() -> None:
    """Case T09: EOS is masked at row i iff fewer than min_tokens stand before it."""
    sampling = SamplingParams(min_tokens=2)
    distribution = RowDistribution(sampling, np.array([1], np.int32), (0,), VOCAB)
    logits_V = torch.zeros(VOCAB)
    for num_output in range(4):
        row_V = distribution.logits(logits_V, np.ones(num_output, np.int32))
        assert bool(torch.isinf(row_V[0])) == (num_output < 2)


def test_the_random_numbers_belong_to_the_position() -> None:
    probs_V = torch.full((500,), 1 / 500, dtype=torch.float64)
    first, second = RandomStream(7), RandomStream(7)
    forwards = [first.sample(probs_V, position) for position in range(50)]
    backwards = [second.sample(probs_V, position) for position in reversed(range(50))]
    assert forwards == backwards[::-1]
    assert len(set(forwards)) > 40
    other, *unseeded = (
        [RandomStream(seed).sample(probs_V, p) for p in range(50)] for seed in (8, None, None)
    )
    assert other != forwards
    assert unseeded[0] != unseeded[1]


def test_the_race_follows_the_law_and_never_picks_the_impossible() -> None:
    probs_V = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.15, 0.05, 0.0], dtype=torch.float64)
    stream, draws = RandomStream(3), 20_000
    counts_V = np.bincount([stream.sample(probs_V, p) for p in range(draws)], minlength=7)
    possible = probs_V.numpy() > 0
    assert counts_V[~possible].sum() == 0
    assert chisquare(counts_V[possible], probs_V.numpy()[possible] * draws).pvalue > 1e-3


def test_rounding_in_a_long_tail_does_not_pick_another_token() -> None:
    """A pass over more rows rounds otherwise; with an inverse cumulative distribution a tenth of
    these samples, which come from a tail of rare tokens, would be other ones."""
    rng = np.random.default_rng(0)
    differing = 0
    for seed in range(300):
        logits_V = rng.normal(size=50_000) * 0.5
        noisy_V = logits_V + rng.normal(size=50_000) * 1e-5
        pair = [torch.softmax(torch.from_numpy(x), dim=0) for x in (logits_V, noisy_V)]
        first, second = (RandomStream(seed).sample(probs_V, 4) for probs_V in pair)
        differing += first != second
    assert differing <= 1


def test_pick_never_returns_an_impossible_token() -> None:
    probs_V = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0], dtype=torch.float64)
    assert pick(probs_V, 0.0) == 1
    assert pick(probs_V, 0.5) == 3
    assert pick(probs_V, np.nextafter(1.0, 0.0)) == 3
