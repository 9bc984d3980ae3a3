"""`hvd bench --engine vllm`: the systems inside vLLM, against vLLM's own speculation.

All engines are loaded, and they are asked in turns, wave by wave, so that whatever else the machine
does meets all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hvd_ray.bench.cells import Arm, Sample
from hvd_ray.bench.engine_process import Answer, EngineProcess
from hvd_ray.bench.measure import WARM_UP_TOKENS, SampleStore
from hvd_ray.bench.plan import Plan, Question, has_no_memory
from hvd_ray.bench.quality import agreement
from hvd_ray.bench.result import Difference
from hvd_ray.bench.vllm_engines import (
    OWN_SOURCE,
    Engine,
    OpenEngine,
    Wave,
    opened_engines,
)
from hvd_ray.config import Config
from hvd_ray.types import Completion, FinishReason, Request, Source, Step

if TYPE_CHECKING:
    from hvd_ray.bench.session import Progress


def measure_in_vllm(
    plan: Plan,
    *,
    engines: Mapping[str, Engine],
    wave: Wave,
    on_request: Callable[[str], None],
    store: SampleStore | None = None,
) -> list[Sample]:
    """Measure a plan with engines that are ready; every one is cold at each workload's start.

    The first prompt is asked of all of them once before, briefly, and not counted. A wave that the
    store holds is not measured again; where others of its workload are, engines with a memory are
    asked it once more, so that they know what they would have known.
    """
    samples: list[Sample] = []
    is_warm = False
    turn = 0
    for workload, questions in plan.measured.items():
        waves = list(_waves(questions, wave.concurrency))
        known = [_stored(questions_together, store) for questions_together in waves]
        if not is_warm and None in known:
            _warm_up(questions[0], engines)
            is_warm = True
        for engine in engines.values() if None in known else ():
            engine.reset()
        for index, (questions_together, found) in enumerate(zip(waves, known, strict=True)):
            order = [plan.arms[(turn + i) % len(plan.arms)] for i in range(len(plan.arms))]
            turn += 1
            if found is None:
                found = _measured(questions_together, order, engines, workload, on_request)
                if wave.concurrency > 1:
                    found = [replace(sample, wave=index) for sample in found]
                _keep(found, store)
            elif None in known[index:]:
                _catch_up(questions_together, engines)
            samples += found
    return samples


def _waves(questions: Sequence[Question], size: int) -> Iterator[Sequence[Question]]:
    for start in range(0, len(questions), size):
        yield questions[start : start + size]


def _warm_up(question: Question, engines: Mapping[str, Engine]) -> None:
    sampling = replace(question.request.sampling, max_tokens=WARM_UP_TOKENS, min_tokens=0)
    for engine in engines.values():
        engine.serve([replace(question.request, sampling=sampling)])


def _measured(
    questions: Sequence[Question],
    order: Sequence[Arm],
    engines: Mapping[str, Engine],
    workload: str,
    on_request: Callable[[str], None],
) -> list[Sample]:
    """The samples of one wave, all arms of it in turn."""
    asked: list[Sample] = []
    for arm in order:
        asked += _ask(questions, arm, engines[arm.system])
        for _ in questions:
            on_request(f"{workload}: {arm.system}")
    return _compared(asked)


def num_missing(plan: Plan, concurrency: int, store: SampleStore | None) -> int:
    """Requests that the store does not spare."""
    waves = [w for q in plan.measured.values() for w in _waves(q, concurrency)]
    return len(plan.arms) * sum(len(wave) for wave in waves if _stored(wave, store) is None)


def _stored(questions: Sequence[Question], store: SampleStore | None) -> list[Sample] | None:
    """The samples of a wave where an earlier run has measured it whole."""
    if store is None:
        return None
    found = [store.stored(question) for question in questions]
    whole = [samples for samples in found if samples is not None]
    return [s for samples in whole for s in samples] if len(whole) == len(found) else None


def _keep(samples: Sequence[Sample], store: SampleStore | None) -> None:
    if store is None:
        return
    for prompt_id in dict.fromkeys(sample.prompt.id for sample in samples):
        store.keep([sample for sample in samples if sample.prompt.id == prompt_id])


def _catch_up(questions: Sequence[Question], engines: Mapping[str, Engine]) -> None:
    for system, engine in engines.items():
        if not has_no_memory(system):
            engine.serve([question.request for question in questions])


def _ask(questions: Sequence[Question], arm: Arm, engine: Engine) -> list[Sample]:
    """One sample a question; a wave's time is shared by its requests."""
    seconds, answers = engine.serve([question.request for question in questions])
    return [
        Sample(
            question.prompt,
            arm,
            question.request,
            _completion(question.request, answer, arm.system),
            seconds / len(questions),
        )
        for question, answer in zip(questions, answers, strict=True)
    ]


def _completion(request: Request, answer: Answer, system: str) -> Completion:
    reason: FinishReason = "length" if answer.finish_reason == "length" else "stop"
    steps = answer.steps
    if steps is None:
        steps = tuple(_steps(answer, OWN_SOURCE.get(system, Source.NONE)))
    return Completion(request.request_id, answer.token_ids, "", reason, steps=steps)


def _steps(answer: Answer, source: Source) -> Iterator[Step]:
    """The passes of a request. vLLM tells which drafts were verified, in order, but not in which
    passes: a draft of which nothing was accepted is taken for the next pass that emitted one."""
    drafts = list(answer.drafts)
    position = 0
    for cycle, emitted in enumerate(answer.emitted):
        drafted = accepted = 0
        is_last = cycle == len(answer.emitted) - 1
        if drafts and (drafts[0][1] == emitted - 1 or is_last):
            drafted, accepted = drafts.pop(0)
        yield Step(
            cycle=cycle,
            position=position,
            source=source if drafted else Source.NONE,
            drafted=drafted,
            accepted=min(accepted, emitted),
            emitted=emitted,
        )
        position += emitted


def _compared(samples: Sequence[Sample]) -> list[Sample]:
    """The samples of a wave with each output compared with greedy's."""
    greedy = {s.prompt.id: s.completion.token_ids for s in samples if s.arm.is_baseline}
    return [
        replace(
            sample,
            difference=_difference(sample, greedy[sample.prompt.id]),
            agreement=agreement(sample.completion.token_ids, greedy[sample.prompt.id]),
        )
        for sample in samples
    ]


def _difference(sample: Sample, reference: tuple[int, ...]) -> Difference | None:
    tokens = sample.completion.token_ids
    if tokens == reference:
        return None
    pairs = enumerate(zip(reference, tokens, strict=False))
    position = next((i for i, (a, b) in pairs if a != b), min(len(reference), len(tokens)))
    return Difference(sample.prompt.id, position, None)


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of the engines at one concurrency."""

    plan: Plan
    concurrency: int = 1
    store: SampleStore | None = None


def run_loads(
    loads: Sequence[Load],
    config: Config,
    *,
    max_model_len: int,
    progress: Progress,
    open_engine: OpenEngine = EngineProcess,
) -> list[list[Sample]]:
    """The samples of each load, with the same engines for all; none is started for nothing.

    Raises:
        UserError: a system has no place in vLLM, or an engine cannot be started.
    """
    missing = sum(num_missing(load.plan, load.concurrency, load.store) for load in loads)
    most = Wave(max(load.concurrency for load in loads), max_model_len)
    done = iter(range(1, missing + 1))
    with ExitStack() as opened:
        engines: dict[str, Engine] = {}
        if missing:
            arms = loads[0].plan.arms
            entered = opened_engines(arms, config, most, progress=progress, open_engine=open_engine)
            engines = opened.enter_context(entered)
            progress.stage("warming up")
            progress.expect(missing)
        return [
            measure_in_vllm(
                load.plan,
                engines=engines,
                wave=replace(most, concurrency=load.concurrency),
                on_request=lambda text: progress.advance(next(done), text),
                store=load.store,
            )
            for load in loads
        ]
