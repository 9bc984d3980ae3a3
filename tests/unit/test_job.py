"""A command as a job: the same flags, and nothing written where it would be lost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_ray import job
from hvd_ray.job import IN_A_JOB, run_job

REPO = Path(__file__).parents[2]
JOBS = sorted(path.stem for path in (REPO / "jobs").glob("*.py") if path.stem != "preflight")


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What reaches `hvd`."""
    calls: list[list[str]] = []
    monkeypatch.setattr(job, "main", calls.append)
    return calls


def submitted(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setenv(IN_A_JOB, "{}")
    monkeypatch.setattr(sys, "argv", ["jobs/x.py", *words])


@pytest.mark.parametrize("words", [("--out", "/s/t"), ("--out=/s/t",), ("--out", "t", "--out=/s")])
def test_what_was_typed_reaches_the_command(monkeypatch, called, words) -> None:
    submitted(monkeypatch, "traces", *words)
    run_job("traces", "label", always=("--resume",))
    assert called == [["traces", "label", "traces", *words, "--resume"]]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "must say where its results go: --out /SHARED"),
        (("--out",), "must say where its results go"),
        (("--out", "labels"), "--out labels lies in the job's own folder"),
        (("--out=/s", "--out=labels"), "--out labels lies in the job's own folder"),
    ],
)
def test_what_would_be_lost_is_refused(monkeypatch, called, capsys, words, reason) -> None:
    submitted(monkeypatch, *words)
    with pytest.raises(SystemExit) as ended:
        run_job("traces", "label")
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err
    assert not called


def test_a_plain_script_may_write_beside_itself(monkeypatch, called) -> None:
    monkeypatch.delenv(IN_A_JOB, raising=False)
    monkeypatch.setattr(sys, "argv", ["jobs/x.py", "--out", "labels"])
    run_job("traces", "label")
    assert called == [["traces", "label", "--out", "labels"]]


def test_a_job_may_ask_for_help_and_need_no_output(monkeypatch, called) -> None:
    submitted(monkeypatch, "--help")
    run_job("traces", "label")
    submitted(monkeypatch)
    run_job("promote", output=None)
    assert called == [["traces", "label", "--help"], ["promote"]]


def test_the_readme_lists_every_job() -> None:
    text = (REPO / "jobs" / "README.md").read_text(encoding="utf-8")
    assert [name for name in JOBS if f"`{name}`" not in text] == []


def test_a_job_runs_by_plain_python() -> None:
    done = subprocess.run(
        [sys.executable, "jobs/train_drafter.py", "--help"],
        cwd=REPO,
        env=os.environ | {"PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "--workers" in done.stdout
