"""Sampling correctness (cases S01 to S16) and log-probabilities."""

from __future__ import annotations

import math

import pytest

from hvd_ray.engines.toy import ToyEngine
from hvd_ray.types import Request, SamplingParams
from tests.cases.decoding import PROMPT, longest_draft, same, warm
from tests.property.toy_requests import HEADLESS_SYSTEMS, decoder

CHANGES = {
    "min_p": {"temperature": 1.0, "min_p": 0.3},
    "top_k": {"temperature": 1.0, "top_k": 2},
    "top_p": {"temperature": 1.0, "top_p": 0.4},
    "logit_bias": {"logit_bias": {3: 50.0, 5: -100.0}},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "negative frequency_penalty": {"frequency_penalty": -2.0},
    "min_tokens": {"min_tokens": 30, "logit_bias": {0: 100.0}, "ignore_eos": False},
    "low temperature": {"temperature": 0.1},
}


@pytest.mark.parametrize("system", HEADLESS_SYSTEMS)
def test_s01_greedy_is_the_same_with_every_system(system: str) -> None:
    engine = ToyEngine(vocab_size=24, order=3, seed=7, sharpness=6.0)
    plain = decoder("greedy", engine).generate(Request("r", PROMPT, SamplingParams(max_tokens=60)))
    tried = decoder(system, engine)
    for number in range(2):
        request = Request(f"r{number}", PROMPT, SamplingParams(max_tokens=60))
        assert same(tried.generate(request), plain)


@pytest.mark.parametrize("name", CHANGES)
def test_s03_s06_s08_every_parameter_acts_on_every_verified_row(name: str) -> None:
    """The cache drafts the whole answer that was given *without* the parameter, and with it."""
    sampling = {"seed": 11, **CHANGES[name]}
    for cached in (warm(seed=11), warm(**sampling)):
        completion = cached.ask(**sampling)
        assert longest_draft(completion) > 3
        assert same(completion, cached.ask_plainly(**sampling))


def test_s03_a_forbidden_token_never_comes_back_through_a_draft() -> None:
    cached = warm()
    forbidden = cached.answer.token_ids[5]
    completion = cached.ask(logit_bias={forbidden: -100.0})
    assert forbidden not in completion.token_ids
    assert longest_draft(completion) > 3


def test_s04_penalties_see_the_draft_before_each_row() -> None:
    """A draft that repeats one token: each row is penalised for those before it."""
    engine = ToyEngine(vocab_size=6, order=1, seed=0, sharpness=0.1)
    favour = {2: 5.0}
    sampling = {"logit_bias": favour, "frequency_penalty": 1.0, "max_tokens": 24}
    cached = warm(engine, logit_bias=favour, max_tokens=24)
    assert set(cached.answer.token_ids) == {2}, "without the penalty one token repeats"
    completion = cached.ask(**sampling)
    assert longest_draft(completion) >= 4
    assert set(completion.token_ids) != {2}
    assert same(completion, cached.ask_plainly(**sampling))


def test_s11_unseeded_requests_have_streams_of_their_own() -> None:
    engine = ToyEngine(vocab_size=24, order=3, seed=7, sharpness=1.0)
    tried = decoder("suffix", engine)
    sampling = SamplingParams(temperature=1.5, max_tokens=40, ignore_eos=True)
    outputs = {tried.generate(Request(f"r{n}", PROMPT, sampling)).token_ids for n in range(8)}
    assert len(outputs) == 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_s13_one_logprob_for_each_emitted_token_equal_to_the_plain_one(temperature: float) -> None:
    sampling = {"temperature": temperature, "seed": 5, "logprobs": 3}
    cached = warm(temperature=temperature, seed=5)
    completion, plain = cached.ask(**sampling), cached.ask_plainly(**sampling)
    assert longest_draft(completion) > 10
    assert completion.logprobs is not None
    assert plain.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    for one, other in zip(completion.logprobs, plain.logprobs, strict=True):
        assert math.isclose(one.logprob, other.logprob, abs_tol=1e-6)
        assert (one.rank, one.top) == (other.rank, other.top)
    assert any(each.logprob < -1e-4 for each in completion.logprobs), "not all zero"


def test_s16_what_was_drafted_stands_beside_what_was_accepted() -> None:
    cached = warm()
    completion = cached.ask(logit_bias={cached.answer.token_ids[5]: -100.0})
    drafted = sum(step.drafted for step in completion.steps)
    accepted = sum(step.accepted for step in completion.steps)
    assert drafted > accepted > 0
    assert accepted + len(completion.steps) == len(completion.token_ids)
