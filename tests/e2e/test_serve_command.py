"""`hvd serve` as people use it: says where it is, changes on HUP, finishes what is under way."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.ray

HVD = [sys.executable, "-c", "from hvd_ray.cli import main; main()"]
SETTINGS = """
dtype: float32
num_threads: 1
seed: %d
policy: {name: %s}
serving: {cpus_per_replica: 0.5, replicas: 2}
"""


@pytest.fixture
def server(tiny_llama_path: Path, tmp_path: Path) -> Iterator[tuple[Any, Any, Path]]:
    """A running `hvd serve`, where it says it is, and its file of settings."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    file = tmp_path / "serve.yaml"
    file.write_text(SETTINGS % (1, "suffix"))
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


def await_state(places: Any, holds: Callable[[Any], bool]) -> None:
    deadline = time.monotonic() + 120
    while not holds(found := state(places)):
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


def check_conversations_stay(places: Any) -> None:
    """With the one of two replicas whose cache knows them."""
    for number in range(6):
        body = {"prompt": f"{number} name the", "max_tokens": 48, "temperature": 0,
                "ignore_eos": True, "return_metrics": True, "cache_salt": str(number)}  # fmt: skip
        headers = {"x-session-id": f"s{number}"}
        passes = []
        for _ in range(2):
            answer = httpx.post(
                places["api"] + "/completions", json=body, headers=headers, timeout=60
            )
            passes.append(answer.json()["metrics"]["speculative_decoding"]["num_target_passes"])
        assert passes[1] < 0.8 * passes[0] or passes[1] < 10, (number, passes)


@contextmanager
def asking_on(places: Any) -> Iterator[list[int]]:
    """The statuses of requests that go on while the block does."""
    statuses: list[int] = []
    is_over = threading.Event()

    def ask() -> None:
        body = {"prompt": "name the", "max_tokens": 8, "temperature": 0}
        while not is_over.is_set():
            answer = httpx.post(places["api"] + "/completions", json=body, timeout=60)
            statuses.append(answer.status_code)

    asking = threading.Thread(target=ask)
    asking.start()
    yield statuses
    is_over.set()
    asking.join(60)


def check_newcomers_are_told_to_come_again(places: Any, asking: threading.Thread) -> None:
    """As long as an answer is under way a server that ends speaks for itself, not Serve for it."""
    health = places["metrics"].replace("/metrics", "/health")
    while (alive := httpx.get(health, timeout=30)).status_code == 200:
        time.sleep(0.02)
    body = {"prompt": "name the", "max_tokens": 1}
    refused = httpx.post(places["api"] + "/completions", json=body, timeout=30)
    assert asking.is_alive(), "the answer was over before anybody else asked"
    for answer in (alive, refused):
        assert answer.status_code == 503, answer.text
        assert answer.headers["retry-after"] == "5"
        assert answer.json()["error"]["code"] == "shutting_down"


def test_it_serves_changes_and_finishes(server: Any) -> None:
    process, places, file = server
    assert Path(places["logs"]).is_dir()
    assert httpx.get(places["page"], timeout=30).text.startswith("<!doctype html>")
    assert "vllm:spec_decode_num_drafts_total" in httpx.get(places["metrics"], timeout=30).text
    assert state(places)["policy"] == "suffix"

    check_conversations_stay(places)
    file.write_text(SETTINGS % (1, "rule_match"))
    process.send_signal(signal.SIGHUP)
    await_state(places, lambda found: found["policy"] == "rule_match")
    assert state(places)["num_cached_tokens"] > 0, "a change of policy alone restarts nothing"

    file.write_text(SETTINGS % (2, "suffix"))
    with asking_on(places) as statuses:
        process.send_signal(signal.SIGHUP)
        await_state(places, lambda found: found["policy"] == "suffix" and found["num_alive"] == 2)
    assert set(statuses) == {200}, "an update lost a request"

    body = {"prompt": "name the", "max_tokens": 1_500, "temperature": 0, "ignore_eos": True}
    answers: list[Any] = []
    url = places["api"] + "/completions"
    asking = threading.Thread(target=lambda: answers.append(httpx.post(url, json=body, timeout=90)))
    asking.start()
    while not state(places)["num_running"]:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    check_newcomers_are_told_to_come_again(places, asking)
    asking.join(120)
    _, told = process.communicate(timeout=120)
    assert answers[0].status_code == 200, answers[0].text
    assert answers[0].json()["usage"]["completion_tokens"] == 1_500
    assert process.returncode == 0, told
    assert "settings read again" in told
    assert told.strip().endswith("ended")
    assert "Traceback" not in told
