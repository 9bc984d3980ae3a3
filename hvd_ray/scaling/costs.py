"""What the stages cost, as measured in small real runs, and where the figures come from."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hvd_ray.config import read_settings, validated
from hvd_ray.errors import UserError

NonNegative = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
StageName = Literal["collect", "label", "train", "tune"]
STAGES: tuple[StageName, ...] = ("collect", "label", "train", "tune")
SHIPPED = "stage_costs.json"
WANTED = "expected a JSON file of stage costs, as scripts/measure_stages.py writes"
LISTED_IN = "hvd_ray/scaling/costs.py"


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StageCost(_Section):
    """One stage's costs; a token is an output token of a trace, which is a labelled position."""

    work: Literal["shards", "whole", "trials"]
    """Spread over shards; one process over all; all of it once for each trial."""
    token_us: NonNegative
    """Of one worker with a core (or GPU) to itself."""
    trace_us: NonNegative = 0
    """What a trace costs the worker whatever its length, such as reading its prompt."""
    worker_start_s: NonNegative
    """From the pool's start to the first shard: process, imports, model."""
    shard_s: NonNegative = 0
    """What each shard costs besides: dispatch, files."""
    driver_s: NonNegative
    """Of the driver alone, before and after the workers."""
    driver_trace_us: NonNegative = 0
    """And for each trace: planning and adding up."""
    worker_mb: NonNegative
    """Resident memory of a worker before it has read anything."""
    worker_token_bytes: NonNegative = 0
    """And for each token of what it holds at once: its shard, or all."""
    driver_mb: NonNegative = 0
    driver_trace_bytes: NonNegative = 0
    disk_token_bytes: NonNegative = 0
    """Written, after compression."""


class StageCosts(_Section):
    """The costs of every stage."""

    collect: StageCost
    label: StageCost
    train: StageCost
    tune: StageCost
    provenance: dict[str, Any] = {}

    def of(self, name: StageName) -> StageCost:
        """One stage's."""
        cost: StageCost = getattr(self, name)
        return cost


def load_stage_costs(path: Path | None, overrides: tuple[str, ...] = ()) -> StageCosts:
    """Those of a file, or those that ship with hvd, with `stage.key=value` overrides.

    Raises:
        UserError: the file cannot be read or is of another kind; a key is unknown or out of range.
    """
    if path is None:
        text = (files("hvd_ray") / "assets" / SHIPPED).read_text(encoding="utf-8")
        where = f"the shipped {SHIPPED}"
    else:
        where = str(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"costs {path}: cannot be read ({error})") from None
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"costs {where}: not valid JSON ({error}); {WANTED}") from None
    if not isinstance(tree, dict):
        raise UserError(f"costs {where}: no mapping of stages; {WANTED}")
    if lacking := [stage for stage in STAGES if stage not in tree]:
        raise UserError(f"costs {where}: say nothing of {', '.join(lacking)}; {WANTED}")
    _overlay(tree, read_settings(None, overrides))
    return validated(StageCosts, tree, where=LISTED_IN)


def _overlay(tree: dict[str, Any], changes: dict[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _overlay(tree[key], value)
        else:
            tree[key] = value
