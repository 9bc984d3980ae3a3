"""`hvd tune` on the command line, as far as it goes without Ray."""

import json
from pathlib import Path
from typing import Any

import pytest

from hvd_ray.cli import main
from hvd_ray.commands import tune as command
from hvd_ray.tuning.folder import SweepFolder, write_json
from tests.unit.tuning.test_page import RESULT

Captured = pytest.CaptureFixture[str]


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["tune", *words])
    code = ended.value.code
    assert isinstance(code, int)
    return code


def refusal(capsys: Captured, *words: str) -> str:
    assert run(*words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()[-1]


PLACES = ("--labels", "l", "--traces", "t")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "say where the data are: hvd tune --labels LABELS_DIR --traces TRACES_DIR"),
        (PLACES[:2], "say where the data are"),
        ((*PLACES, "--trials", "0"), "setting trials: Input should be greater than or equal to 1"),
        ((*PLACES, "--concurrency", "0"), "setting concurrency: Input should be greater"),
        ((*PLACES, "spaces.tau=1"), "setting spaces: unknown"),
        ((*PLACES, "tracking.url=x"), "setting tracking.url: unknown"),
        ((*PLACES, "--config", "nowhere.yaml"), "config nowhere.yaml: cannot be read"),
        (("--page", "nowhere"), "nowhere: holds no finished sweep"),
    ],
)
def test_what_it_refuses(words: tuple[str, ...], message: str, capsys: Captured) -> None:
    assert message in refusal(capsys, *words)


def test_labels_that_are_none_are_refused(capsys: Captured, tmp_path: Path) -> None:
    words = ("--labels", str(tmp_path), "--traces", str(tmp_path), "--costs", "pass")
    out = tmp_path / "sweep"
    assert "no labels" in refusal(capsys, *words, "--out", str(out))
    assert not out.exists(), "nothing is begun"


def test_the_page_of_a_finished_sweep_is_drawn_again(capsys: Captured, tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    write_json(folder.result, RESULT)
    assert run("--page", str(tmp_path), "--json") == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert answer == {"page": str(folder.page)}
    assert "data-trial" in folder.page.read_text(encoding="utf-8")


def test_report_draws_it_too(capsys: Captured, tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    write_json(folder.result, RESULT)
    with pytest.raises(SystemExit) as stop:
        main(["report", "--sweep", str(tmp_path), "--json"])
    assert stop.value.code == 0
    assert json.loads(capsys.readouterr().out) == {"written": [str(folder.page)]}
    assert "data-trial" in folder.page.read_text(encoding="utf-8")


@pytest.mark.parametrize("is_installed", [False, True])
def test_tensorboard_is_named_with_what_it_needs(
    is_installed: bool, capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its files are written in any case, but it is not among our packages."""
    monkeypatch.setattr(command, "find_spec", lambda _name: "a spec" if is_installed else None)
    for table in ("_trials_table", "_test_table"):
        monkeypatch.setattr(command, table, lambda *_: "")
    command._show(RESULT | {"registered": None}, command._places(tmp_path))
    (line,) = (s for s in capsys.readouterr().out.splitlines() if s.startswith("tensorboard:"))
    assert line.endswith("/trials" if is_installed else "/trials (first `pip install tensorboard`)")
