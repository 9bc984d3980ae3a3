"""Which words of a command line are settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_ray.commands.arguments import sorted_out

SETTINGS = ["policy.tau=4", "drafting.eagle3.head=DIR", "drafting.eagle3.num_tokens=3", "dtype=x"]


def test_settings_are_told_from_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a=b.jsonl").touch()
    names = ["open_chat", "notes.jsonl", "a=b.jsonl", "3=4", "./x=y"]
    assert sorted_out([*names, *SETTINGS]) == (names, SETTINGS)
