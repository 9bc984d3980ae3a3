"""One run a folder, always with the same settings."""

import fcntl
import json
import os
import subprocess
import sys

import pytest

from hvd_ray.errors import UserError
from hvd_ray.pipelines.output import MANIFEST, claimed, read_manifest

SETTINGS = {"command": "collect", "sampling": {"max_tokens": 64, "stop": ["a"]}, "seed": 1}


def test_the_manifest_tells_what_was_done(tmp_path):
    out = tmp_path / "deep" / "out"
    with claimed(out, SETTINGS, notes={"model": "toy"}) as folder:
        assert not folder.is_resumed
        assert read_manifest(out)["complete"] is False
        folder.finish({"traces": 3}, about={"commit": "abc"})
    found = read_manifest(out)
    assert (found["complete"], found["settings"], found["model"]) == (True, SETTINGS, "toy")
    assert (found["result"], found["provenance"]) == ({"traces": 3}, {"commit": "abc"})


def test_the_same_settings_go_on(tmp_path):
    with claimed(tmp_path, SETTINGS):
        pass
    with claimed(tmp_path, json.loads(json.dumps(SETTINGS)), notes={"model": "moved"}) as folder:
        assert folder.is_resumed


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 2}, "seed=1, and this run has seed=2"),
        ({"sampling": {"max_tokens": 9, "stop": ["a"]}}, "sampling.max_tokens=64"),
        ({"sampling": {"max_tokens": 64, "stop": ["b"]}}, r"sampling.stop=\['a'\]"),
        ({"more": True}, "more=None"),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path, change, named):
    with claimed(tmp_path, SETTINGS):
        pass
    before = (tmp_path / MANIFEST).read_bytes()
    with pytest.raises(UserError, match=named), claimed(tmp_path, SETTINGS | change):
        pass
    assert (tmp_path / MANIFEST).read_bytes() == before


def test_a_second_run_at_the_same_time_is_refused(tmp_path):
    with (
        claimed(tmp_path, SETTINGS),
        pytest.raises(UserError, match="another run is writing there"),
        claimed(tmp_path, SETTINGS),
    ):
        pass


def test_a_killed_run_holds_nothing(tmp_path):
    script = (
        "import os, sys, json\nfrom pathlib import Path\n"
        "from hvd_ray.pipelines.output import claimed\n"
        "with claimed(Path(sys.argv[1]), json.loads(sys.argv[2])):\n"
        "    (Path(sys.argv[1]) / '.s0.12-ab.tmp.parquet').write_text('half')\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), json.dumps(SETTINGS)],
        check=False,
        env=os.environ,
    )
    assert done.returncode == -9
    with claimed(tmp_path, SETTINGS) as folder:
        assert folder.is_resumed
        assert not list(tmp_path.glob("*.parquet")), "half-written parts are gone"


def test_files_of_others_are_not_mixed_with_ours(tmp_path):
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "theirs.parquet").write_text("")
    with pytest.raises(UserError, match="holds Parquet files but no"), claimed(tmp_path, SETTINGS):
        pass
    assert not (tmp_path / MANIFEST).exists()


@pytest.mark.parametrize("text", ["{half", "[]", '{"settings": 3}'])
def test_a_manifest_that_is_none_is_refused(tmp_path, text):
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(UserError, match=r"manifest\.json"), claimed(tmp_path, SETTINGS):
        pass


def test_a_place_that_cannot_be_made_is_a_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"), claimed(tmp_path / "file", SETTINGS):
        pass


def test_the_lock_is_free_after_the_run(tmp_path):
    with claimed(tmp_path, SETTINGS):
        pass
    with open(tmp_path / f".{MANIFEST}.lock") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
