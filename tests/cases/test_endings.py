"""Ending a generation inside an accepted run (cases T01 to T12)."""

from __future__ import annotations

import pytest

from hvd_ray.drafting.suffix import SuffixDrafter
from hvd_ray.engines.toy import EOS
from hvd_ray.types import Request
from tests.cases.decoding import longest_draft, params, same, warm, with_an_eos

STOP_AT = (3, 20)
"""Where the stop string begins: near the start of the accepted run, and late in it."""


@pytest.mark.parametrize("start", STOP_AT)
def test_t01_a_stop_string_inside_a_long_accepted_run(start: int) -> None:
    cached = warm()
    stop = cached.answer.text[start : start + 3]
    completion = cached.ask(stop=(stop,))
    assert longest_draft(completion) > start + 3, "the draft ran past the stop"
    assert completion.finish_reason == "stop"
    assert stop not in completion.text
    assert completion.text == cached.answer.text[: cached.answer.text.index(stop)]


def test_t02_text_tokens_logprobs_and_steps_end_at_the_same_token() -> None:
    cached = warm()
    completion = cached.ask(stop=(cached.answer.text[10:13],), logprobs=2)
    assert longest_draft(completion) > 13
    assert completion.logprobs is not None
    assert len(completion.token_ids) == len(completion.logprobs) == 13
    assert sum(step.emitted for step in completion.steps) == 13
    assert same(completion, cached.ask_plainly(stop=(cached.answer.text[10:13],), logprobs=2))


@pytest.mark.parametrize(("budget", "reason"), [(20, "stop"), (8, "length")])
def test_t03_a_stop_inside_the_budget_wins_and_one_beyond_it_does_not(
    budget: int, reason: str
) -> None:
    cached = warm()
    tokens = cached.answer.token_ids
    place = next(i for i in range(9, 19) if tokens.index(tokens[i]) == i)
    completion = cached.ask(stop_token_ids=(tokens[place],), max_tokens=budget)
    assert completion.finish_reason == reason
    assert len(completion.token_ids) == min(place + 1, budget)


def test_t05_t06_nothing_behind_an_eos_is_kept() -> None:
    cached = with_an_eos()
    end = cached.answer.token_ids.index(EOS) + 1
    completion = cached.ask(ignore_eos=False)
    assert longest_draft(completion) > end, "the draft ran past the EOS"
    assert completion.token_ids == cached.answer.token_ids[:end]
    assert completion.finish_reason == "stop"


def test_t06_what_a_run_emitted_behind_its_end_never_drafts() -> None:
    """The cache learns of trimmed tokens only, though the target computed more."""
    cached = warm()
    drafter = cached.decoder.cache_drafter
    assert isinstance(drafter, SuffixDrafter)
    before = drafter.num_cached_tokens
    completion = cached.ask(stop=(cached.answer.text[6:9],))
    assert longest_draft(completion) > 9
    assert drafter.num_cached_tokens - before == len(completion.token_ids) == 9


def test_t06_history_hears_of_trimmed_tokens_only() -> None:
    """A policy judges drafts by their fate; what lies behind the end is nobody's fate."""
    cached = warm()
    sampling = params(stop=(cached.answer.text[6:9],))
    generation = cached.decoder.start(Request("cut", cached.prompt, sampling))
    while not generation.is_finished:
        cached.decoder.step(generation)
    cached.decoder.close(generation)
    completion, history = generation.completion(), generation.context.history
    assert longest_draft(completion) > 9
    assert history.num_since_mismatch == len(completion.token_ids) == 9
    assert not history.outcomes, "the draft went on, so its end is not known"


def test_t08_usage_is_counted_on_trimmed_tokens() -> None:
    cached = with_an_eos()
    completion = cached.ask(ignore_eos=False)
    steps = completion.steps
    assert sum(step.emitted for step in steps) == len(completion.token_ids)
    assert all(step.accepted <= step.emitted for step in steps)


@pytest.mark.parametrize("least", [0, 1, 8, 9])
def test_t09_eos_is_masked_exactly_below_min_tokens(least: int) -> None:
    """EOS is wanted at once; a draft that crosses `min_tokens` may not let it through early."""
    wanted = {EOS: 100.0}
    cached = warm(logit_bias=wanted, min_tokens=least)
    completion = cached.ask(logit_bias=wanted, min_tokens=least, ignore_eos=False)
    assert len(completion.token_ids) == least + 1
    assert completion.token_ids.index(EOS) == least
    if least >= 8:
        assert longest_draft(completion) > 1
    plain = cached.ask_plainly(logit_bias=wanted, min_tokens=least, ignore_eos=False)
    assert same(completion, plain)


@pytest.mark.parametrize("left", [1, 2, 3, 10])
def test_t11_drafts_stay_inside_the_context(left: int) -> None:
    """A prompt that all but fills the context, and a long cached continuation of it."""
    cached = warm()
    assert cached.engine.context_length == 512, "the toy engine refuses rows beyond its context"
    filler = (1, 2, 3) * 200
    head = filler[: 512 - left - 20]
    long_prompt = (*head, *cached.answer.token_ids[:20])
    completion = cached.ask(long_prompt)
    assert completion.finish_reason == "length"
    assert len(completion.token_ids) == left
    assert all(step.drafted <= left - step.position - 1 for step in completion.steps)
    assert same(completion, cached.ask_plainly(long_prompt))
