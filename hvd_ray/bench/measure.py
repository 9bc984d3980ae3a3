"""Asks every prompt of every system, in turns, and takes the time.

The systems are interleaved prompt by prompt and their order turns from prompt to prompt, so that
whatever else the machine does meets all of them alike. Every output is compared with greedy's.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Protocol

import numpy as np

from hvd_ray.bench.cells import Arm, Sample
from hvd_ray.bench.plan import Plan, Question
from hvd_ray.bench.quality import SCORERS, agreement
from hvd_ray.bench.result import BASELINE, Difference
from hvd_ray.context import DecodeContext
from hvd_ray.drafting.base import Drafter
from hvd_ray.engines.base import Engine
from hvd_ray.payoff.policy import Candidates, Policy
from hvd_ray.types import Completion, Draft, Request, Source, TokenBuffer

WARM_UP_TOKENS = 16
WARM_UP_ROWS = 65
"""The longest draft and the committed token before it."""


class Measured(Protocol):
    """Whatever answers requests in a run: a `Decoder`, or a rival dressed as one."""

    @property
    def engine(self) -> Engine: ...

    @property
    def policy(self) -> Policy: ...

    @property
    def cache_drafter(self) -> Drafter | None: ...

    def generate(self, request: Request) -> Completion: ...


class SampleStore(Protocol):
    """Keeps what is measured, prompt by prompt, so that a run that was killed goes on."""

    def stored(self, question: Question) -> list[Sample] | None:
        """The samples of a prompt, one an arm, where an earlier run has measured it."""
        ...

    def keep(self, samples: Sequence[Sample]) -> None:
        """Store the samples of one prompt, all arms of it."""
        ...


BuildDecoder = Callable[[str], Measured]
"""What answers for a system's name, its cache empty."""
Told = Callable[[str], None]
"""Called once after each request, with what was asked of whom."""


def measure(
    plan: Plan,
    *,
    build: BuildDecoder,
    on_request: Told | None = None,
    store: SampleStore | None = None,
) -> list[Sample]:
    """Measure a plan.

    Every arm has a decoder of its own, new for each workload; a warm one has then observed the
    target's outputs for the workload's filling. Nothing of the engine is shared but its weights.
    What the store holds already is not measured again: it enters the arms' caches as if it were.
    """
    tell = on_request or (lambda _: None)
    samples: list[Sample] = []
    known = _stored(plan, store)
    if not known.keys() >= {
        q.request.request_id for asked in plan.measured.values() for q in asked
    }:
        _warm_up(plan, build)
    with _frozen_heap():
        for workload, questions in plan.measured.items():
            if all(question.request.request_id in known for question in questions):
                samples += [sample for q in questions for sample in known[q.request.request_id]]
                continue
            outputs = _answer(plan.filling.get(workload, ()), build, tell)
            decoders = {arm: _open(arm, build, outputs) for arm in plan.arms}
            for question in questions:
                found = known.get(question.request.request_id)
                if found is not None:
                    _catch_up(found, decoders)
                    samples += found
                    continue
                asked = list(_ask_in_turn(question, decoders, tell, turn=len(samples)))
                compared = compare(asked, decoders[plan.arms[0]].engine)
                if store is not None:
                    store.keep(compared)
                samples += compared
    return samples


def _stored(plan: Plan, store: SampleStore | None) -> dict[str, list[Sample]]:
    """What an earlier run has measured, by request id."""
    if store is None:
        return {}
    questions = [question for asked in plan.measured.values() for question in asked]
    found = {q.request.request_id: store.stored(q) for q in questions}
    return {name: samples for name, samples in found.items() if samples is not None}


def compare(samples: Sequence[Sample], engine: Engine) -> list[Sample]:
    """One prompt's samples with each output compared with greedy's, outside the timing."""
    greedy = next(sample for sample in samples if sample.arm.is_baseline)
    return [
        replace(
            sample,
            difference=_first_difference(sample, greedy.completion.token_ids, engine),
            is_identical_in_one_pass=_reads_back(sample, engine) if sample is greedy else None,
            agreement=agreement(sample.completion.token_ids, greedy.completion.token_ids),
            quality=_quality(sample, greedy),
        )
        for sample in samples
    ]


def _quality(sample: Sample, greedy: Sample) -> float | None:
    if sample.prompt.workload not in SCORERS:
        return None
    _, score = SCORERS[sample.prompt.workload]
    return score(sample.prompt, sample.completion.text, greedy.completion.text)


def _warm_up(plan: Plan, build: BuildDecoder) -> None:
    """Do once what costs more the first time; nothing of it is counted or remembered.

    Kernels are chosen for each number of rows, features are compiled at their first use.
    """
    question = next(iter(plan.measured.values()))[0]
    sampling = replace(question.request.sampling, max_tokens=WARM_UP_TOKENS, min_tokens=0)
    request = replace(question.request, sampling=sampling)
    for system in dict.fromkeys(arm.system for arm in plan.arms):
        decoder = build(system)
        decoder.generate(request)
        _decide_once(decoder.policy, request)
    _run_each_shape(build(BASELINE).engine)


def _decide_once(policy: Policy, request: Request) -> None:
    token_ids = request.prompt_token_ids[:WARM_UP_TOKENS]
    probs = (0.5,) * len(token_ids)
    draft = Draft(Source.SUFFIX, token_ids, probs, score=sum(probs), match_len=1)
    room = len(token_ids)
    context = DecodeContext(TokenBuffer(token_ids), len(token_ids), max_tokens=room, room=room)
    policy.decide(Candidates(cache=draft), context)


def _run_each_shape(engine: Engine) -> None:
    cache = engine.new_cache()
    most = min(WARM_UP_ROWS, engine.capabilities.context_length)
    for num_rows in range(1, most + 1):
        engine.forward(np.zeros(num_rows, np.int32), cache, num_logits=num_rows)
        engine.truncate(cache, 0)


def _answer(
    questions: Sequence[Question], build: BuildDecoder, tell: Told
) -> list[tuple[Request, Completion]]:
    """The target's own outputs, by plain decoding."""
    if not questions:
        return []
    decoder, answers = build(BASELINE), []
    for question in questions:
        answers.append((question.request, decoder.generate(question.request)))
        tell(f"{question.prompt.workload}: filling the warm caches")
    return answers


def _open(arm: Arm, build: BuildDecoder, outputs: Sequence[tuple[Request, Completion]]) -> Measured:
    """An arm's decoder at the start of a workload."""
    decoder = build(arm.system)
    if arm.cache == "warm":
        for request, completion in outputs:
            _remember(decoder, request, completion)
    return decoder


def _catch_up(samples: Sequence[Sample], decoders: Mapping[Arm, Measured]) -> None:
    """Leave each arm's cache as measuring the samples has left it."""
    for sample in samples:
        _remember(decoders[sample.arm], sample.request, sample.completion)


def _remember(decoder: Measured, request: Request, completion: Completion) -> None:
    if decoder.cache_drafter is not None:
        decoder.cache_drafter.start(request)
        decoder.cache_drafter.observe(request.request_id, completion.token_ids, None)
        decoder.cache_drafter.stop(request.request_id)


def _ask_in_turn(
    question: Question, decoders: Mapping[Arm, Measured], tell: Told, *, turn: int
) -> Iterator[Sample]:
    arms = list(decoders)
    first = turn // len(arms) % len(arms)
    gc.collect()
    for arm in arms[first:] + arms[:first]:
        yield _ask(question, arm, decoders[arm])
        tell(f"{question.prompt.workload}: {arm.system}")


def _ask(question: Question, arm: Arm, decoder: Measured) -> Sample:
    with _no_collection():
        started = perf_counter()
        completion = decoder.generate(question.request)
        seconds = perf_counter() - started
    return Sample(question.prompt, arm, question.request, completion, seconds)


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """Keep what is loaded already out of the collections between prompts: they take as long."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _no_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _first_difference(
    sample: Sample, reference: Sequence[int], engine: Engine
) -> Difference | None:
    token_ids = sample.completion.token_ids
    if token_ids == reference:
        return None
    pairs = enumerate(zip(reference, token_ids, strict=False))
    position = next((i for i, (a, b) in pairs if a != b), min(len(reference), len(token_ids)))
    margin = None
    if position < min(len(reference), len(token_ids)) and sample.request.sampling.is_greedy:
        prefix = np.array([*sample.request.prompt_token_ids, *reference[:position]], np.int32)
        logits_V = engine.forward(prefix, engine.new_cache(), num_logits=1).logits_TV[-1]
        margin = float(logits_V[reference[position]] - logits_V[token_ids[position]])
    return Difference(sample.prompt.id, position, margin)


def _reads_back(sample: Sample, engine: Engine) -> bool | None:
    """Whether one pass over prompt and output gives each output token again.

    A plain run of another batch shape: what it flips in bf16, no drafter is to blame for.
    """
    sampling, output = sample.request.sampling, sample.completion.token_ids
    is_plain = not (sampling.needs_history or sampling.logit_bias or sampling.min_tokens)
    if not (sampling.is_greedy and is_plain and output):
        return None
    tokens = np.array([*sample.request.prompt_token_ids, *output[:-1]], np.int32)
    logits_TV = engine.forward(tokens, engine.new_cache(), num_logits=len(output)).logits_TV
    return tuple(logits_TV.argmax(dim=-1).tolist()) == output
