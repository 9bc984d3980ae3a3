"""`hvd calibrate --shapes`: cost tables of well-known shapes, with random weights."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hvd_ray.commands.arguments import names_in
from hvd_ray.errors import UserError

if TYPE_CHECKING:
    from hvd_ray.payoff.cost_file import CostFile

Written = list[tuple[Path, "CostFile"]]


def calibrate_shapes(
    shapes: str | None,
    device: str | None,
    out: Path | None,
    settings: Sequence[str],
    *,
    repeats: int,
    as_json: bool,
) -> None:
    """Measure shape after shape; one that fails is named, and the others are measured all the same.

    Raises:
        UserError: no shapes or no folder given, or no GPU where one is needed.
        typer.Exit: code 1 where a shape failed.
    """
    if shapes is None:
        raise UserError("--device goes with --shapes only")
    if settings:
        raise UserError(f"--shapes takes no settings, got {settings[0]!r}")
    if out is None:
        raise UserError("--shapes needs --out DIR, the folder for its tables")
    from hvd_ray.bench.shapes import ShapeOptions, free_memory, measure_shape

    options = ShapeOptions(names_in(shapes) or (), device or "cuda", out, repeats)
    written: Written = []
    failed: dict[str, str] = {}
    for name in options.names:
        try:
            written += measure_shape(name, options, stage=_say)
        except RuntimeError as error:  # torch's word for too little memory and failed kernels
            failed[name] = str(error).strip().splitlines()[0]
            _say(f"{name} failed: {failed[name]}")
        free_memory()
    _answer(out, written, failed, as_json=as_json)
    if failed:
        raise typer.Exit(1)


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _answer(out: Path, written: Written, failed: dict[str, str], *, as_json: bool) -> None:
    if as_json:
        found = {"written": [str(path) for path, _ in written], "failed": failed}
        print(json.dumps(found))
        return
    for path, costs in written:
        times = dict(zip(costs.rows, costs.verify_ms, strict=True))
        shown = ", ".join(f"{rows}: {times[rows]:.2f}" for rows in (1, 5, 17, 64, 256))
        print(f"{path.name}\n  ms by rows {shown}")
        drafts = ", ".join(f"{source} {cost:.3f}" for source, cost in costs.draft_ms.items())
        tree = costs.provenance["tree"]["draft_ms"]
        token_ms = sum(costs.draft_token_ms.values())
        print(f"  drafts {drafts} ms; each chain token {token_ms:.3f}; a tree {tree:.2f}")
    print(f"{len(written)} tables written to {out}")
