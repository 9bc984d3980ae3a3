"""Numbers on the command line: `1e9` where a count is meant, and a range for every one.

typer takes an integer of any size and any float. A count beyond what is kept on disk, or a NaN,
would end far from the option that it was given to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import ParameterInfo

from hvd_ray.types import MAX_COUNT

MAX_SHOWN = 2**31
"""A bound beyond it is checked, and left out of the help, where its digits would not fit."""
MAX_NUMBER = 1e300
"""Of an option that names no range of its own: all that is finite, nearly."""


def with_checked_numbers(app: typer.Typer) -> typer.Typer:
    """The same app, in which every number is read by `whole` or `real` within its own range."""
    for command in app.registered_commands:
        if command.callback is not None:
            _check_numbers(command.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            with_checked_numbers(group.typer_instance)
    return app


def whole(given: str | int, *, least: int = -MAX_COUNT, most: int = MAX_COUNT) -> int:
    """An integer, also as 1e9 or 1_000.

    Raises:
        typer.BadParameter: it is none, or out of range; click adds the option's name.
    """
    try:
        number = _exact(str(given).replace(",", ""))
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{_cut(given)} is no integer: expected a number such as 64 or 1e9"
        ) from None
    _refuse_beyond(given, number, least, most)
    return number


def real(given: str | float, *, least: float = -MAX_NUMBER, most: float = MAX_NUMBER) -> float:
    """A finite number.

    Raises:
        typer.BadParameter: it is none, or out of range; click adds the option's name.
    """
    try:
        number = float(given)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise typer.BadParameter(f"{_cut(given)} is no finite number: expected one such as 0.5")
    _refuse_beyond(given, number, least, most)
    return number


_READERS: dict[Any, Callable[..., Any]] = {int: whole, float: real}


def _check_numbers(command: Callable[..., Any]) -> None:
    hints = get_type_hints(command, include_extras=True)
    for hint in hints.values():
        if get_origin(hint) is Annotated:
            kind, *about = get_args(hint)
            reader = _READERS.get(_without_none(kind))
            for info in (each for each in about if isinstance(each, ParameterInfo)):
                if reader is not None and info.parser is None:
                    info.parser = partial(reader, **_range(info))
                    if info.max is not None and info.max > MAX_SHOWN:
                        info.max = None
    command.__annotations__ = hints


def _without_none(kind: Any) -> Any:
    """`int` of `int | None`."""
    return next((part for part in get_args(kind) if part is not type(None)), kind)


def _range(info: ParameterInfo) -> dict[str, Any]:
    given = {"least": info.min, "most": info.max}
    return {key: value for key, value in given.items() if value is not None}


def _exact(text: str) -> int:
    """Not by way of a float where it is written out: 2**53 + 1 has none."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise ValueError(text) from None
        return int(number)


def _refuse_beyond(given: object, number: float, least: float, most: float) -> None:
    if least <= number <= most:
        return
    if least in (-MAX_COUNT, -MAX_NUMBER):
        bounds = f"at most {most:,}" if number > most else f"at least {least:,}"
    else:
        bounds = f"{least:,} to {most:,}"
    raise typer.BadParameter(f"{_cut(given)} is out of range: expected {bounds}")


def _cut(given: object) -> str:
    text = str(given)
    return text if len(text) <= 40 else f"{text[:37]}..."
