"""`hvd drafter`: collect responses, train an EAGLE-3 head on them, and measure a head."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hvd_ray.config import DEFAULT_MODEL
from hvd_ray.errors import UserError

Target = Annotated[str, typer.Option("--target", help="smollm2-135m, a hub id or a folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Answer in JSON on stdout.")]
Data = Annotated[list[Path], typer.Argument(help="Folders of Parquet shards of responses.")]


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
    drafter.command("eval", epilog="Example: `hvd drafter eval responses --head runs/head/head`")(
        evaluate
    )
    app.add_typer(drafter)


def collect(
    out: Annotated[Path, typer.Option("--out", help="Folder for the shards; resumed.")],
    target: Target = DEFAULT_MODEL,
    prompts: Annotated[
        list[Path] | None, typer.Option("--prompts", help="Prompt files (JSON lines).")
    ] = None,
    shipped: Annotated[bool, typer.Option("--shipped", help="Add the shipped workloads.")] = False,
    own: Annotated[bool, typer.Option("--own", help="Add training prompts of our own.")] = False,
    texts: Annotated[
        Path | None, typer.Option("--texts", help="Add tasks over a collection's articles.")
    ] = None,
    for_test: Annotated[
        bool, typer.Option("--test", help="Test split, greedy: to measure, never to train.")
    ] = False,
    limit: Annotated[int | None, typer.Option("--limit", help="Prompts of each workload.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the own prompts.")] = 0,
    max_tokens: Annotated[int, typer.Option("--max-tokens")] = 320,
    max_prompt_tokens: Annotated[int, typer.Option("--max-prompt-tokens")] = 3000,
    batch: Annotated[int, typer.Option("--batch", help="Responses at once.")] = 128,
) -> None:
    """Sample the target's responses with vLLM's offline engine, into Parquet shards.

    Started again it goes on where it was stopped. Responses are cut where they begin to loop.
    """
    from hvd_ray.pipelines.eagle3_collect import collect as run
    from hvd_ray.pipelines.eagle3_requests import PromptMix, build_requests

    folder = _target_folder(target)
    mix = PromptMix(
        files=tuple(prompts or ()),
        with_shipped=shipped,
        split="test" if for_test else "train",
        own_seed=seed if own else None,
        texts=texts,
        limit=limit,
    )
    requests = build_requests(
        mix,
        model=folder,
        max_tokens=max_tokens,
        max_prompt_tokens=max_prompt_tokens,
        is_greedy=for_test,
    )
    if not requests:
        raise UserError("nothing to collect: name --prompts FILE, --shipped, --own or --texts DIR")
    with _bar("collecting", total=len(requests)) as (bars, task):
        run(
            requests,
            model=folder,
            out=out,
            max_in_flight=batch,
            max_model_len=max_prompt_tokens + max_tokens,
            on_rows=lambda num_rows, _num_tokens: bars.advance(task, num_rows),
        )


def train(
    data: Data,
    run: Annotated[Path, typer.Option("--run", help="Folder of the run; resumed.")],
    target: Target = DEFAULT_MODEL,
    steps: Annotated[int, typer.Option("--steps", help="Optimiser steps in all.")] = 2000,
    rows_per_step: Annotated[int, typer.Option("--rows-per-step")] = 1024,
    chain_steps: Annotated[int, typer.Option("--chain-steps")] = 4,
    learning_rate: Annotated[float, typer.Option("--learning-rate")] = 1e-3,
    lm_head_learning_rate: Annotated[
        float, typer.Option("--lm-head-learning-rate", help="0 keeps the target's rows.")
    ] = 0.0,
    draft_vocab: Annotated[int, typer.Option("--draft-vocab", help="Draft tokens.")] = 16_384,
    max_prompt_tokens: Annotated[int, typer.Option("--max-prompt-tokens")] = 1200,
    init: Annotated[
        Path | None, typer.Option("--init", help="A finished head to go on from.")
    ] = None,
    state_cache: Annotated[
        Path | None, typer.Option("--state-cache", help="Keep hidden states in this folder.")
    ] = None,
    state_cache_gb: Annotated[float, typer.Option("--state-cache-gb")] = 8.0,
    regression_steps: Annotated[int, typer.Option("--regression-steps")] = 150,
    threads: Annotated[int | None, typer.Option("--threads", help="CPU threads.")] = None,
    workers: Annotated[
        int, typer.Option("--workers", help="Processes that train one head together, on Ray.")
    ] = 1,
    gpus: Annotated[bool, typer.Option("--gpus", help="A GPU for each of --workers.")] = False,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    as_json: AsJson = False,
) -> None:
    """Train an EAGLE-3 head on what the target said; a killed run goes on from its checkpoint."""
    from hvd_ray.drafting.eagle3_job import TrainJob, run_training, set_threads
    from hvd_ray.drafting.eagle3_training import TrainConfig
    from hvd_ray.traces.loops import loop_start

    set_threads(threads)
    job = TrainJob(
        target=_target_folder(target),
        data=tuple(data),
        run=run,
        draft_vocab_size=draft_vocab,
        max_prompt_tokens=max_prompt_tokens,
        init_head=init,
        cut_at=loop_start,
        state_cache=state_cache,
        state_cache_gb=state_cache_gb,
    )
    config = TrainConfig(
        num_steps=steps,
        rows_per_step=rows_per_step,
        chain_steps=chain_steps,
        learning_rate=learning_rate,
        lm_head_learning_rate=lm_head_learning_rate,
        regression_steps=regression_steps,
        seed=seed,
    )
    if workers == 1:
        with _training_log(steps, run) as log_metrics:
            folder = run_training(job, config, log_metrics=log_metrics)
    else:
        from hvd_ray.pipelines.eagle3_train import train_on_workers

        folder = train_on_workers(
            job, config, num_workers=workers, use_gpu=gpus, storage=run / "ray"
        )
    report = json.loads((folder / "quality.json").read_text())
    if as_json:
        print(json.dumps({"head": str(folder), "quality": report}))
        return
    _show(report, title=f"Head in {folder}")


def evaluate(
    data: Data,
    head: Annotated[Path, typer.Option("--head", help="Folder of the head.")],
    target: Target = DEFAULT_MODEL,
    draft_tokens: Annotated[int, typer.Option("--draft-tokens", help="K, the chain.")] = 4,
    limit: Annotated[int | None, typer.Option("--limit", help="Responses at the most.")] = None,
    threads: Annotated[int | None, typer.Option("--threads", help="CPU threads.")] = None,
    as_json: AsJson = False,
) -> None:
    """Emitted tokens per target pass on greedy responses, by teacher-forced replay."""
    from hvd_ray.drafting.eagle3_job import quality_report, run_evaluation, set_threads
    from hvd_ray.traces.loops import loop_start

    set_threads(threads)
    with _bar("replaying", total=limit) as (bars, task):
        quality = run_evaluation(
            head,
            target=_target_folder(target),
            data=data,
            num_steps=draft_tokens,
            limit=limit,
            cut_at=loop_start,
            on_response=lambda: bars.advance(task),
        )
    report = quality_report(quality)
    if as_json:
        print(json.dumps(report))
        return
    _show(report, title=f"Head in {head}, K={draft_tokens}")


def _target_folder(target: str) -> Path:
    from hvd_ray.fetch import resolve_model

    reference = resolve_model(target)
    if not reference.is_local:
        raise UserError(f"{target} is not on this machine: run `hvd fetch {target}` first")
    return Path(reference.path_or_id)


@contextmanager
def _bar(what: str, *, total: int | None) -> Iterator[tuple[Progress, Any]]:
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
    )
    with bars:
        yield bars, bars.add_task(what, total=total)


@contextmanager
def _training_log(steps: int, run: Path) -> Iterator[Any]:
    """A bar on stderr, and every metric as a line of `RUN/metrics.jsonl`."""
    from hvd_ray.drafting.eagle3_job import open_metrics

    with _bar("training", total=steps) as (bars, task), open_metrics(run) as file:

        def log_metrics(metrics: Mapping[str, float], step: int) -> None:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
            file.flush()
            shown = metrics.get("loss")
            if shown is not None:
                bars.update(task, completed=step + 1, description=f"training, loss {shown:.3f}")

        yield log_metrics


def _show(report: Mapping[str, Mapping[str, Any]], *, title: str) -> None:
    table = Table(title=title)
    table.add_column("workload")
    table.add_column("tokens", justify="right")
    table.add_column("emitted per pass", justify="right")
    table.add_column("accuracy by position", justify="right")
    for name, row in sorted(report.items(), key=lambda item: item[0] == "all"):
        accuracy = " ".join(f"{value:.2f}" for value in row["accuracy_by_position"])
        table.add_row(name, str(row["tokens"]), f"{row['emitted_per_pass']:.2f}", accuracy)
    Console().print(table)
