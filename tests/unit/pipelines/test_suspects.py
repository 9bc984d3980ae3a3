"""A trace at which workers keep dying is given up; one that met a killed run is not."""

from pathlib import Path

import pytest

from hvd_ray.pipelines.suspects import MAX_DEATHS, PartWatch


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    return tmp_path / "suspects" / "s0000-p00000.json"


def die_at(notes: Path, trace_id: str, run: str) -> None:
    """A worker that begins with the part, comes as far as the trace and is no more."""
    watch = PartWatch(notes, run=run)
    for before in ("a", trace_id):
        watch.begin(before)


def test_three_deaths_in_one_run_are_enough(notes: Path) -> None:
    for number in range(MAX_DEATHS):
        assert not PartWatch(notes, run="one").is_given_up("b"), number
        die_at(notes, "b", "one")
    watch = PartWatch(notes, run="one")
    assert watch.is_given_up("b")
    assert not watch.is_given_up("a")


def test_deaths_of_other_runs_do_not_count(notes: Path) -> None:
    for number in range(2 * MAX_DEATHS):
        die_at(notes, "b", f"run {number}")
    assert not PartWatch(notes, run="last").is_given_up("b")


def test_deaths_at_different_traces_do_not_add_up(notes: Path) -> None:
    for trace_id in ("b", "c", "b", "c"):
        die_at(notes, trace_id, "one")
    watch = PartWatch(notes, run="one")
    assert not watch.is_given_up("b")
    assert not watch.is_given_up("c")


def test_a_written_part_leaves_no_note(notes: Path) -> None:
    watch = PartWatch(notes, run="one")
    watch.begin("a")
    assert notes.exists()
    watch.close()
    watch.close()
    assert not notes.exists()


def test_a_note_cut_short_is_no_note(notes: Path) -> None:
    notes.parent.mkdir()
    notes.write_text('{"run": "one", "cur')
    assert not PartWatch(notes, run="one").is_given_up("a")
