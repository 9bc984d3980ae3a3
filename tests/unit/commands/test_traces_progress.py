"""Progress without a terminal: a line now and then, in the units of what is being counted."""

from hvd_ray.commands import traces_progress
from hvd_ray.commands.traces_progress import shown_progress


def test_each_part_of_a_run_counts_in_its_own_units(monkeypatch, capsys):
    monkeypatch.setattr(traces_progress, "SECONDS_BETWEEN_LINES", 0)
    with shown_progress("steps") as progress:
        progress.expect(3)
        progress.advance(1, "begun")
        progress.expect(30, unit="rows")
        progress.advance(30, "60 traces")
    assert capsys.readouterr().err.splitlines() == [
        "1 of 3 steps; begun",
        "30 of 30 rows; 60 traces",
    ]
