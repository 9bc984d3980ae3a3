from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

import pytest

from hvd_ray.bench.stored_report import report_place

KEPT = Path("docs/reports/soak.md")
FULL = {"--seconds": 1200.0}
PARSER = argparse.ArgumentParser()


@pytest.mark.parametrize("seconds", [1200, 3600])
def test_a_whole_run_replaces_the_report_that_is_kept(seconds: float) -> None:
    assert report_place(PARSER, None, stored=KEPT, asked={"--seconds": seconds}, full=FULL) == KEPT


def test_a_try_needs_a_file_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        report_place(PARSER, None, stored=KEPT, asked={"--seconds": 120}, full=FULL)
    said = capsys.readouterr().err
    assert "--seconds 120: soak.md is kept of runs with --seconds 1200; name a file" in said
    own = Path("out/try.md")
    assert report_place(PARSER, own, stored=KEPT, asked={"--seconds": 120}, full=FULL) == own


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("tests.exactness.__main__", ["--tokens", "5000"]),
        ("tests.exactness.__main__", ["--draws", "10"]),
        ("tests.exactness.__main__", ["--tokens", "0"]),
        ("tests.fuzz.__main__", ["--examples", "5"]),
        ("scripts.soak", ["--seconds", "120"]),
    ],
)
def test_each_check_refuses_to_replace_its_report_by_a_try(
    module: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        import_module(module).main(words)
    assert "--report FILE" in capsys.readouterr().err
