"""`hvd traces`: collect what the target answers or import logs, label what a cache would gain."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hvd_ray.commands.arguments import places, sorted_out
from hvd_ray.commands.traces_import import IMPORT_EXAMPLE, import_logs

COLLECT_EXAMPLE = (
    "Example: `hvd traces collect --prompts mine.jsonl --out traces --policy suffix "
    "--max-tokens 256`"
)
LABEL_EXAMPLE = (
    "Example: `hvd traces label traces --out labels --workers 2`, with a head of one's own "
    "`hvd traces label traces --out labels --eagle3 drafting.eagle3.head=FOLDER`"
)


def register(app: typer.Typer) -> None:
    traces = typer.Typer(
        name="traces",
        help="Collect the target's outputs as traces or import logs, and label them by replay.",
        no_args_is_help=True,
    )
    traces.command("collect", epilog=COLLECT_EXAMPLE)(collect)
    traces.command("import", epilog=IMPORT_EXAMPLE)(import_logs)
    traces.command("label", epilog=LABEL_EXAMPLE)(label)
    app.add_typer(traces)


def collect(
    more: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE|NAME|KEY=VALUE]...",
            help="More prompt files or workloads, and settings such as seed=7.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for traces/ and steps/.")] = Path(
        "traces"
    ),
    prompts: Annotated[
        list[Path] | None, typer.Option(metavar="FILE...", help="JSONL files of prompts.")
    ] = None,
    workloads: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Shipped workloads, by comma. Default: all.")
    ] = None,
    on_bad_line: Annotated[
        str, typer.Option(help="A malformed line: fail at once, or skip it.")
    ] = "fail",
    split: Annotated[str, typer.Option(help="train, test or all, of files with splits.")] = "all",
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="At most N prompts of each workload.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The target. Default: smollm2-135m.")
    ] = None,
    policy: Annotated[
        str, typer.Option(help="The system that decodes; the traces are the same with any.")
    ] = "greedy",
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Output tokens of a request. Default: 128.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="For every prompt. Default: the prompt's own, or 0.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32.")] = None,
    workers: Annotated[
        int | None, typer.Option(metavar="N", help="Engines side by side. Default: one a core.")
    ] = None,
    gpus_per_worker: Annotated[
        float, typer.Option(metavar="X", help="GPUs that each engine claims of Ray, e.g. 0.5.")
    ] = 0.0,
    shards: Annotated[
        int, typer.Option(metavar="N", help="Units of work with a cache each; see hvd plan.")
    ] = 8,
    config: Annotated[Path | None, typer.Option(help="A YAML file of settings.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON on stdout.")] = False,
) -> None:
    """Decode prompts and keep what happened; a run that was killed goes on where it stopped."""
    from hvd_ray.commands.traces_progress import shown_progress
    from hvd_ray.config import load_config
    from hvd_ray.pipelines.collect import CollectOptions
    from hvd_ray.pipelines.collect import collect as run

    names, settings = sorted_out(more or ())
    files, named = places(names, prompts=prompts or (), workloads=workloads)
    given = {"model": model, "dtype": dtype}
    settings += [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
    options = CollectOptions(
        out=out,
        prompt_files=files,
        workloads=named,
        on_bad_line=on_bad_line,  # type: ignore[arg-type]  # checked there
        split=split,  # type: ignore[arg-type]
        limit=limit,
        policy=policy,
        max_tokens=max_tokens,
        temperature=temperature,
        num_workers=workers,
        gpus_per_worker=gpus_per_worker,
        num_shards=shards,
    )
    loaded = load_config(config, settings, policies=[policy])
    with shown_progress("prompts") as progress:
        result = run(options, loaded, progress=progress)
    _answer(result, _collected_lines(result), as_json=as_json)


def label(
    traces: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="What `collect` has written, a folder of such, or one of Parquet files.",
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="E.g. drafting.suffix.max_tree_depth=32."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for labels/.")] = Path("labels"),
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", help="Shards labelled side by side. Default: one a core."),
    ] = None,
    shards: Annotated[
        int, typer.Option(metavar="N", help="Caches that the sessions are dealt to.")
    ] = 4,
    keep_loops: Annotated[
        bool, typer.Option("--keep-loops", help="Do not cut outputs that repeat themselves.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Where the tokenizer, with --eagle3 the target, is. Default: the traces' model.",
        ),
    ] = None,
    eagle3: Annotated[
        bool,
        typer.Option("--eagle3", help="Label an EAGLE-3 head's chains too; runs the target."),
    ] = False,
    config: Annotated[Path | None, typer.Option(help="A YAML file of settings.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON on stdout.")] = False,
) -> None:
    """Replay traces and label what the cache's draft was worth at every position."""
    from hvd_ray.commands.traces_progress import shown_progress
    from hvd_ray.config import load_config
    from hvd_ray.pipelines.label import LabelOptions, is_unfinished
    from hvd_ray.pipelines.label import label as run

    options = LabelOptions(
        traces=traces,
        out=out,
        num_shards=shards,
        num_workers=workers,
        cut_loops=not keep_loops,
        model=model,
        with_eagle3=eagle3,
    )
    loaded = load_config(config, settings or (), policies=["suffix"])
    if is_unfinished(traces):
        print(f"hvd: {traces} is not complete yet; labelling what is there", file=sys.stderr)
    with shown_progress("positions") as progress:
        result = run(options, loaded, progress=progress)
    _answer(result, _labelled_lines(result), as_json=as_json)


def _answer(result: dict[str, Any], lines: Sequence[str], *, as_json: bool) -> None:
    print(json.dumps(result) if as_json else "\n".join(lines))


def _collected_lines(result: dict[str, Any]) -> list[str]:
    passes = max(1, result["target_passes"])
    lines = [
        f"{result['traces']} traces, {result['tokens']:,} tokens, "
        f"{result['tokens'] / passes:.2f} emitted per pass"
    ]
    if result["failed"]:
        lines.append(f"{result['failed']} failed, the first: {result['first_error']}")
    if result["skipped_lines"]:
        more = result["skipped_lines"] - len(result["skipped"])
        lines += [f"skipped: {line}" for line in result["skipped"]]
        lines += [f"and {more} more bad lines skipped"] if more else []
    return [*lines, f"written: {result['out']}"]


def _labelled_lines(result: dict[str, Any]) -> list[str]:
    lines = [
        f"{result['positions']:,} positions of {result['traces']} traces "
        f"in {result['shards']} shards"
    ]
    if result["loops_cut"]:
        lines.append(f"{result['loops_cut']} outputs cut where they begin to repeat themselves")
    if result["failed"]:
        lines.append(f"{result['failed']} failed traces left out")
    return [*lines, f"written: {result['out']}"]
