"""`hvd ui` as people use it: pages, another process logging through it, a clean end."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvd_ray.config import Config
from hvd_ray.tracking import register_predictor, resolve_predictor, tracked

HVD = [sys.executable, "-c", "from hvd_ray.cli import main; main()"]


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def served(port: int, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A running `hvd ui`, ended in any case."""
    environment = {**os.environ, "HVD_HOME": str(tmp_path / "server home")}
    environment.pop("MLFLOW_TRACKING_URI", None)
    process = subprocess.Popen(
        [*HVD, "ui", "--port", str(port)],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    if process.poll() is None:
        process.kill()
    process.communicate()


def members_of(group: int) -> list[int]:
    """Processes of a process group."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(folder.name))
    return found


def children_of(parent: int) -> list[int]:
    return [
        int(child)
        for task in Path(f"/proc/{parent}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


def test_pages_registry_and_a_clean_end(
    served: subprocess.Popen[str], port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served.stdout is not None
    url = f"http://127.0.0.1:{port}"
    assert served.stdout.readline() == f"MLflow is on {url} (Ctrl-C ends it)\n"
    with urllib.request.urlopen(url, timeout=60) as page:
        assert page.status == 200

    monkeypatch.setenv("HVD_HOME", str(tmp_path / "client home"))
    config = Config.model_validate({"tracking": {"uri": url}})
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "predictor.json").write_text('"ours"')
    with tracked(config, run_name="train") as tracker:
        register_predictor(tracker, tmp_path / "p", config=config, alias="champion")
    assert (resolve_predictor(config=config) / "predictor.json").read_text() == '"ours"'

    (server,) = children_of(served.pid)
    served.send_signal(signal.SIGINT)
    assert served.wait(60) == 0
    deadline = time.monotonic() + 10
    while members_of(server) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert members_of(server) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["client home", "p", "server home"]
