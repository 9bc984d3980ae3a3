"""Numbers on the command line: one form for all, and a range for every one."""

from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.main import get_command

from hvd_ray.cli import build_app, main
from hvd_ray.number_options import real, whole
from hvd_ray.types import MAX_COUNT


@pytest.mark.parametrize(
    ("text", "number"),
    [("64", 64), ("1e9", 10**9), ("1_000", 1000), ("1,000", 1000), ("2.0", 2), (7, 7), ("-3", -3)],
)
def test_a_count_has_several_forms(text: Any, number: int) -> None:
    assert whole(text) == number


@pytest.mark.parametrize("text", ["x", "", "1.5", "nan", "inf", "-inf", "1e400", "0x10"])
def test_what_is_no_integer_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is no integer"):
        whole(text)


@pytest.mark.parametrize("text", ["x", "", "nan", "inf", "-inf", "1e400"])
def test_what_is_no_finite_number_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is no finite number"):
        real(text)


@given(st.integers(), st.integers(), st.integers())
def test_an_integer_is_itself_or_out_of_range(number: int, low: int, high: int) -> None:
    if low <= number <= high:
        assert whole(str(number), least=low, most=high) == number
    else:
        with pytest.raises(typer.BadParameter, match="out of range"):
            whole(str(number), least=low, most=high)


def _numbers(command: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Command and flag of every option that takes a number."""
    children = getattr(command, "commands", {})
    found = [leaf for name, child in children.items() for leaf in _numbers(child, (*path, name))]
    kinds = [(param, param.type_descriptor.annotation) for param in command.params]
    return found + [(*path, param.opts[0]) for param, kind in kinds if kind in (int, float)]


NUMBERS = _numbers(get_command(build_app()))


def test_the_commands_have_such_options() -> None:
    assert {("traces", "collect", "--limit"), ("drafter", "train", "--seed")} <= set(NUMBERS)
    assert len(NUMBERS) > 50


@pytest.mark.parametrize("words", NUMBERS, ids=" ".join)
def test_a_number_beyond_all_bounds_is_refused_by_name(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    flag, largest = words[-1], str(10**310)
    with pytest.raises(SystemExit) as stop:
        main([*words[:-1], f"{flag}={largest}"])
    said = capsys.readouterr().err
    assert stop.value.code == 2
    assert f"Invalid value for '{flag}': 1000" in said
    assert said.count("\n") == 1


def test_a_count_beyond_what_is_kept_names_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["traces", "collect", "--max-tokens", "1e12"])
    assert f"'--max-tokens': 1e12 is out of range: expected at most {MAX_COUNT:,}" in (
        capsys.readouterr().err
    )
