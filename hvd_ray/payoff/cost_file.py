"""Measured cost tables on disk: for which target, number format and machine they hold.

A table of another machine or model is refused by name: its costs would decide every draft wrongly
and nothing would look broken.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from hvd_ray.errors import UserError
from hvd_ray.home import atomic_path
from hvd_ray.payoff.cost import RowCosts
from hvd_ray.types import MAX_COUNT, Source
from hvd_ray.versioned_json import read_versioned

FORMAT_VERSION = 1
MEASURE = "measure one with `hvd calibrate`"
CALM_SPREAD = 0.25
"""Above this the repeats disagree so much that something else must have been running."""


def _no_truth(value: object) -> object:
    """YAML's `on` and JSON's `true` would pass as 1."""
    if isinstance(value, bool):
        raise ValueError(f"must be a number, got {str(value).lower()}")
    return value


NumRows = Annotated[int, BeforeValidator(_no_truth), Field(le=MAX_COUNT)]
TimeMs = Annotated[float, BeforeValidator(_no_truth)]


class CostKey(BaseModel):
    """What a cost table holds for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    """Fingerprint of the target."""
    dtype: str
    engine: str
    device: str
    num_threads: int


class CostFile(BaseModel):
    """A measured cost table and where it comes from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int = FORMAT_VERSION
    key: CostKey
    rows: tuple[NumRows, ...]
    verify_ms: tuple[TimeMs, ...]
    draft_ms: dict[Source, TimeMs] = {}
    draft_token_ms: dict[Source, TimeMs] = {}
    slim: str | None = None
    """Key of the slim model whose passes were measured too; None: none was at hand."""
    slim_ms: tuple[TimeMs, ...] = ()
    """One time of a slim pass for each entry of `rows`."""
    provenance: dict[str, Any] = {}

    @property
    def spread(self) -> float:
        """How far the repeats of a pass lay apart, over their median; 0 where nobody said."""
        return float(self.provenance.get("spread", 0.0))

    @property
    def disturbance(self) -> str | None:
        """What goes after a table's name where something disturbed its measuring."""
        if self.spread <= CALM_SPREAD:
            return None
        return f"was measured beside other work (repeats {self.spread:.0%} apart)"

    @property
    def again(self) -> str:
        """What to type to measure it anew."""
        return f"`hvd calibrate dtype={self.key.dtype}` with nothing else running"

    def table(self) -> RowCosts:
        """The costs.

        Raises:
            UserError: the figures are no cost table.
        """
        if self.slim_ms or self.slim is not None:
            if len(self.slim_ms) != len(self.rows):
                raise UserError(
                    f"cost table: {len(self.slim_ms)} slim_ms for {len(self.rows)} row counts"
                )
            RowCosts(self.rows, self.slim_ms)  # held to what holds for a pass of the target
        return RowCosts(self.rows, self.verify_ms, self.draft_ms, self.draft_token_ms)


def write_costs(path: Path, costs: CostFile) -> None:
    """Write whole or not at all, replacing what is there."""
    costs.table()
    text = json.dumps(costs.model_dump(mode="json"), indent=2, sort_keys=True)
    with atomic_path(path) as draft:
        draft.write_text(text + "\n", encoding="utf-8")


def read_costs(path: Path, *, key: CostKey | None = None) -> CostFile:
    """Read a table; with a `key`, only one that holds for it.

    Raises:
        UserError: absent, damaged, of another version, or measured for something else.
    """
    costs = read_versioned(
        path, CostFile, what="cost table", version=FORMAT_VERSION, remedy=MEASURE
    )
    try:
        costs.table()
    except UserError as error:
        raise UserError(f"{path}: {error}; {MEASURE}") from None
    if key is not None:
        _refuse_foreign(path, costs.key, key)
    return costs


def _refuse_foreign(path: Path, measured: CostKey, wanted: CostKey) -> None:
    for name in CostKey.model_fields:
        theirs, ours = getattr(measured, name), getattr(wanted, name)
        if theirs != ours:
            use = f"type {name}={theirs}, or " if name == "num_threads" else ""
            raise UserError(
                f"cost table {path}: measured for {name} {theirs!r}, here it is {ours!r}; "
                f"{use}{MEASURE}"
            )
