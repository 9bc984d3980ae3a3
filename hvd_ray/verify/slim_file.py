"""A slim model on disk: which sublayers are skipped, for which target, found how, and how good.

A small JSON file; the weights are the target's own.
"""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, model_validator

from hvd_ray.config import Probability
from hvd_ray.engines.slim import SlimLayers
from hvd_ray.errors import UserError
from hvd_ray.home import atomic_path
from hvd_ray.versioned_json import read_versioned

FORMAT_VERSION = 1
SEARCH = "make one with `hvd slim search`"


class Escalation(BaseModel):
    """How blocks of the calibration fared under the fixed gate, by `theta_escalate`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    theta: tuple[Probability, ...] = ()
    """Rising."""
    escalated: tuple[Probability, ...] = ()
    """Share of the blocks that needed the target."""

    @model_validator(mode="after")
    def _is_a_curve(self) -> Self:
        if len(self.theta) != len(self.escalated):
            raise ValueError(
                f"{len(self.theta)} thresholds but {len(self.escalated)} shares of blocks"
            )
        if any(after <= before for before, after in pairwise(self.theta)):
            raise ValueError("the thresholds do not rise")
        return self

    def at(self, theta: float) -> float | None:
        """Share of the blocks at a threshold; None where nothing was measured.

        That of the next measured threshold: at 0 nothing is escalated, and just above it already
        much is, so a line between the two would promise what no threshold keeps.
        """
        if not self.theta:
            return None
        above = int(np.searchsorted(self.theta, theta))
        return self.escalated[min(above, len(self.escalated) - 1)]


class SlimFile(BaseModel):
    """A slim model and where it comes from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int = FORMAT_VERSION
    model: str
    """Fingerprint of the target."""
    num_layers: int
    skipped_attention: tuple[int, ...]
    skipped_mlp: tuple[int, ...]
    method: str
    """How it was found."""
    figures: dict[str, float] = {}
    """On calibration text that the search did not see: agreement, wrong accepts, ..."""
    escalation: Escalation = Escalation()
    provenance: dict[str, Any] = {}

    @property
    def layers(self) -> SlimLayers:
        """What is skipped.

        Raises:
            UserError: that is no slim model.
        """
        return SlimLayers(
            self.num_layers, frozenset(self.skipped_attention), frozenset(self.skipped_mlp)
        )

    @property
    def key(self) -> str:
        """A name for target and skipped layers: what a measured cost holds for."""
        kept = [
            self.model,
            self.num_layers,
            *map(sorted, (self.skipped_attention, self.skipped_mlp)),
        ]
        return hashlib.sha256(json.dumps(kept).encode()).hexdigest()[:16]


def write_slim(path: Path, slim: SlimFile) -> None:
    """Write whole or not at all, replacing what is there."""
    text = json.dumps(slim.model_dump(mode="json"), indent=2, sort_keys=True)
    with atomic_path(path) as draft:
        draft.write_text(text + "\n", encoding="utf-8")


def read_slim(path: Path, *, model: str | None = None) -> SlimFile:
    """Read a slim model; with a target's fingerprint, only one that is made for it.

    Raises:
        UserError: absent, damaged, of another version or for another target.
    """
    slim = read_versioned(path, SlimFile, what="slim model", version=FORMAT_VERSION, remedy=SEARCH)
    _ = slim.layers  # refuses what no model has
    if model is not None and slim.model != model:
        raise UserError(
            f"slim model {path}: made for target {slim.model}, here it is {model}; {SEARCH}"
        )
    return slim
