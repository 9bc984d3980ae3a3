"""The metrics of a training that is killed and goes on: every step stands there once."""

import json
from pathlib import Path

import pytest

from hvd_ray.drafting.eagle3_job import open_metrics


def log(run: Path, steps: range) -> None:
    with open_metrics(run) as file:
        for step in steps:
            file.write(json.dumps({"step": step, "loss": 1.0}) + "\n")


def logged(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("saved", "expected"), [(None, range(6)), (3, range(6)), (5, range(8))])
def test_steps_behind_the_checkpoint_are_logged_anew(tmp_path, saved, expected) -> None:
    run = tmp_path / "run"
    log(run, range(5))
    if saved is not None:
        (run / "checkpoint.json").write_text(json.dumps({"step": saved, "file": "x"}))
    log(run, range(saved or 0, expected.stop))
    assert logged(run) == list(expected)


def test_a_line_that_was_cut_short_goes(tmp_path) -> None:
    run = tmp_path / "run"
    log(run, range(3))
    (run / "checkpoint.json").write_text(json.dumps({"step": 9, "file": "x"}))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    log(run, range(3, 4))
    assert logged(run) == [0, 1, 2, 3]
