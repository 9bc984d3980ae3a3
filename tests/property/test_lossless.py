"""Invariants 1, 3 and 6: drafting changes how fast the answer comes, never the answer."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_ray.engines.toy import ToyEngine
from hvd_ray.errors import UserError
from hvd_ray.types import Completion, Request, SamplingParams, Source
from tests.property.toy_requests import (
    HEADLESS_SYSTEMS,
    NESTED_SYSTEMS,
    decoder,
    engines,
    lossless_systems,
    requests,
)


def plainly(engine: ToyEngine, request: Request) -> Completion:
    return decoder("greedy", engine).generate(request)


def outcome(completion: Completion) -> tuple[object, ...]:
    logprobs = completion.logprobs
    chosen = None if logprobs is None else [(p.logprob, p.rank, p.top) for p in logprobs]
    return (
        completion.token_ids,
        completion.text,
        completion.finish_reason,
        completion.stop_reason,
        chosen,
    )


@given(engines, requests(), lossless_systems)
def test_every_system_gives_the_plain_answer(
    engine: ToyEngine, request: Request, system: str
) -> None:
    assert outcome(decoder(system, engine).generate(request)) == outcome(plainly(engine, request))


@given(engines, requests(), lossless_systems, st.integers(2, 4))
def test_a_warm_cache_gives_the_plain_answer(
    engine: ToyEngine, request: Request, system: str, times: int
) -> None:
    warm = decoder(system, engine)
    for number in range(times):
        repeated = dataclasses.replace(request, request_id=f"r{number}")
        assert outcome(warm.generate(repeated)) == outcome(plainly(engine, request))


@given(engines, requests(), lossless_systems)
def test_a_cycle_emits_and_stays_in_its_room(
    engine: ToyEngine, request: Request, system: str
) -> None:
    """Invariant 3; the steps account for every token and every target pass."""
    warm = decoder(system, engine)
    warm.generate(request)
    engine.num_passes = 0
    completion = warm.generate(request)
    room = min(request.sampling.max_tokens, engine.context_length - len(request.prompt_token_ids))
    position = 0
    for step in completion.steps:
        assert step.position == position
        assert step.emitted >= 1
        assert 0 <= step.accepted <= step.drafted <= room - position - 1
        assert step.emitted <= step.accepted + 1 or step.slim_passes > 0
        assert (step.drafted == 0) == (step.source is Source.NONE)
        position += step.emitted
    assert position == len(completion.token_ids)
    assert completion.num_target_passes == len(completion.steps) == engine.num_passes


@given(engines, requests(), lossless_systems)
def test_interleaved_requests_do_not_disturb_each_other(
    engine: ToyEngine, request: Request, system: str
) -> None:
    shared = decoder(system, engine)
    first = shared.start(dataclasses.replace(request, request_id="one"))
    second = shared.start(
        dataclasses.replace(
            request, request_id="two", prompt_token_ids=request.prompt_token_ids[::-1]
        )
    )
    while not (first.is_finished and second.is_finished):
        for generation in (first, second):
            if not generation.is_finished:
                shared.step(generation)
    for generation in (first, second):
        shared.close(generation)
        assert outcome(generation.completion()) == outcome(plainly(engine, generation.request))


@pytest.mark.parametrize("system", [*HEADLESS_SYSTEMS[1:], *NESTED_SYSTEMS])
def test_the_comparison_is_not_vacuous(system: str) -> None:
    """On predictable text every drafting system saves passes, so the tests above test something."""
    engine = ToyEngine(vocab_size=12, order=1, seed=4, sharpness=8.0)
    warm = decoder(system, engine)
    request = Request("r", (1,), SamplingParams(max_tokens=60, ignore_eos=True))
    warm.generate(request)
    assert warm.generate(request).emitted_per_pass > 1.3


def test_a_step_after_the_end_is_refused_and_closing_twice_is_harmless() -> None:
    engine = ToyEngine()
    tried = decoder("suffix", engine)
    generation = tried.start(Request("r", (1, 2), SamplingParams(max_tokens=1)))
    tried.step(generation)
    with pytest.raises(ValueError, match="has ended"):
        tried.step(generation)
    tried.close(generation)
    tried.close(generation)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidding_every_token_is_refused(temperature: float) -> None:
    engine = ToyEngine(vocab_size=6)
    sampling = SamplingParams(
        temperature=temperature, max_tokens=4, min_tokens=4, stop_token_ids=tuple(range(6)), seed=1
    )
    with pytest.raises(UserError, match="forbid every token"):
        decoder("suffix", engine).generate(Request("r", (1, 2), sampling))
