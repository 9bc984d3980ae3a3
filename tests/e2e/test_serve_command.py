"""`hvd serve` as people use it: says where it is, changes on HUP, finishes what is under way."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.ray

HVD = [sys.executable, "-c", "from hvd_ray.cli import main; main()"]
SETTINGS = "dtype: float32\nnum_threads: 1\npolicy: {name: %s}\nserving: {cpus_per_replica: 0.5}\n"


@pytest.fixture
def server(tiny_llama_path: Path, tmp_path: Path) -> Iterator[tuple[Any, Any, Path]]:
    """A running `hvd serve`, where it says it is, and its file of settings."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    file = tmp_path / "serve.yaml"
    file.write_text(SETTINGS % "suffix")
    environment = {**os.environ, "HVD_HOME": str(tmp_path / "home")}
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "HVD_API_KEYS", "MLFLOW_TRACKING_URI"):
        environment.pop(name, None)
    process = subprocess.Popen(
        [
            *HVD,
            "serve",
            "--model",
            str(tiny_llama_path),
            "--port",
            port,
            "--json",
            "--config",
            file,
        ],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        yield process, json.loads(line), file
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def state(places: Any) -> Any:
    return httpx.get(places["page"] + "/state", timeout=30).json()


def test_it_serves_changes_and_finishes(server: Any) -> None:
    process, places, file = server
    assert Path(places["logs"]).is_dir()
    assert httpx.get(places["page"], timeout=30).text.startswith("<!doctype html>")
    assert "vllm:spec_decode_num_drafts_total" in httpx.get(places["metrics"], timeout=30).text
    assert state(places)["policy"] == "suffix"

    file.write_text(SETTINGS % "rule_match")
    process.send_signal(signal.SIGHUP)
    deadline = time.monotonic() + 60
    while state(places)["policy"] != "rule_match":
        assert time.monotonic() < deadline
        time.sleep(0.2)

    body = {"prompt": "name the", "max_tokens": 600, "temperature": 0, "ignore_eos": True}
    answers: list[Any] = []
    url = places["api"] + "/completions"
    asking = threading.Thread(target=lambda: answers.append(httpx.post(url, json=body, timeout=90)))
    asking.start()
    while not state(places)["num_running"]:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    asking.join(120)
    _, told = process.communicate(timeout=120)
    assert answers[0].status_code == 200, answers[0].text
    assert answers[0].json()["usage"]["completion_tokens"] == 600
    assert process.returncode == 0, told
    assert "settings read again" in told
    assert told.strip().endswith("ended")
    assert "Traceback" not in told
