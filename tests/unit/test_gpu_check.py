"""`make gpu-check` without a GPU: what it runs, what it calls a failure, and that it ends."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from hvd_ray import cli
from scripts import gpu_check
from scripts.gpu_check import Outcome, Part


def given(tmp_path: Path, *settings: str, dtype: str = "float32") -> argparse.Namespace:
    return argparse.Namespace(
        settings=list(settings), out=tmp_path, systems="greedy,eagle3", prompts=1, dtype=dtype
    )


def answer(**identical: float) -> str:
    row: dict[str, Any] = {
        "tokens_per_second": 100.0,
        "speedup_vs_greedy": 1.5,
        "emitted_per_pass": 2.0,
    }
    rows = [row | {"system": name, "identical_to_greedy": i} for name, i in identical.items()]
    return json.dumps({"aggregate": rows})


def test_it_is_done_within_ten_minutes(tmp_path: Path) -> None:
    parts = list(gpu_check.parts(given(tmp_path)))
    assert [part.name for part in parts] == ["exactness", "speed", "acceptance", "costs"]
    assert sum(part.limit_s for part in parts) < 600


def test_in_vllm_nothing_is_sampled(tmp_path: Path) -> None:
    """Some shipped prompts have a temperature; their outputs would differ, as they may."""
    speed = next(part for part in gpu_check.parts(given(tmp_path)) if part.name == "speed")
    at = speed.arguments.index("--temperature")
    assert speed.arguments[at + 1] == "0"


def test_its_commands_are_those_that_users_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each option is one that the command line knows; --help ends it before anything is done."""
    monkeypatch.setattr(gpu_check, "find_spec", lambda _: True)
    for part in gpu_check.parts(given(tmp_path, "model=here", "seed=3", dtype="bfloat16")):
        if part.arguments[:2] == gpu_check.HVD:
            with pytest.raises(SystemExit) as stop:
                cli.main([*part.arguments[2:], "--help"])
            assert stop.value.code == 0, capsys.readouterr().err
            assert "Usage" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("identical", "is_exact", "expected"),
    [
        ({"greedy": 1, "eagle3": 1, "hvd_cost": 1}, True, True),
        ({"greedy": 1, "eagle3": 1, "hvd_cost": 0.9}, True, False),
        ({"greedy": 1, "eagle3": 0.9, "hvd_cost": 0.9}, True, True),  # near-ties of the GPU's
        ({"greedy": 1, "hvd_cost": 0.9}, True, False),
        ({"greedy": 1, "eagle3": 1, "hvd_cost": 0.5}, False, True),  # bfloat16
    ],
)
def test_the_plugin_is_held_to_vllms_own_drafts(
    identical: dict[str, float], is_exact: bool, expected: bool
) -> None:
    is_right, lines = gpu_check.judge_speed(answer(**identical), is_exact=is_exact)
    assert is_right is expected
    assert len(lines) == len(identical)
    assert "1.50x, 2.00 tokens a pass" in lines[0]


def python(code: str, **fields: Any) -> Part:
    return Part("part", ("-c", code), **{"limit_s": 60, **fields})


@pytest.mark.parametrize(
    ("part", "status"),
    [
        (python("print('done')"), "passed"),
        (python("raise SystemExit(1)"), "FAILED: exit code 1"),
        (python("print('no JSON')", judge=gpu_check.judge_acceptance), "FAILED: exit code 0"),
        (python("", lacking="vLLM is not installed"), "left out: vLLM is not installed"),
    ],
)
def test_what_fails_says_so(tmp_path: Path, part: Part, status: str) -> None:
    assert gpu_check.run(part, tmp_path).status == status


def test_what_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    sleep = "import time; time.sleep(60)"
    code = (
        "import subprocess, sys; print('up', file=sys.stderr, flush=True); "
        f"subprocess.run([sys.executable, '-c', {sleep!r}])"
    )
    started = monotonic()
    outcome = gpu_check.run(python(code, limit_s=3), tmp_path)
    assert monotonic() - started < 30
    assert outcome.status == "FAILED: not done in 3 s"
    assert outcome.lines == ["up"]


@pytest.mark.parametrize(("status", "code"), [("passed", 0), ("left out: x", 0), ("FAILED: y", 1)])
def test_the_exit_code_tells(tmp_path: Path, status: str, code: int) -> None:
    assert gpu_check.report([Outcome("speed", status)], "a GPU", tmp_path) == code
    assert json.loads((tmp_path / "summary.json").read_text())["gpu"] == "a GPU"


def test_without_a_gpu_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "gpu_name", lambda: None)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--out", str(tmp_path / "out")])
    assert gpu_check.main() == 2
    assert "needs a CUDA GPU" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
