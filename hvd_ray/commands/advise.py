"""`hvd advise`: would speculative decoding help this traffic? Told from its logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hvd_ray.commands.arguments import sorted_out
from hvd_ray.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from hvd_ray.advise.result import Advice

EXAMPLE = "Example: `hvd advise logs/*.jsonl --costs h100.yaml --concurrency 8 --out advice.html`"


def register(app: typer.Typer) -> None:
    app.command("advise", epilog=EXAMPLE)(advise)


def advise(
    logs: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE|FOLDER|KEY=VALUE...",
            help="Logs as `hvd traces import` takes them, or folders of traces; and settings "
            "such as policy.tau=4.",
        ),
    ],
    tokenizer: Annotated[
        str,
        typer.Option(metavar="NAME", help="The model, or a folder with tokenizer and template."),
    ] = DEFAULT_MODEL,
    costs: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|pass",
            help="A table of `hvd calibrate` or one written by hand (JSON, YAML); pass: count "
            "passes. Default: this machine's table, else pass.",
        ),
    ] = None,
    predictor: Annotated[
        str,
        typer.Option(
            metavar="REF",
            help="learn: from the log's own train sessions; champion; a folder; "
            "models:/NAME@ALIAS; or none.",
        ),
    ] = "learn",
    save_predictor: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the predictor that was learned.")
    ] = None,
    eagle3: Annotated[
        str | None,
        typer.Option(
            metavar="P,P,...|DIR|none",
            help="A head's acceptance by draft position, or a folder of `hvd traces collect "
            "--policy eagle3` to measure it in. Default: assumed, a modest head's.",
        ),
    ] = None,
    concurrency: Annotated[
        int, typer.Option(metavar="N", help="Requests at once that the answer is for.")
    ] = 1,
    split: Annotated[
        str, typer.Option(help="Sessions to judge on: test, or all with a predictor at hand.")
    ] = "test",
    judged_tokens: Annotated[
        int, typer.Option(metavar="N", help="Output tokens to judge on, in whole sessions.")
    ] = 40_000,
    learned_tokens: Annotated[
        int, typer.Option(metavar="N", help="Output tokens to learn a predictor from.")
    ] = 100_000,
    keep_loops: Annotated[
        bool, typer.Option("--keep-loops", help="Do not cut answers where they start to loop.")
    ] = False,
    log_format: Annotated[
        str | None, typer.Option("--format", help="As in `hvd traces import`. Default: told.")
    ] = None,
    turns: Annotated[
        str, typer.Option(help="all, or last where each row repeats the conversation so far.")
    ] = "all",
    on_bad_line: Annotated[
        str, typer.Option(help="A row that is no conversation: fail at once, or skip it.")
    ] = "fail",
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="At most N rows of each file.")
    ] = None,
    workers: Annotated[int, typer.Option(metavar="N", help="Processes that import.")] = 1,
    config: Annotated[Path | None, typer.Option(help="A YAML file of settings.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON on stdout.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the answer there as JSON, and as a page (.html) beside it."
        ),
    ] = None,
) -> None:
    """Replay your logs under every system and say what each would bring, without a GPU.

    Emitted per pass and speed-up by workload, the cache's need of history, routing, the
    predictor's quality, what is left of the gain under load, and a configuration to type. It says
    so where speculative decoding would not help.
    """
    from hvd_ray.advise.options import AdviceOptions
    from hvd_ray.advise.session import advise as run_advice
    from hvd_ray.bench.result import check_writable
    from hvd_ray.commands.traces_progress import shown_progress
    from hvd_ray.config import load_config

    names, settings = sorted_out(logs)
    options = AdviceOptions(
        logs=tuple(map(Path, names)),
        tokenizer=tokenizer,
        costs=costs,
        predictor=predictor,
        save_predictor=save_predictor,
        eagle3=eagle3,
        concurrency=concurrency,
        split=split,  # type: ignore[arg-type]  # checked there
        judged_tokens=judged_tokens,
        learned_tokens=learned_tokens,
        keep_loops=keep_loops,
        log_format=log_format,  # type: ignore[arg-type]
        turns=turns,  # type: ignore[arg-type]
        on_bad_line=on_bad_line,  # type: ignore[arg-type]
        limit=limit,
        num_workers=workers,
    )
    if out is not None:
        check_writable(out)
    loaded = load_config(config, settings, policies=["hvd_tau", "rule_score", "rule_match"])
    with shown_progress("steps") as progress:
        advice = run_advice(options, loaded, progress=progress)
    _answer(advice, as_json=as_json, out=out)


def _answer(advice: Advice, *, as_json: bool, out: Path | None) -> None:
    from rich.console import Console

    from hvd_ray.advise.page import write_page
    from hvd_ray.advise.terminal import terminal_advice

    written, page = [], None
    if out is not None:
        page = out if out.suffix == ".html" else out.with_suffix(".html")
        written = [out.with_suffix(".json") if out.suffix == ".html" else out, page]
        advice.write(written[0])
        write_page(page, advice)
    if as_json:
        print(json.dumps(advice.as_json(), indent=2, allow_nan=False))
        return
    Console().print(terminal_advice(advice, page))
    for path in written:
        print(f"written: {path}")
