"""What `hvd drafter train` and `hvd drafter eval` do, from files to files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from hvd_ray.drafting.eagle3 import Eagle3Head
from hvd_ray.drafting.eagle3_checkpoint import load_head, save_head, target_shape
from hvd_ray.drafting.eagle3_eval import DraftQuality, by_workload, evaluate
from hvd_ray.drafting.eagle3_init import (
    config_for_target,
    draft_vocabulary,
    weights_from_target,
)
from hvd_ray.drafting.eagle3_responses import (
    CutAt,
    Response,
    read_responses,
    refuse_odd_responses,
    uncut,
)
from hvd_ray.drafting.eagle3_states import ResponseStates, StateCache, TargetStates
from hvd_ray.drafting.eagle3_training import LogMetrics, TrainConfig, Trainer, World, aux_std, train
from hvd_ray.errors import UserError
from hvd_ray.home import atomic_path
from hvd_ray.targets.identity import vocab_size_of
from hvd_ray.targets.loading import load_model


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """Where the data and the results of a training run lie."""

    target: Path
    """A transformers folder."""
    data: tuple[Path, ...]
    """Folders of Parquet shards of responses."""
    run: Path
    """Checkpoints and the finished head; a run that is there is continued."""
    draft_vocab_size: int = 16_384
    state_cache: Path | None = None
    state_cache_gb: float = 0.0
    max_prompt_tokens: int = 1200
    cut_at: CutAt = uncut
    """Where an output begins to loop; a loop teaches the head nothing."""
    init_head: Path | None = None
    """Go on from another run's finished head instead of the target's own layers."""


def check_responses(job: TrainJob) -> None:
    """Read all responses once, before a training is begun that would meet a bad one hours later.

    Raises:
        UserError: there are none, or one is damaged or has a token that the target does not have.
    """
    refuse_odd_responses(find_shards(job.data), num_token_ids=vocab_size_of(job.target))


def run_training(
    job: TrainJob, config: TrainConfig, *, log_metrics: LogMetrics, world: World | None = None
) -> Path:
    """Train and save the head; returns its folder, `run/head`.

    Called by each of several workers with its own `world`, all train one head together.

    Raises:
        UserError: no data, a damaged row, or a target or a starting head that does not fit.
    """
    shards = find_shards(job.data)
    model = load_target(job.target)
    init = None
    if job.init_head is not None:
        init = load_head(job.init_head, target=target_shape(model))
    head = init or _fresh_head(job, model, shards)
    states = TargetStates(model, aux_layer_ids=head.config.aux_layer_ids)
    cache = StateCache(
        job.state_cache,
        target=states,
        budget_gb=job.state_cache_gb,
        max_prompt_tokens=job.max_prompt_tokens,
        cut_at=job.cut_at,
    )
    trainer = Trainer(
        config,
        head_config=head.config,
        weights=head.weights,
        aux_std_A=aux_std(cache, shards[0]),
        world=world,
    )
    quality = train(trainer, cache=cache, shards=shards, run=job.run, log_metrics=log_metrics)
    folder = job.run / "head"
    if not trainer.world.is_first:
        return folder
    save_head(Eagle3Head(head.config, trainer.export()), folder)
    (folder / "quality.json").write_text(json.dumps(quality_report(quality), indent=1) + "\n")
    return folder


def run_evaluation(
    head_folder: Path,
    *,
    target: Path,
    data: Sequence[Path],
    num_steps: int = 4,
    max_prompt_tokens: int = 4096,
    limit: int | None = None,
    cut_at: CutAt = uncut,
    on_response: Callable[[], None] = lambda: None,
    group: Callable[[Response], str] = by_workload,
) -> dict[str, DraftQuality]:
    """Teacher-forced draft quality on the greedy responses in `data`, by group.

    With a `limit` the responses are taken evenly over the shards.

    Raises:
        UserError: no data, a damaged row or a token that the target does not have, or a target or
            a head that does not fit.
    """
    shards = find_shards(data)
    refuse_odd_responses(shards, num_token_ids=vocab_size_of(target))
    model = load_target(target)
    head = load_head(head_folder, target=target_shape(model), dtype=model.dtype)
    head = Eagle3Head(head.config, head.weights.on(model.device))
    states = TargetStates(model, aux_layer_ids=head.config.aux_layer_ids, max_prompt=8192)
    responses = _spread(_greedy_responses(shards, max_prompt_tokens, cut_at), limit)
    each = _each(states, responses, on_response=on_response)
    return evaluate(head, each, num_steps=num_steps, group=group)


def _spread(responses: list[Response], limit: int | None) -> list[Response]:
    """`limit` of them at the most, evenly over the list."""
    if limit is None or len(responses) <= limit:
        return responses
    return [responses[index * len(responses) // limit] for index in range(limit)]


def _each(
    states: TargetStates, responses: Sequence[Response], *, on_response: Callable[[], None]
) -> Iterator[ResponseStates]:
    for response in responses:
        yield states.states(response)
        on_response()


def open_metrics(run: Path) -> TextIO:
    """`RUN/metrics.jsonl`, to append to: steps that will run again after a kill are taken out.

    A run goes on from its last checkpoint, so what it logged behind that would stand there twice.
    """
    run.mkdir(parents=True, exist_ok=True)
    file, pointer = run / "metrics.jsonl", run / "checkpoint.json"
    first = json.loads(pointer.read_text())["step"] if pointer.exists() else 0
    kept = list(_whole_lines(file, first)) if file.exists() else []
    with atomic_path(file) as draft:
        draft.write_text("".join(kept))
    return file.open("a")


def _whole_lines(file: Path, num_steps: int) -> Iterator[str]:
    """Lines of the first steps; a kill may have cut the last line short."""
    for line in file.read_text().splitlines(keepends=True):
        if line.endswith("\n") and json.loads(line)["step"] < num_steps:
            yield line


def set_threads(num_threads: int | None) -> None:
    """torch's threads; None leaves its own choice."""
    if num_threads is not None:
        torch.set_num_threads(num_threads)


def _greedy_responses(
    shards: Sequence[Path], max_prompt_tokens: int, cut_at: CutAt
) -> list[Response]:
    return [
        response
        for shard in shards
        for response in read_responses(
            shard, max_prompt_tokens=max_prompt_tokens, with_test_split=True, cut_at=cut_at
        )
        if response.temperature == 0
    ]


def quality_report(quality: Mapping[str, DraftQuality]) -> dict[str, Any]:
    """Plain numbers for JSON, by workload."""
    return {
        name: {
            "emitted_per_pass": round(each.emitted_per_pass, 4),
            "tokens": each.tokens,
            "accuracy_by_position": [round(value, 4) for value in each.accuracy_by_position],
            "acceptance_by_position": [round(value, 4) for value in each.acceptance_by_position],
        }
        for name, each in sorted(quality.items())
    }


def find_shards(folders: Sequence[Path]) -> list[Path]:
    """The Parquet shards under `folders`, in order of name.

    Raises:
        UserError: a folder holds none.
    """
    shards: list[Path] = []
    for folder in folders:
        found = sorted(folder.glob("*.parquet")) or sorted(folder.glob("traces/*.parquet"))
        if not found:
            raise UserError(f"{folder} holds no responses: expected *.parquet")
        shards += found
    return shards


def load_target(folder: Path) -> Any:
    """The target in bfloat16, ready to be read, on a GPU where there is one."""
    model = load_model(folder, dtype=torch.bfloat16).eval()
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def _fresh_head(job: TrainJob, model: Any, shards: Sequence[Path]) -> Eagle3Head:
    vocabulary = _kept_vocabulary(job, model, shards)
    config = config_for_target(model, draft_vocab_size=len(vocabulary))
    return Eagle3Head(config, weights_from_target(model, config, vocabulary))


def _kept_vocabulary(job: TrainJob, model: Any, shards: Sequence[Path]) -> Tensor:
    """The draft vocabulary of this run; counted once, so that a resumed run has the same."""
    path = job.run / "draft_vocabulary.json"
    if path.exists():
        return torch.tensor(json.loads(path.read_text()))
    responses = (
        response
        for shard in shards
        for response in read_responses(
            shard, max_prompt_tokens=job.max_prompt_tokens, cut_at=job.cut_at
        )
    )
    vocabulary = draft_vocabulary(
        (response.output_token_ids for response in responses if not response.is_held_out),
        size=min(job.draft_vocab_size, model.config.vocab_size),
        vocab_size=model.config.vocab_size,
        always=_special_tokens(model),
    )
    job.run.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(vocabulary.tolist()))
    return vocabulary


def _special_tokens(model: Any) -> list[int]:
    end = model.config.eos_token_id
    return [end] if isinstance(end, int) else list(end or ())
