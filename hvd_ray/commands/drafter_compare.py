"""`hvd drafter compare`: does a head draft in vLLM what it drafts here?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from hvd_ray.commands.arguments import sorted_out
from hvd_ray.config import DEFAULT_MODEL, load_config
from hvd_ray.errors import UserError

COMPARE_EXAMPLE = "Example: `hvd drafter compare --prompts prompts/mbpp.jsonl --limit 20`"
CLOSE = 0.03
"""Two engines add up in another order, so a few near-ties fall otherwise."""


def compare(
    more: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Settings such as drafting.eagle3.head=FOLDER or drafting.eagle3.num_tokens=3.",
        ),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option("--prompts", help="Prompt files (JSON lines). Default: the shipped ones."),
    ] = None,
    target: Annotated[
        str, typer.Option("--target", help="smollm2-135m, a hub id or a folder.")
    ] = DEFAULT_MODEL,
    limit: Annotated[int, typer.Option("--limit", help="Prompts of each workload.")] = 4,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", help="Of an answer, at the most.")
    ] = 64,
    max_prompt_tokens: Annotated[
        int, typer.Option("--max-prompt-tokens", help="Longer prompts are left out.")
    ] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON on stdout.")] = False,
) -> None:
    """Compare a head's mean acceptance length in vLLM with the torch engine's, in float32.

    On the CPU, greedily, on the same held-out prompts. Exit code 1 where they are not within 3 %.
    """
    from hvd_ray.commands.drafter import progress_bar, target_folder
    from hvd_ray.pipelines.eagle3_requests import PromptMix, build_requests
    from hvd_ray.pipelines.eagle3_vllm import compare as run

    names, settings = sorted_out(more or ())
    files = (*(prompts or ()), *map(Path, names))
    config = load_config(None, [f"model={target}", *settings], policies=["eagle3"])
    mix = PromptMix(files=files, with_shipped=not files, split="test", limit=limit)
    requests = build_requests(
        mix,
        model=target_folder(target),
        max_tokens=max_tokens,
        max_prompt_tokens=max_prompt_tokens,
        is_greedy=True,
    )
    if not requests:
        raise UserError("no held-out prompt is short enough: see --max-prompt-tokens")
    with progress_bar("decoding twice", total=2 * len(requests)) as (bars, task):
        found = run(
            [request.prompt_token_ids for request in requests],
            config,
            max_tokens=max_tokens,
            told=lambda: bars.advance(task),
        )
    report = found.as_json()
    print(json.dumps(report) if as_json else "\n".join(_lines(report)))
    if abs(found.difference) > CLOSE:
        raise typer.Exit(1)


def _lines(report: dict[str, Any]) -> list[str]:
    lines = [
        f"{name}: mean acceptance length {report[name]['mean_acceptance_length']:.3f} "
        f"({report[name]['accepted']} tokens accepted in {report[name]['drafts']} passes)"
        for name in ("torch", "vllm")
    ]
    return [
        *lines,
        f"difference {report['difference']:+.1%}; "
        f"{report['identical_outputs']} of {report['prompts']} outputs identical",
    ]
