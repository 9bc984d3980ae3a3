"""Knobs: what a sweep may turn, as it stands in YAML.

A plain value is fixed; `{choice: [a, b]}`, `{int: [1, 3]}`, `{uniform: [0, 12]}` and
`{log: [1.0e-4, 1.0e-2]}` are searched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

from pydantic import PlainSerializer, PlainValidator
from pydantic_core import PydanticCustomError

from hvd_ray.errors import shown

Scalar = bool | int | float | str
RangeKind = Literal["int", "uniform", "log"]


class Suggests(Protocol):
    """What of an Optuna trial a knob asks."""

    def suggest_categorical(self, name: str, choices: tuple[Scalar, ...]) -> Any: ...

    def suggest_int(self, name: str, low: int, high: int) -> int: ...

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float: ...


@dataclass(frozen=True, slots=True)
class Choice:
    """One of some values; a single one is fixed."""

    values: tuple[Scalar, ...]

    @property
    def is_fixed(self) -> bool:
        return len(self.values) == 1

    @property
    def extremes(self) -> tuple[Scalar, ...]:
        """Values that are allowed only if all are."""
        return self.values

    def holds(self, value: Scalar) -> bool:
        return value in self.values

    def suggest(self, name: str, trial: Suggests) -> Scalar:
        if self.is_fixed:
            return self.values[0]
        value: Scalar = trial.suggest_categorical(name, self.values)
        return value

    def plain(self) -> Any:
        return self.values[0] if self.is_fixed else {"choice": list(self.values)}


@dataclass(frozen=True, slots=True)
class Range:
    """A number between two, both included; `log` searches its logarithm."""

    kind: RangeKind
    low: float
    high: float

    @property
    def is_fixed(self) -> bool:
        return False

    @property
    def extremes(self) -> tuple[Scalar, ...]:
        return self.low, self.high

    def holds(self, value: Scalar) -> bool:
        return not isinstance(value, str) and self.low <= value <= self.high

    def suggest(self, name: str, trial: Suggests) -> Scalar:
        if self.kind == "int":
            return trial.suggest_int(name, int(self.low), int(self.high))
        return trial.suggest_float(name, self.low, self.high, log=self.kind == "log")

    def plain(self) -> Any:
        return {self.kind: [self.low, self.high]}


Knob = Choice | Range


def parse_knob(raw: object) -> Knob:
    """A knob as it stands in YAML."""
    if isinstance(raw, Choice | Range):
        return raw
    if isinstance(raw, Scalar):
        return Choice((raw,))
    if not isinstance(raw, Mapping) or len(raw) != 1:
        raise _bad("expected a value, {choice: [...]}, {int: [a, b]}, {uniform: ...} or {log: ...}")
    ((kind, values),) = raw.items()
    if kind not in ("choice", "int", "uniform", "log"):
        raise _bad(f"{shown(kind)} is none of choice, int, uniform, log")
    if not isinstance(values, list | tuple) or not values:
        raise _bad(f"{kind} needs a list of values")
    if kind == "choice":
        return _choice(values)
    return _range(kind, values)


def _choice(values: Any) -> Choice:
    if not all(isinstance(value, Scalar) for value in values):
        raise _bad("choice takes numbers, words, true and false")
    if len(set(values)) != len(values):
        raise _bad("choice holds a value twice")
    return Choice(tuple(values))


def _range(kind: RangeKind, values: Any) -> Range:
    if len(values) != 2 or not all(_is_number(value) for value in values):
        raise _bad(f"{kind} takes two numbers, the lower and the higher")
    low, high = values
    if not low < high:
        raise _bad(f"{kind}: {low} is not below {high}")
    if kind == "log" and low <= 0:
        raise _bad("log needs numbers above 0")
    if kind == "int" and not (isinstance(low, int) and isinstance(high, int)):
        raise _bad("int takes whole numbers")
    return Range(kind, low, high)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _bad(message: str) -> PydanticCustomError:
    return PydanticCustomError("knob", "{message}", {"message": message})


KnobField = Annotated[
    Knob, PlainValidator(parse_knob), PlainSerializer(lambda knob: knob.plain(), return_type=Any)
]
"""A knob as a field of a settings model."""
