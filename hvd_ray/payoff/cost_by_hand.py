"""Cost tables written by hand, for a GPU that is not here: from its vendor's or one's own figures.

A YAML or JSON file, times in milliseconds:

    name: Qwen3-8B on one H100          # what reports call it
    rows: [1, 16, 64, 128, 256, 512]    # rows (tokens) of one target pass, rising from 1
    verify_ms: [6.4, 6.5, 6.8, 7.6, 10.1, 18.0]
    draft_ms: {suffix: 0.02, eagle3: 0.5}       # optional: what drafting adds to a cycle
    draft_token_ms: {eagle3: 0.3}               # optional: and each drafted token beside that
    basis: measured with my own loop, 2026-11-02        # optional: where the figures come from
    is_assumed: false                   # optional: true marks all that rests on it as assumed

Rows of a pass are the rows of *all* requests in the batch, so a table that is to speak of
concurrency 32 should reach to some hundreds of rows; beyond its last entry it goes on linearly.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, StrictBool, field_validator

from hvd_ray.config import read_settings, validated
from hvd_ray.errors import UserError
from hvd_ray.payoff.cost import RowCosts
from hvd_ray.payoff.cost_file import CostFile, NumRows, TimeMs, read_costs
from hvd_ray.types import Source

MAX_CHARS = 300
LISTED_IN = "hvd_ray/payoff/cost_by_hand.py"


class HandCosts(BaseModel):
    """What a file written by hand says; see the module's text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    rows: tuple[NumRows, ...]
    verify_ms: tuple[TimeMs, ...]
    draft_ms: dict[Source, TimeMs] = {}
    draft_token_ms: dict[Source, TimeMs] = {}
    basis: str = ""
    is_assumed: StrictBool = False

    @field_validator("name", "basis")
    @classmethod
    def _is_one_line(cls, text: str) -> str:
        """Both stand in tables and on terminals."""
        if not text.isprintable() or len(text) > MAX_CHARS:
            raise ValueError(f"must be printable text on one line, {MAX_CHARS} characters at most")
        return text.strip()

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, name: str) -> str:
        if not name:
            raise ValueError("must not be empty")
        return name

    def table(self) -> RowCosts:
        """The costs.

        Raises:
            UserError: the figures are no cost table.
        """
        return RowCosts(self.rows, self.verify_ms, self.draft_ms, self.draft_token_ms)


@dataclass(frozen=True, slots=True)
class NamedCosts:
    """A cost table, and what a report has to say of it."""

    name: str
    table: RowCosts
    basis: str
    is_assumed: bool
    has_eagle3: bool
    """Whether it prices the model drafter."""
    measured: CostFile | None = None
    """The table of `hvd calibrate` that it is; None: written by hand."""

    @property
    def doubt(self) -> str | None:
        """A sentence where something disturbed its measuring."""
        if self.measured is None or self.measured.disturbance is None:
            return None
        return (
            f"The cost table {self.measured.disturbance}: do not trust the speed-ups before "
            f"{self.measured.again}."
        )


def read_any_costs(path: Path) -> NamedCosts:
    """A table of `hvd calibrate`, or one written by hand.

    Raises:
        UserError: the file cannot be read or is neither.
    """
    if not path.is_file():
        raise UserError(
            f"no cost table at {path}; measure one with `hvd calibrate`, or see {LISTED_IN}"
        )
    tree = read_settings(path)
    if "format_version" in tree:
        return named(read_costs(path))
    written = validated(HandCosts, tree, where=LISTED_IN)
    try:
        table = written.table()
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    basis = written.basis or "by hand, its basis is not said"
    has_eagle3 = _prices_eagle3(written)
    return NamedCosts(written.name, table, basis, written.is_assumed, has_eagle3)


def named(measured: CostFile) -> NamedCosts:
    """A measured table with its key as its name."""
    key = measured.key
    name = f"{key.device}, {key.dtype}, {key.engine} engine, {key.num_threads} threads"
    day = str(measured.provenance.get("created_at", ""))[:10]
    basis = f"measured by hvd calibrate {day}".rstrip()
    return NamedCosts(name, measured.table(), basis, False, _prices_eagle3(measured), measured)


def _prices_eagle3(costs: HandCosts | CostFile) -> bool:
    return Source.EAGLE3 in costs.draft_ms or Source.EAGLE3 in costs.draft_token_ms
