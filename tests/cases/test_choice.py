"""Hybrid choice and load (cases H03 to H09), what is counted (M01), what is refused (V04)."""

from __future__ import annotations

import pytest

from hvd_ray.config import Config, load_config
from hvd_ray.context import DecodeContext, DraftHistory
from hvd_ray.engines.toy import ToyEngine
from hvd_ray.errors import UserError
from hvd_ray.payoff.cost import RowCosts
from hvd_ray.payoff.cost_policy import CostPolicy
from hvd_ray.payoff.policy import Candidates
from hvd_ray.types import Draft, Request, SamplingParams, Source, Step, TokenBuffer
from tests.cases.decoding import PROMPT, warm
from tests.property.toy_requests import HEADLESS_SYSTEMS, ScoreAsPayoff, decoder


def test_h07_the_cost_policy_takes_no_more_passes_than_the_better_single_source() -> None:
    """With rows for nothing, declining the cache can only lose."""
    cached = warm()
    engine = cached.engine
    passes = {}
    for system in ("suffix", "hvd_cost"):
        tried = decoder(system, engine)
        for number in range(3):
            request = Request(f"r{number}", PROMPT, SamplingParams(max_tokens=60, ignore_eos=True))
            passes[system] = tried.generate(request).num_target_passes
    assert passes["hvd_cost"] <= passes["suffix"] + 1


@pytest.mark.parametrize("system", HEADLESS_SYSTEMS)
def test_h08_every_cycle_says_what_was_decided_and_why(system: str) -> None:
    tried = decoder(system, ToyEngine(vocab_size=24, order=3, seed=7, sharpness=6.0))
    for number in range(2):
        request = Request(f"r{number}", PROMPT, SamplingParams(max_tokens=40))
        completion = tried.generate(request)
    for step in completion.steps:
        assert step.reason
        assert (step.source is Source.NONE) == (step.drafted == 0)
        assert (step.match_len > 0) == (step.cache_draft_len > 0)
    assert any(step.cache_draft_len for step in completion.steps) == (
        tried.cache_drafter is not None
    )


@pytest.mark.parametrize("least", [3, 6])
def test_h08_the_match_that_was_held_against_its_threshold_is_recorded(least: int) -> None:
    steps = repeated("rule_match", {"name": "rule_match", "min_match": least})
    assert {step.match_len >= least for step in steps} == {True, False}
    for step in steps:
        assert (step.drafted > 0) == (step.match_len >= least)
        sign = ">=" if step.drafted else "<"
        assert step.reason == f"match {step.match_len} {sign} {least}"


def test_h08_the_payoff_that_was_held_against_tau_is_recorded() -> None:
    tau = 2.5
    steps = repeated("hvd_tau", {"name": "hvd_tau", "tau": tau})
    judged = [step for step in steps if step.cache_draft_len]
    assert {step.drafted > 0 for step in judged} == {True, False}
    for step in judged:
        assert step.tau == tau
        assert step.predicted_payoff == step.score, "the stand-in for a predictor gives the score"
        assert (step.drafted > 0) == (step.score > tau)


def repeated(system: str, policy: dict[str, object]) -> list[Step]:
    """The cycles of four drawn answers, of which the cache knows a part."""
    config = Config.model_validate({"policy": policy})
    tried = decoder(system, ToyEngine(vocab_size=24, order=3, seed=7, sharpness=6.0), config)
    steps: list[Step] = []
    for seed in range(4):
        sampling = SamplingParams(temperature=0.7, seed=seed, max_tokens=60, ignore_eos=True)
        steps += tried.generate(Request(f"r{seed}", PROMPT, sampling)).steps
    return steps


def test_h09_a_likely_draft_is_declined_where_its_rows_cost_more_than_they_bring() -> None:
    """Acceptance alone would take it: 0.9 at every position."""
    draft = Draft(Source.SUFFIX, (1, 2, 3, 4), (0.9, 0.81, 0.73, 0.66), 3.1, match_len=4)
    context = DecodeContext(TokenBuffer((1, 2)), 2, max_tokens=50, room=40, history=DraftHistory())
    dear = RowCosts((1, 2, 8), (10.0, 40.0, 160.0))
    cheap = RowCosts((1, 2, 8), (10.0, 10.1, 10.2))
    candidates = Candidates(draft)
    assert CostPolicy(ScoreAsPayoff(), dear).decide(candidates, context).length == 0
    assert CostPolicy(ScoreAsPayoff(), cheap).decide(candidates, context).length == 4


def test_m01_passes_without_a_draft_count() -> None:
    """The headline divides by every pass; the mean over drafted steps alone would flatter."""
    cached = warm()
    forbidden = cached.answer.token_ids[5]
    completion = cached.ask(logit_bias={forbidden: -100.0})
    drafted = [step for step in completion.steps if step.drafted]
    assert len(drafted) < len(completion.steps), "the case needs passes without a draft"
    flattering = 1 + sum(step.accepted for step in drafted) / len(drafted)
    assert completion.emitted_per_pass < flattering
    assert completion.emitted_per_pass == len(completion.token_ids) / len(completion.steps)


def test_m02_accepted_emitted_and_passes_fit_together() -> None:
    """The convention: accepted leaves the bonus token out, emitted has it."""
    completion = warm().answer
    accepted = sum(step.accepted for step in completion.steps)
    emitted = sum(step.emitted for step in completion.steps)
    assert emitted == accepted + len(completion.steps)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("policy.taus=4", "policy.taus: unknown"),
        ("drafting.suffix.max_draft=4", "drafting.suffix.max_draft: unknown"),
        ("policy.name=suffx", "policy.name"),
        ("drafting.eagle3.num_tokens=0", "drafting.eagle3.num_tokens"),
    ],
)
def test_v04_a_setting_that_is_unknown_or_out_of_range_is_an_error(
    setting: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load_config(None, [setting])


def test_v04_a_setting_without_effect_warns() -> None:
    with pytest.warns(UserWarning, match=r"policy\.tau has no effect"):
        load_config(None, ["policy.name=suffix", "policy.tau=4"])
