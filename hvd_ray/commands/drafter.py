"""`hvd drafter`: collect responses, train an EAGLE-3 head on them, and measure a head."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hvd_ray.commands.arguments import sorted_out
from hvd_ray.commands.drafter_compare import COMPARE_EXAMPLE, compare
from hvd_ray.commands.drafter_convert import CONVERT_EXAMPLE, convert
from hvd_ray.commands.train_finished import HEAD, head_training_key, keep_answer, kept_answer
from hvd_ray.config import DEFAULT_MODEL, Config, load_config
from hvd_ray.errors import UserError

STEPS_PER_POINT = 10
"""Of the curves in MLflow; measurements are all there."""
MAX_SEED = 2**63 - 1
TRACKING_NOTE = "tracking_run"
"""In a run's folder for as long as its MLflow run has not ended."""

if TYPE_CHECKING:
    from hvd_ray.drafting.eagle3_job import TrainJob
    from hvd_ray.drafting.eagle3_training import LogMetrics
    from hvd_ray.tracking import Tracker

Target = Annotated[str, typer.Option("--target", help="smollm2-135m, a hub id or a folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Answer in JSON on stdout.")]
Data = Annotated[
    list[str],
    typer.Argument(
        metavar="FOLDER... [KEY=VALUE]...",
        help="Folders of Parquet shards of responses, and settings such as tracking.uri=none.",
    ),
]
Settings = Annotated[Path | None, typer.Option("--config", help="A YAML file of settings.")]


def register(app: typer.Typer) -> None:
    drafter = typer.Typer(
        name="drafter",
        help="Collect responses, train an EAGLE-3 head on them, measure a head.",
        no_args_is_help=True,
    )
    drafter.command(
        "collect",
        epilog="Example: `hvd drafter collect --out responses --own --prompts prompts/mbpp.jsonl`",
    )(collect)
    drafter.command("train", epilog="Example: `hvd drafter train responses --run runs/head`")(train)
    drafter.command(
        "eval",
        epilog="Example: `hvd drafter collect --test --prompts prompts/mbpp.jsonl --out held_out`, "
        "then `hvd drafter eval held_out --by family`",
    )(evaluate)
    drafter.command("compare", epilog=COMPARE_EXAMPLE)(compare)
    drafter.command("convert", epilog=CONVERT_EXAMPLE)(convert)
    app.add_typer(drafter)


def collect(
    out: Annotated[Path, typer.Option("--out", help="Folder for the shards; resumed.")],
    target: Target = DEFAULT_MODEL,
    prompts: Annotated[
        list[Path] | None, typer.Option("--prompts", help="Prompt files (JSON lines).")
    ] = None,
    shipped: Annotated[bool, typer.Option("--shipped", help="Add the shipped workloads.")] = False,
    own: Annotated[bool, typer.Option("--own", help="Add training prompts of our own.")] = False,
    kinds: Annotated[
        str | None,
        typer.Option(
            "--kinds",
            metavar="NAMES",
            help="With --own: these kinds alone, by comma, such as question,translation.",
        ),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option("--texts", help="Add tasks over a collection's articles and answers."),
    ] = None,
    ask: Annotated[
        int | None,
        typer.Option(
            "--ask", min=1, metavar="N", help="Instead: sample N user turns from the target."
        ),
    ] = None,
    questions: Annotated[
        Path | None, typer.Option("--questions", help="Add answers to a collection made by --ask.")
    ] = None,
    for_test: Annotated[
        bool, typer.Option("--test", help="Test split, greedy: to measure, never to train.")
    ] = False,
    limit: Annotated[int | None, typer.Option("--limit", help="Prompts of each workload.")] = None,
    seed: Annotated[
        int,
        typer.Option(
            "--seed", min=0, max=MAX_SEED, metavar="N", help="Of own prompts and sampling."
        ),
    ] = 0,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", help="Of a response, at the most.")
    ] = 320,
    max_prompt_tokens: Annotated[
        int, typer.Option("--max-prompt-tokens", help="Longer prompts are left out.")
    ] = 3000,
    batch: Annotated[int, typer.Option("--batch", help="Responses at once.")] = 128,
) -> None:
    """Sample the target's responses with vLLM's offline engine, into Parquet shards.

    Started again it goes on where it was stopped. Responses are cut where they begin to loop.
    """
    from hvd_ray.pipelines.eagle3_collect import collect as run
    from hvd_ray.pipelines.eagle3_requests import PromptMix, ask_requests, build_requests

    folder = target_folder(target)
    mix = PromptMix(
        files=tuple(prompts or ()),
        with_shipped=shipped,
        split="test" if for_test else "train",
        own_seed=seed if own else None,
        own_kinds=own_kinds(kinds, own=own),
        texts=texts,
        questions=questions,
        limit=limit,
    )
    if ask is not None and mix != PromptMix():
        raise UserError("--ask samples user turns alone: give it a folder and a command of its own")
    requests = (
        ask_requests(ask, model=folder, seed=seed)
        if ask is not None
        else build_requests(
            mix,
            model=folder,
            max_tokens=max_tokens,
            max_prompt_tokens=max_prompt_tokens,
            is_greedy=for_test,
        )
    )
    if not requests:
        raise UserError(
            "nothing to collect: name --prompts FILE, --shipped, --own, --texts DIR, --ask N or "
            "--questions DIR"
        )
    with progress_bar("collecting", total=len(requests)) as (bars, task):
        run(
            requests,
            model=folder,
            out=out,
            max_in_flight=batch,
            max_model_len=max_prompt_tokens + max_tokens,
            seed=seed,
            on_rows=lambda num_rows, _num_tokens: bars.advance(task, num_rows),
        )


def own_kinds(kinds: str | None, *, own: bool) -> tuple[str, ...]:
    """The names in `--kinds`.

    Raises:
        UserError: there are own kinds, but no own prompts.
    """
    if kinds is None:
        return ()
    if not own:
        raise UserError("--kinds is of own prompts: give --own too")
    names = tuple(name.strip() for name in kinds.split(",") if name.strip())
    if not names:
        raise UserError("--kinds is empty; expected names by comma, such as question,translation")
    return names


def train(
    data: Data,
    run: Annotated[Path, typer.Option("--run", help="Folder of the run; resumed.")],
    target: Target = DEFAULT_MODEL,
    steps: Annotated[int, typer.Option("--steps", help="Optimiser steps in all.")] = 2000,
    rows_per_step: Annotated[
        int,
        typer.Option(
            "--rows-per-step", help="Positions in responses to learn from in an optimiser step."
        ),
    ] = 1024,
    chain_steps: Annotated[
        int, typer.Option("--chain-steps", help="Tokens that the head drafts from each position.")
    ] = 4,
    learning_rate: Annotated[
        float, typer.Option("--learning-rate", help="At its highest; it falls by a cosine.")
    ] = 1e-3,
    lm_head_learning_rate: Annotated[
        float,
        typer.Option(
            "--lm-head-learning-rate",
            help="Of the output projection. 0 keeps the target's rows, and saves time.",
        ),
    ] = 0.0,
    draft_vocab: Annotated[
        int, typer.Option("--draft-vocab", help="Tokens that the head can draft.")
    ] = 16_384,
    max_prompt_tokens: Annotated[
        int,
        typer.Option("--max-prompt-tokens", help="Responses to longer prompts are left out."),
    ] = 1200,
    init: Annotated[
        Path | None, typer.Option("--init", help="A finished head to go on from.")
    ] = None,
    state_cache: Annotated[
        Path | None, typer.Option("--state-cache", help="Keep hidden states in this folder.")
    ] = None,
    state_cache_gb: Annotated[
        float, typer.Option("--state-cache-gb", help="The most that --state-cache may hold.")
    ] = 8.0,
    regression_steps: Annotated[
        int,
        typer.Option(
            "--regression-steps",
            help="First steps, which learn the target's hidden states; the others learn its "
            "probabilities.",
        ),
    ] = 150,
    threads: Annotated[int | None, typer.Option("--threads", help="CPU threads.")] = None,
    workers: Annotated[
        int, typer.Option("--workers", help="Processes that train one head together, on Ray.")
    ] = 1,
    gpus: Annotated[bool, typer.Option("--gpus", help="A GPU for each of --workers.")] = False,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=MAX_SEED, metavar="N", help="Of all that is drawn.")
    ] = 0,
    config: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Train an EAGLE-3 head on what the target said; a killed run goes on from its checkpoint.

    Typed again when all is done it answers with what it has made.

    Loss, accuracy by draft position and emitted tokens per pass become curves of an MLflow run,
    see `hvd ui`; they also stand in RUN/metrics.jsonl.
    """
    from hvd_ray.drafting.eagle3_job import TrainJob, check_responses, run_training, set_threads
    from hvd_ray.drafting.eagle3_training import TrainConfig
    from hvd_ray.traces.loops import loop_start

    folders, settings = sorted_out(data)
    loaded = load_config(config, [f"model={target}", *settings], policies=[])
    set_threads(threads)
    job = TrainJob(
        target=target_folder(target),
        data=tuple(map(Path, folders)),
        run=run,
        draft_vocab_size=draft_vocab,
        max_prompt_tokens=max_prompt_tokens,
        init_head=init,
        cut_at=loop_start,
        state_cache=state_cache,
        state_cache_gb=state_cache_gb,
    )
    training = TrainConfig(
        num_steps=steps,
        rows_per_step=rows_per_step,
        chain_steps=chain_steps,
        learning_rate=learning_rate,
        lm_head_learning_rate=lm_head_learning_rate,
        regression_steps=regression_steps,
        seed=seed,
    )
    about = {"train": asdict(training), "job": _as_params(job), "workers": workers}
    key = head_training_key(job, about, loaded)
    found = kept_answer(run / "head", key, made=HEAD)
    if found is not None:
        if (run / TRACKING_NOTE).exists():  # killed before its run could end
            with _tracked_run(run, about, loaded):
                pass
        _answer(found, as_json=as_json)
        return
    check_responses(job)
    with _tracked_run(run, about, loaded) as tracker:
        if workers == 1:
            with _training_log(steps, run, tracker) as log_metrics:
                folder = run_training(job, training, log_metrics=log_metrics)
        else:
            from hvd_ray.pipelines.eagle3_train import train_on_workers

            folder = train_on_workers(
                job, training, num_workers=workers, use_gpu=gpus, storage=run / "ray"
            )
            _log_curves(tracker, run)
        report = json.loads((folder / "quality.json").read_text())
        answer = {"head": str(folder), "quality": report}
        if tracker.run_id is not None:
            keep_answer(folder, key, answer, made=HEAD)
    _answer(answer, as_json=as_json)


def _answer(answer: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(answer))
    else:
        _show(answer["quality"], title=f"Head in {answer['head']}")


def evaluate(
    data: Annotated[
        list[Path], typer.Argument(help="Folders of Parquet shards of responses, or of traces.")
    ],
    head: Annotated[
        Path | None, typer.Option("--head", help="Folder of the head. Default: the shipped one.")
    ] = None,
    target: Target = DEFAULT_MODEL,
    by: Annotated[
        str, typer.Option("--by", help="A row for each workload or family.")
    ] = "workload",
    draft_tokens: Annotated[int, typer.Option("--draft-tokens", help="K, the chain.")] = 4,
    limit: Annotated[int | None, typer.Option("--limit", help="Responses at the most.")] = None,
    threads: Annotated[int | None, typer.Option("--threads", help="CPU threads.")] = None,
    as_json: AsJson = False,
) -> None:
    """Emitted tokens per target pass on greedy responses, by teacher-forced replay.

    The pass that reads the prompt counts as a pass, and outputs are cut where they begin to loop.
    """
    from hvd_ray.drafting.eagle3_job import quality_report, run_evaluation, set_threads
    from hvd_ray.systems import head_folder
    from hvd_ray.traces.loops import loop_start

    if by not in ("workload", "family"):
        raise UserError(f"--by must be workload or family, got {by!r}")
    head = head or head_folder(Config(model=target))
    set_threads(threads)
    with progress_bar("replaying", total=limit) as (bars, task):
        quality = run_evaluation(
            head,
            target=target_folder(target),
            data=data,
            num_steps=draft_tokens,
            limit=limit,
            cut_at=loop_start,
            on_response=lambda: bars.advance(task),
            group=lambda response: response.family if by == "family" else response.workload,
        )
    report = quality_report(quality)
    if as_json:
        print(json.dumps(report))
        return
    _show(report, title=f"Head in {head}, K={draft_tokens}", by=by)


def target_folder(target: str) -> Path:
    from hvd_ray.fetch import resolve_model

    reference = resolve_model(target)
    if not reference.is_local:
        raise UserError(f"{target} is not on this machine: run `hvd fetch {target}` first")
    return Path(reference.path_or_id)


@contextmanager
def progress_bar(what: str, *, total: int | None) -> Iterator[tuple[Progress, Any]]:
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
    )
    with bars:
        yield bars, bars.add_task(what, total=total)


def _as_params(job: TrainJob) -> dict[str, Any]:
    """What an MLflow run should know of a job; its functions say nothing there."""
    return {
        field.name: str(getattr(job, field.name)) for field in fields(job) if field.name != "cut_at"
    }


@contextmanager
def _tracked_run(run: Path, about: Mapping[str, Any], config: Config) -> Iterator[Tracker]:
    """The MLflow run of a training; one that was killed is taken up again.

    Raises:
        UserError: the tracking store fails; the training can go on from its checkpoint.
    """
    from hvd_ray.tracking import tracked

    run.mkdir(parents=True, exist_ok=True)
    note = run / TRACKING_NOTE
    is_new = not note.exists()
    with tracked(config, run_name=f"eagle3-{run.name}", note=note) as tracker:
        if is_new:
            tracker.log_params(about)
        yield tracker


def _log_curves(tracker: Tracker, run: Path) -> None:
    """What the workers wrote down of a training that is over."""
    for line in (run / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        _log_point(tracker, metrics, metrics.pop("step"))


def _log_point(tracker: Tracker, metrics: Mapping[str, float], step: int) -> None:
    if step % STEPS_PER_POINT == 0 or "loss" not in metrics:
        tracker.log_metrics(metrics, step)


@contextmanager
def _training_log(steps: int, run: Path, tracker: Tracker) -> Iterator[LogMetrics]:
    """A bar on stderr; every metric as a line of `RUN/metrics.jsonl`, and curves in MLflow."""
    from hvd_ray.drafting.eagle3_job import open_metrics

    with progress_bar("training", total=steps) as (bars, task), open_metrics(run) as file:

        def log_metrics(metrics: Mapping[str, float], step: int) -> None:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
            file.flush()
            _log_point(tracker, metrics, step)
            shown = metrics.get("loss")
            if shown is not None:
                bars.update(task, completed=step + 1, description=f"training, loss {shown:.3f}")

        yield log_metrics


def _show(report: Mapping[str, Mapping[str, Any]], *, title: str, by: str = "workload") -> None:
    table = Table(title=title)
    table.add_column(by)
    table.add_column("tokens", justify="right")
    table.add_column("emitted per pass", justify="right")
    table.add_column("accuracy by position", justify="right")
    for name, row in sorted(report.items(), key=lambda item: item[0] == "all"):
        accuracy = " ".join(f"{value:.2f}" for value in row["accuracy_by_position"])
        table.add_row(name, str(row["tokens"]), f"{row['emitted_per_pass']:.2f}", accuracy)
    Console().print(table)
