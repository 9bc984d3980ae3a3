"""How a payoff predictor is trained: the settings, and the keys by which people set them.

The defaults are the paper's (2606.01019): two hidden layers of 256, ReLU, Adam at 1e-3, 20 epochs,
batches of 65,536, seed 42. Dropout and decoupled weight decay are ours: a few dozen sessions are
soon learnt by heart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from hvd_ray.config import Config, Positive
from hvd_ray.errors import UserError
from hvd_ray.payoff.features import NOTHING, hidden_features
from hvd_ray.payoff.predictor import KINDS, Kind

LISTED_IN = "hvd_ray/payoff/training_settings.py and hvd_ray/config.py"

MIN_STEPS_PER_EPOCH = 64
"""The paper's batch supposes millions of positions; with fewer the batch shrinks to keep these."""
MIN_BATCH = 64

SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "mlp": {"hidden": (256, 256), "members": 1},
        "survival": {"hidden": (128, 128), "members": 3},
    }
)
"""What `hvd train` trains: the paper's network, and for the curve three half as wide, which cost as
much to ask, separate as well and are better calibrated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """How to train.

    Raises:
        UserError: a value is out of its range.
    """

    kind: Kind = "mlp"
    epochs: int = 20
    batch_size: int = 65_536
    learning_rate: float = 1e-3
    hidden: tuple[int, ...] = (256, 256)
    members: int = 1
    """Networks of that shape, trained side by side from different starts; their mean is kept."""
    dropout: float | None = None
    """Share of hidden values that are left out at each step; None: 0.2 for `survival`, 0 for `mlp`,
    as in the paper."""
    weight_decay: float = 0.1
    """Decoupled from the gradient, times the learning rate."""
    without: str = NOTHING
    """Feature groups that the predictor may not see, joined by `+`."""
    seed: int = 42
    tau: float = 6.0
    """Threshold at which precision and recall are reported; it does not change the weights."""

    def __post_init__(self) -> None:
        _require(self.kind in KINDS, "kind", f"one of {', '.join(KINDS)}", self.kind)
        _require(self.epochs >= 1, "epochs", ">= 1", self.epochs)
        _require(self.batch_size >= 1, "batch_size", ">= 1", self.batch_size)
        rate = self.learning_rate
        _require(math.isfinite(rate) and rate > 0, "learning_rate", "> 0", rate)
        is_net = self.members == 1 or (self.members > 1 and bool(self.hidden))
        _require(is_net, "members", ">= 1, and 1 without hidden layers", self.members)
        _require(0 <= self.dropout_share < 1, "dropout", "in [0, 1)", self.dropout)
        decay = self.weight_decay
        _require(math.isfinite(decay) and decay >= 0, "weight_decay", ">= 0", decay)
        try:
            hidden_features(self.without)
        except ValueError as error:
            raise UserError(f"training: without: {error}") from None
        _require(all(width >= 1 for width in self.hidden), "hidden", "widths >= 1", self.hidden)
        _require(math.isfinite(self.tau) and self.tau >= 0, "tau", "a number >= 0", self.tau)

    @property
    def dropout_share(self) -> float:
        if self.dropout is not None:
            return self.dropout
        return 0.2 if self.kind == "survival" else 0.0

    def batch_for(self, num_positions: int) -> int:
        """Positions in a batch, fewer than asked for where there are few."""
        enough_steps = max(MIN_BATCH, num_positions // MIN_STEPS_PER_EPOCH)
        return min(self.batch_size, enough_steps)


class TrainKnobs(BaseModel):
    """The section `train` of `hvd train`; what is not given is as usual for the kind."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    depth: Annotated[int, Field(ge=0, le=8)] | None = None
    """Hidden layers."""
    width: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Of each hidden layer."""
    members: Annotated[int, Field(ge=1, le=16)] | None = None
    """Networks of which the mean is kept."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] | None = None
    batch_size: Positive | None = None
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    without: str | None = None
    """Feature groups that the predictor may not see, joined by `+`."""

    def settings(self, kind: Kind, *, epochs: int, seed: int, tau: float) -> TrainingSettings:
        """The usual settings of this kind with what was given.

        Raises:
            UserError: a value is out of its range.
        """
        given: dict[str, Any] = self.model_dump(exclude_none=True, exclude={"depth", "width"})
        usual = {**SHAPES.get(kind, {}), **given}
        widths = usual.pop("hidden", ())
        depth = len(widths) if self.depth is None else self.depth
        hidden = (self.width or max(widths, default=1),) * depth
        return TrainingSettings(
            kind=kind, epochs=epochs, seed=seed, tau=tau, hidden=hidden, **usual
        )


class TrainConfig(Config):
    """The configuration tree with a `train` section."""

    train: TrainKnobs = TrainKnobs()


def _require(holds: bool, name: str, expected: str, value: object) -> None:
    if not holds:
        raise UserError(f"training: {name} must be {expected}, got {value!r}")
