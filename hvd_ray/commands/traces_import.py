"""`hvd traces import`: logs of conversations become traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from hvd_ray.config import DEFAULT_MODEL

IMPORT_EXAMPLE = "Example: `hvd traces import logs/calls.jsonl --out traces --on-bad-line skip`"


def import_logs(
    logs: Annotated[
        list[Path],
        typer.Argument(metavar="FILE|FOLDER...", help="JSON lines, JSON arrays or .traj files."),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for traces/.")] = Path("traces"),
    log_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="chat, requests, sharegpt, swe-agent, openhands or completions. "
            "Default: told by the first rows of each file.",
        ),
    ] = None,
    tokenizer: Annotated[
        str,
        typer.Option(metavar="NAME", help="A model, or a folder with tokenizer and chat template."),
    ] = DEFAULT_MODEL,
    context_length: Annotated[
        int | None,
        typer.Option(metavar="N", help="Of the model that answered. Default: nothing is cut."),
    ] = None,
    turns: Annotated[
        str,
        typer.Option(help="all, or last where each row repeats the conversation so far."),
    ] = "all",
    on_bad_line: Annotated[
        str, typer.Option(help="A row that is no conversation: fail at once, or skip and name it.")
    ] = "fail",
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="At most N rows of each file.")
    ] = None,
    workers: Annotated[int, typer.Option(metavar="N", help="Processes side by side.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON on stdout.")] = False,
) -> None:
    """Turn logs of conversations into traces: every answer with all that stood before it.

    OpenAI chat JSONL, logged requests and responses, ShareGPT, trajectories of SWE-agent and
    OpenHands, prompts with completions. Token ids are all that is kept of a text, but whoever
    has the tokenizer can read them. A run that was killed goes on where it stopped.
    """
    from hvd_ray.commands.traces_progress import shown_progress
    from hvd_ray.pipelines.import_transcripts import ImportOptions, import_transcripts

    options = ImportOptions(
        logs=tuple(logs),
        out=out,
        tokenizer=tokenizer,
        log_format=log_format,  # type: ignore[arg-type]  # checked there
        context_length=context_length,
        on_bad_line=on_bad_line,  # type: ignore[arg-type]
        turns=turns,  # type: ignore[arg-type]
        limit=limit,
        num_workers=workers,
    )
    with shown_progress("rows") as progress:
        result = import_transcripts(options, progress=progress)
    print(json.dumps(result) if as_json else "\n".join(_lines(result)))


def _lines(result: dict[str, Any]) -> list[str]:
    files = "1 file" if result["files"] == 1 else f"{result['files']:,} files"
    lines = [
        f"{result['rows']:,} rows of {files} ({', '.join(result['formats'])})",
        f"{result['traces']:,} traces: {result['prompt_tokens']:,} prompt tokens, "
        f"{result['output_tokens']:,} output tokens",
    ]
    if result["rows_without_answer"]:
        lines.append(f"{result['rows_without_answer']:,} rows without an answer")
    if result["answers_left_out"]:
        lines.append(f"{result['answers_left_out']:,} answers left out: empty, or no room for them")
    if result["rows_bad"]:
        lines.append(f"{result['rows_bad']:,} bad rows skipped, named in bad_lines.txt:")
        lines += [f"  {name}" for name in result["bad_lines"][:3]]
    return [*lines, f"written: {result['out']}"]
