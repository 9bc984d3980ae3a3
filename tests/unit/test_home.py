"""Writing under HVD_HOME: whole or not at all, one at a time, one clear line when it fails."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hvd_ray import home
from hvd_ray.errors import UserError


def test_home_is_named_by_the_environment_and_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HVD_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert home.hvd_home() == tmp_path / "cache" / "hvd_ray"
    monkeypatch.setenv("HVD_HOME", str(tmp_path / "mine"))
    assert home.models_dir() == tmp_path / "mine" / "models"
    assert list(tmp_path.iterdir()) == []


def test_atomic_path_keeps_the_old_file_when_the_writer_fails(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "table.json"
    with home.atomic_path(target) as draft:
        draft.write_text("old")
        assert draft.suffix == ".json"
        assert not target.exists()
    with pytest.raises(TypeError), home.atomic_path(target) as draft, draft.open("w") as handle:
        handle.writelines(["half of the n", 7])  # type: ignore[list-item]
    assert target.read_text() == "old"
    assert [file.name for file in target.parent.iterdir()] == ["table.json"]


def test_atomic_dir_replaces_a_folder_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "model"
    for name in ("first", "second"):
        with home.atomic_dir(target) as draft:
            (draft / name).write_text(name)
    with pytest.raises(IsADirectoryError), home.atomic_dir(target) as draft:
        draft.write_text("a folder is no file")
    assert [file.name for file in target.iterdir()] == ["second"]
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_a_killed_writer_leaves_only_what_clear_leftovers_removes(tmp_path: Path) -> None:
    target = tmp_path / "model.bin"
    code = (
        "import os, sys; from pathlib import Path; from hvd_ray.home import atomic_path\n"
        "with atomic_path(Path(sys.argv[1])) as draft:\n"
        "    draft.write_text('half'); os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(target)], check=False)
    other = tmp_path / "model.json"
    other.write_text("kept")
    assert not target.exists()
    assert len(list(tmp_path.iterdir())) == 2
    home.clear_leftovers(target)
    assert list(tmp_path.iterdir()) == [other]


def test_file_lock_lets_one_in_at_a_time(tmp_path: Path) -> None:
    target, inside, most, waits = tmp_path / "x", [], [], []

    def enter() -> None:
        with home.file_lock(target, on_wait=lambda: waits.append(1)):
            inside.append(1)
            most.append(len(inside))
            threading.Event().wait(0.05)
            inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1, 1]
    assert waits


def test_a_home_below_a_file_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HVD_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot write .*HVD_HOME"):
        home.ensure_dir(tmp_path / "file" / "home")
    with pytest.raises(UserError, match=r"cannot write .*HVD_HOME"):
        home.ensure_dir(tmp_path / "file")


def test_only_our_own_state_is_told_to_move(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="a file stands there") as caught:
        home.ensure_dir(tmp_path / "file")
    assert "HVD_HOME" not in str(caught.value)
    with pytest.raises(UserError, match="make it writable or choose another place"):
        home.ensure_dir(tmp_path / "file" / "below")


def test_a_full_disk_is_one_clear_line(tmp_path: Path) -> None:
    target = tmp_path / "big"
    with pytest.raises(UserError, match="no room left"), home.atomic_path(target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert list(tmp_path.iterdir()) == []


def test_errors_about_other_files_pass_through(tmp_path: Path) -> None:
    elsewhere = "/an/input/of/the/writer"
    with pytest.raises(PermissionError), home.atomic_path(tmp_path / "out"):
        raise PermissionError(errno.EACCES, "Permission denied", elsewhere)


def test_a_folder_that_is_a_file_is_one_clear_line_by_a_relative_path_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").write_text("mine")
    for place in (Path("taken"), Path("taken/below")):
        with pytest.raises(UserError, match=f"cannot write {place}"):
            home.ensure_dir(place)
    assert Path("taken").read_text() == "mine"


def test_a_home_where_no_folder_can_be_made_is_one_clear_line() -> None:
    with pytest.raises(UserError, match="cannot write /proc/nope/models"):
        home.ensure_dir(Path("/proc/nope/models"))


def test_an_address_is_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_HOME", "s3://bucket/home")
    with pytest.raises(UserError, match=r"HVD_HOME=s3://bucket/home: expected a folder"):
        home.hvd_home()
