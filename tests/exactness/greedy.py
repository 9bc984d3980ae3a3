"""Plain decoding's tokens against every system's, prompt after prompt, until enough were compared.

Each prompt is answered once by plain decoding and once by every arm. A prompt's rows are appended
to a file when all its arms are done, and a prompt in the file is not asked again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from itertools import chain, islice, zip_longest
from multiprocessing import get_context
from pathlib import Path
from typing import Protocol

import torch

from hvd_ray.bench.workloads import Prompt, load_prompts, load_shipped
from hvd_ray.config import DEFAULT_MODEL, Config
from hvd_ray.decode import Decoder
from hvd_ray.engines.torch_engine import quiet_libraries
from hvd_ray.fetch import resolve_model
from hvd_ray.parts.payoff import find_payoff
from hvd_ray.payoff.cost import RowCosts
from hvd_ray.systems import Parts
from hvd_ray.types import Completion, Request
from tests.exactness.arms import ARMS, CONFIG, Arm, Model, num_differing, tell

PUBLIC_PROMPTS = Path(__file__).parents[3] / "shared" / "data" / "prompts"
"""Prompt files beside the checkout, where there are some."""
COSTS = RowCosts((1, 2, 8, 64), (40.0, 70.0, 90.0, 200.0))
"""About what passes take in float32; which drafts are made depends on it, the tokens must not."""


@dataclass(frozen=True)
class Row:
    """One answer of one arm, compared with plain decoding's."""

    workload: str
    prompt_id: str
    arm: str
    tokens: int
    differing: int
    drafted: int
    accepted: int
    passes: int
    commit: str


@dataclass(frozen=True)
class Task:
    prompt: Prompt
    max_tokens: int
    commit: str


class Progress(Protocol):
    def expect(self, total: int) -> None: ...
    def advance(self, done: int, text: str) -> None: ...


def prompts_in_turn() -> list[Prompt]:
    """The shortest of each workload, the second shortest of each, and so on."""
    prompts = list(load_shipped().prompts)
    if PUBLIC_PROMPTS.is_dir():
        prompts += load_prompts(sorted(PUBLIC_PROMPTS.glob("*.jsonl"))).prompts
    by_workload: dict[str, list[Prompt]] = {}
    for prompt in sorted(prompts, key=_num_chars):
        by_workload.setdefault(prompt.workload, []).append(prompt)
    rounds = chain.from_iterable(zip_longest(*by_workload.values()))
    return [prompt for prompt in rounds if prompt is not None]


def _num_chars(prompt: Prompt) -> int:
    return len(prompt.prompt or "") + sum(len(message.content) for message in prompt.messages)


def read_rows(file: Path) -> list[Row]:
    if not file.exists():
        return []
    return [Row(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def compare(
    file: Path,
    *,
    num_tokens: int,
    max_tokens: int,
    num_workers: int,
    commit: str,
    progress: Progress,
) -> list[Row]:
    """Go on until `num_tokens` were compared, those in `file` included; all rows."""
    rows = read_rows(file)
    asked = {(row.workload, row.prompt_id) for row in rows}
    waiting = (
        Task(prompt, max_tokens, commit)
        for prompt in prompts_in_turn()
        if (prompt.workload, prompt.id) not in asked
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    progress.expect(num_tokens)
    done = sum(row.tokens for row in rows)
    with ProcessPoolExecutor(num_workers, get_context("spawn"), _load) as pool:
        for answered in _answers(pool, waiting, num_workers):
            rows += answered
            with file.open("a", encoding="utf-8") as out:
                out.writelines(json.dumps(asdict(row)) + "\n" for row in answered)
            done += sum(row.tokens for row in answered)
            num_bad = sum(row.differing for row in rows)
            progress.advance(done, f"{len(rows)} answers, {num_bad} tokens differ")
            if done >= num_tokens:
                pool.shutdown(wait=True, cancel_futures=True)
                break
    return rows


def _answers(
    pool: ProcessPoolExecutor, tasks: Iterator[Task], num_workers: int
) -> Iterator[list[Row]]:
    """As they come, with no more tasks handed out than workers can take."""
    running: set[Future[list[Row]]] = {
        pool.submit(answer, task) for task in islice(tasks, num_workers)
    }
    while running:
        ended, running = wait(running, return_when=FIRST_COMPLETED)
        for future in ended:
            yield future.result()
            running |= {pool.submit(answer, task) for task in islice(tasks, 1)}


# -- in a worker ---------------------------------------------------------------------------------

_worker: dict[str, object] = {}


def _load() -> None:
    torch.set_num_threads(1)
    quiet_libraries()
    model = load_model()
    _worker["model"] = model
    _worker["decoders"] = {arm: model.decoder(arm) for arm in (Arm("greedy"), *ARMS)}


def load_model() -> Model:
    """The default model with the predictor that ships for it."""
    model = Model.load(Path(resolve_model(DEFAULT_MODEL).path_or_id), Parts())
    payoff = find_payoff(Config.model_validate(CONFIG.model_dump() | {"model": DEFAULT_MODEL}))
    vocab_size = model.engine.capabilities.vocab_size
    estimator = payoff.estimator(model.codec, vocab_size=vocab_size)
    return Model(model.engine, model.codec, Parts(estimator, COSTS))


def answer(task: Task) -> list[Row]:
    """A prompt by plain decoding, then by every arm; caches stay as earlier prompts left them."""
    model, decoders = _worker["model"], _worker["decoders"]
    assert isinstance(model, Model)
    assert isinstance(decoders, dict)
    request = model.request(task.prompt, task.max_tokens)
    wanted = decoders[Arm("greedy")].generate(request)
    return [answer_of(arm, decoders[arm], request, wanted, task) for arm in ARMS]


def answer_of(arm: Arm, decoder: Decoder, request: Request, wanted: Completion, task: Task) -> Row:
    if arm.is_warm:
        tell(decoder, request, wanted)
    got = decoder.generate(request)
    is_other_end = (got.text, got.finish_reason) != (wanted.text, wanted.finish_reason)
    return Row(
        task.prompt.workload,
        task.prompt.id,
        arm.name,
        tokens=len(got.token_ids),
        differing=num_differing(got, wanted) or int(is_other_end),
        drafted=sum(step.drafted for step in got.steps),
        accepted=sum(step.accepted for step in got.steps),
        passes=got.num_target_passes,
        commit=task.commit,
    )


def by(rows: Sequence[Row], key: str) -> dict[str, list[Row]]:
    """Rows grouped by a column, in order of appearance."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(getattr(row, key), []).append(row)
    return groups
