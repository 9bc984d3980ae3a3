"""What a sweep is asked for: its YAML file, its search space, and one trial's settings."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from hvd_ray.config import Config, Positive, read_settings, validated
from hvd_ray.payoff.cost import CostTable
from hvd_ray.payoff.cost_policy import CostPolicy
from hvd_ray.payoff.estimator import PredictorEstimator
from hvd_ray.payoff.features import FEATURE_GROUPS, NOTHING, hidden_features
from hvd_ray.payoff.policy import Policy, ThresholdPolicy
from hvd_ray.payoff.predictor import Kind
from hvd_ray.payoff.training_settings import TrainingSettings
from hvd_ray.tuning.knobs import Choice, KnobField, Range, Scalar, Suggests

TAU_POLICY: Literal["hvd_tau"] = "hvd_tau"
COST_POLICY: Literal["hvd_cost"] = "hvd_cost"
COST_PREFIX = "cost."
_COST_SEAMS = ("estimator", "costs")

TAUS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 24.0)

TunedPolicy = Literal["hvd_tau", "hvd_cost"]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TrialSettings(_Section):
    """One trial: its predictor's training and the policy that asks it; the paper's by default."""

    policy: TunedPolicy = "hvd_tau"
    kind: Kind = "mlp"
    """`mlp` has the squared error as its loss, `survival` the cross-entropy by position."""
    depth: Annotated[int, Field(ge=0, le=8)] = 2
    width: Annotated[int, Field(ge=1, le=4096)] = 256
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 1e-3
    epochs: Annotated[int, Field(ge=1, le=1000)] = 20
    batch_size: Positive = 65_536
    without: str = NOTHING
    """Feature groups that the predictor may not see, joined by `+`."""
    tau: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 6.0
    cost: dict[str, Scalar] = {}
    """Knobs of `hvd_cost`: fields of `payoff.cost_policy.CostPolicy`."""

    @model_validator(mode="after")
    def _check(self) -> TrialSettings:
        try:
            hidden_features(self.without)
        except ValueError as error:
            raise _bad(str(error)) from None
        for name, value in self.cost.items():
            _check_cost_knob(name, value)
        return self

    def training(self, seed: int) -> TrainingSettings:
        return TrainingSettings(
            kind=self.kind,
            epochs=self.epochs,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            hidden=(self.width,) * self.depth,
            without=self.without,
            seed=seed,
            tau=self.tau,
        )

    def decider(self, estimator: PredictorEstimator, costs: CostTable) -> Policy:
        """The policy with this trial's knobs."""
        if self.policy == TAU_POLICY:
            return ThresholdPolicy(estimator, self.tau)
        return CostPolicy(estimator, costs, **self.cost)  # type: ignore[arg-type]  # checked above

    def flat(self) -> dict[str, Scalar]:
        """As a row of the table: what this trial's policy does not use is left out."""
        row = self.model_dump(exclude={"cost", *(() if self.policy == TAU_POLICY else ("tau",))})
        return row | {f"{COST_PREFIX}{name}": value for name, value in self.cost.items()}

    @classmethod
    def from_flat(cls, row: Mapping[str, Any]) -> TrialSettings:
        """The inverse of `flat`."""
        plain = {key: value for key, value in row.items() if not key.startswith(COST_PREFIX)}
        cost = {
            key.removeprefix(COST_PREFIX): value
            for key, value in row.items()
            if key.startswith(COST_PREFIX)
        }
        return cls.model_validate({**plain, "cost": cost})


class Space(_Section):
    """A knob for each setting of a trial.

    Under `hvd_cost` the predictor needs a survival curve, so there `kind` is `survival` and `tau`
    is not asked; the `cost` knobs are asked there only.
    """

    policy: KnobField = Choice(("hvd_tau", "hvd_cost"))
    kind: KnobField = Choice(("mlp", "survival"))
    depth: KnobField = Range("int", 1, 3)
    width: KnobField = Choice((32, 64, 128, 256))
    learning_rate: KnobField = Range("log", 3e-4, 1e-2)
    epochs: KnobField = Range("int", 5, 40)
    batch_size: KnobField = Choice((65_536,))
    without: KnobField = Choice((NOTHING, *FEATURE_GROUPS, "decode_state+draft_structure"))
    tau: KnobField = Range("uniform", 0.0, 12.0)
    cost: dict[str, KnobField] = {"objective": Choice(("rate", "cycle"))}

    @field_validator("*", mode="after")
    @classmethod
    def _check(cls, given: Any, info: ValidationInfo) -> Any:
        """Every value that a knob can take must be one that a trial takes."""
        assert info.field_name
        if isinstance(given, Choice | Range):
            for value in given.extremes:
                _check_trial({info.field_name: value})
        else:
            for name, knob in given.items():
                for value in knob.extremes:
                    _check_trial({"cost": {name: value}})
        return given

    @property
    def max_epochs(self) -> int:
        return max(int(value) for value in self.epochs.extremes)

    @property
    def has_tau_policy(self) -> bool:
        return self.policy.holds(TAU_POLICY)

    @property
    def has_cost_policy(self) -> bool:
        return self.policy.holds(COST_POLICY)

    def suggest(self, trial: Suggests) -> dict[str, Scalar]:
        """The flat settings of the next trial; Optuna's define-by-run form."""
        row: dict[str, Scalar] = {"policy": self.policy.suggest("policy", trial)}
        is_cost = row["policy"] == COST_POLICY
        skipped = {"policy", "kind", "tau"} if is_cost else {"policy"}
        for name, knob in self._plain_knobs():
            if name not in skipped:
                row[name] = knob.suggest(name, trial)
        if is_cost:
            row["kind"] = "survival"
            for name, knob in self.cost.items():
                row[f"{COST_PREFIX}{name}"] = knob.suggest(f"{COST_PREFIX}{name}", trial)
        return row

    def paper_point(self) -> dict[str, Scalar]:
        """The paper's values of the searched knobs, where the space holds them: tried first."""
        paper = TrialSettings().model_dump()
        return {
            name: paper[name]
            for name, knob in self._plain_knobs()
            if not knob.is_fixed and knob.holds(paper[name])
        }

    def _plain_knobs(self) -> list[tuple[str, Choice | Range]]:
        return [(name, getattr(self, name)) for name in Space.model_fields if name != "cost"]


class Asha(_Section):
    """Asynchronous successive halving over epochs (ASHA, 1810.05934)."""

    grace_epochs: Positive = 3
    """Every trial gets this far."""
    reduction_factor: Annotated[int, Field(ge=2, le=16)] = 3
    """One of so many goes on at each rung."""

    def rungs(self, epochs: int) -> frozenset[int]:
        """The epochs after which a trial of so many is judged; the last one is among them."""
        rungs, epoch = {epochs}, self.grace_epochs
        while epoch < epochs:
            rungs.add(epoch)
            epoch *= self.reduction_factor
        return frozenset(rungs)


class Validation(_Section):
    """Sessions of the train split that trials are judged by and never learn from."""

    fraction: Annotated[float, Field(gt=0, lt=1)] = 0.3
    max_tokens_per_workload: Positive = 20_000
    """Sessions beyond this go back to training."""


class SweepSettings(_Section):
    """A file of `tune_configs/`; the defaults are those of `payoff.yaml`."""

    trials: Positive = 64
    concurrency: Positive = 2
    seed: int = 42
    startup_trials: Positive = 16
    """Drawn at random before Optuna's TPE sampler begins to learn."""
    asha: Asha = Asha()
    validation: Validation = Validation()
    taus: Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(min_length=2)] = TAUS
    """Thresholds of the curves on the page."""
    space: Space = Field(default_factory=lambda: Space())


def load_sweep(
    path: Path | None = None, overrides: Sequence[str] = ()
) -> tuple[SweepSettings, list[str]]:
    """A sweep file with `key=value` overrides, and those of them that are for the configuration.

    Raises:
        UserError: the file is absent, a key is unknown or a value is out of range.

    Warns:
        UserWarning: a knob was given that no policy of the space uses.
    """
    ours: list[str] = []
    others: list[str] = []
    for override in overrides:
        root = override.partition("=")[0].partition(".")[0]
        belongs_to_config = root in Config.model_fields and root not in SweepSettings.model_fields
        (others if belongs_to_config else ours).append(override)
    tree = read_settings(path, ours)
    sweep = validated(SweepSettings, tree, where="hvd_ray/tuning/space.py")
    _warn_of_idle_knobs(tree.get("space") or {}, sweep.space)
    return sweep, others


def _warn_of_idle_knobs(given: Mapping[str, Any], space: Space) -> None:
    idle = [name for name in ("kind", "tau") if not space.has_tau_policy]
    idle += [] if space.has_cost_policy else ["cost"]
    for name in idle:
        if name in given:
            message = f"setting space.{name} has no effect with space.policy={space.policy.plain()}"
            warnings.warn(message, UserWarning, stacklevel=3)


@cache
def _cost_knobs() -> Mapping[str, TypeAdapter[Any]]:
    """The fields of `CostPolicy` that can be turned, with what checks their values."""
    hints = get_type_hints(CostPolicy)
    names = [field.name for field in fields(CostPolicy) if field.init]
    plain = [
        name for name in names if name not in _COST_SEAMS and get_origin(hints[name]) is not tuple
    ]
    return {name: TypeAdapter(hints[name]) for name in plain}


def _check_cost_knob(name: str, value: Scalar) -> None:
    knobs = _cost_knobs()
    if name not in knobs:
        raise _bad(f"{name!r} is no knob of hvd_cost; there are {', '.join(knobs)}")
    try:
        knobs[name].validate_python(value)
    except ValidationError as error:
        raise _bad(f"{name}: {error.errors()[0]['msg']}") from None


def _check_trial(values: Mapping[str, Any]) -> None:
    try:
        TrialSettings.model_validate(values)
    except ValidationError as error:
        raise _bad(error.errors()[0]["msg"]) from None


def _bad(message: str) -> PydanticCustomError:
    return PydanticCustomError("setting", "{message}", {"message": message})
