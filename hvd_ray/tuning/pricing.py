"""What a replayed cycle costs: a table measured by `hvd calibrate`, or one for every pass."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_ray.config import Config
from hvd_ray.errors import UserError
from hvd_ray.parts.costs import find_costs
from hvd_ray.payoff.cost import CostTable, PassCost
from hvd_ray.payoff.cost_file import CostFile, read_costs, write_costs
from hvd_ray.types import Source

PASS = "pass"
"""`--costs pass`: every target pass costs the same, whatever it verifies."""
_ONE_PASS_MS = 1e3
"""So that tokens per second are tokens per pass."""


@dataclass(frozen=True, slots=True)
class Pricing:
    """A cost table and what its speeds are called."""

    file: CostFile | None = None
    """None: every pass costs the same."""

    @property
    def table(self) -> CostTable:
        return PassCost(_ONE_PASS_MS) if self.file is None else self.file.table()

    @property
    def unit(self) -> str:
        return "tokens/pass" if self.file is None else "tokens/s"

    @property
    def about(self) -> dict[str, Any]:
        """For provenance: what the table holds for."""
        if self.file is None:
            return {"costs": PASS}
        return {"costs": self.file.key.model_dump()}

    def check_model_price(self, labels: Path) -> None:
        """See that the drafts of an EAGLE-3 head have a price.

        Raises:
            UserError: the table was measured without a head, so that its drafts would be free.
        """
        if self.file is not None and Source.EAGLE3 not in self.file.draft_ms:
            raise UserError(
                f"{labels}: labels an EAGLE-3 head's drafts, and the cost table has no price for "
                "them; measure again with `hvd calibrate`, or count target passes with "
                "--costs pass"
            )

    def save(self, folder: Path) -> None:
        if self.file is not None:
            write_costs(folder / "costs.json", self.file)

    @classmethod
    def load(cls, folder: Path) -> Pricing:
        path = folder / "costs.json"
        return cls(read_costs(path) if path.exists() else None)


def find_pricing(costs: str | None, config: Config) -> Pricing:
    """The costs that were named, or those measured here for this target and number format.

    Args:
        costs: a file written by `hvd calibrate`, on whatever machine; `pass`; or None.
        config: names the target.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    if costs == PASS:
        return Pricing()
    if costs is not None:
        return Pricing(read_costs(Path(costs)))
    try:
        return Pricing(find_costs(config))
    except UserError as error:
        raise UserError(f"{error}, or count target passes with --costs pass") from None
