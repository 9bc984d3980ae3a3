"""The stages as Ray jobs on a local cluster, auth on and off, ending in a promoted model."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hvd_ray.config import Config
from hvd_ray.tracking.promotion import find_alias
from tests.conftest import save_tiny_llama
from tests.e2e.job_cluster import JobCluster, job_cluster

pytestmark = pytest.mark.ray

REPO = Path(__file__).parents[2]
JOB_TIMEOUT_S = 120.0
SMALL_SWEEP = (
    *("trials=2", "concurrency=2", "taus=[0, 6]", "space.depth=1", "space.width={choice: [8]}"),
    *("space.epochs={int: [1, 2]}", "asha={grace_epochs: 1, reduction_factor: 2}"),
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Storage that every node sees: the target, the prompts, HVD_HOME."""
    folder = tmp_path_factory.mktemp("shared")
    save_tiny_llama(folder / "tiny", num_layers=6)  # an EAGLE-3 head reads three of them
    rows = [
        {
            "id": f"p{number}",
            "session_id": f"s{number}",
            "split": "test" if number % 3 == 0 else "train",
            "messages": [{"role": "user", "content": f"Say note {number} and note {number}."}],
        }
        for number in range(9)
    ]
    (folder / "notes.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture(scope="module")
def with_auth() -> Iterator[JobCluster]:
    with job_cluster(has_auth=True) as cluster:
        yield cluster


def runtime_env(shared: Path) -> dict[str, Any]:
    """As jobs/env/cpu.yaml, with the tests' own places."""
    variables = {"HVD_HOME": str(shared / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return {"working_dir": str(REPO), "env_vars": variables}


def submitted(cluster: JobCluster, shared: Path, *words: object) -> str:
    """A job's log, once it has succeeded."""
    client = cluster.client()
    job = client.submit_job(
        entrypoint=shlex.join(["python", *map(str, words)]), runtime_env=runtime_env(shared)
    )
    deadline = time.monotonic() + JOB_TIMEOUT_S
    while not (status := client.get_job_status(job)).is_terminal():
        assert time.monotonic() < deadline, client.get_job_logs(job)
        time.sleep(0.2)
    log: str = client.get_job_logs(job)
    assert status == "SUCCEEDED", log
    return log


def test_the_chain_ends_in_a_promoted_model(
    with_auth: JobCluster, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts = shared / "tiny", shared / "notes.jsonl"
    traces, labels = shared / "traces", shared / "labels"
    chain = [
        ("collect_traces.py", "--prompts", prompts, "--out", traces, "--model", model,
         "--dtype", "float32", "--policy", "suffix", "--max-tokens", 24, "--workers", 2),
        ("label_traces.py", traces, "--out", labels, "--workers", 2),
        ("train_payoff.py", labels, "--epochs", 2, "--out", shared / "payoff", f"model={model}"),
        ("tune_payoff.py", "--labels", labels, "--traces", traces, "--out", shared / "sweep",
         "--costs", "pass", *SMALL_SWEEP),
        ("promote_payoff.py", "--force", f"model={model}"),
        ("train_drafter.py", traces, "--run", shared / "head", "--target", model, "--steps", 3,
         "--rows-per-step", 32, "--draft-vocab", 64, "--regression-steps", 1),
        ("search_slim.py", traces, "--out", shared / "slim", "--skip", 0.5, "--methods",
         "prefix,dp,ours", "--trials", 2, "--tokens", 2000, "--concurrency", 2, f"model={model}",
         "dtype=float32"),
        ("bench.py", "--prompts", prompts, "--systems", "suffix,hvd_tau", "--limit", 2,
         "--max-tokens", 8, "--dtype", "float32", "--out", shared / "bench.json",
         f"model={model}"),
        ("report.py", shared / "bench.json", "--out", shared / "report"),
    ]  # fmt: skip
    for script, *words in chain:
        submitted(with_auth, shared, f"jobs/{script}", *words)
    monkeypatch.setenv("HVD_HOME", str(shared / "home"))
    champion = find_alias("champion", config=Config(model=str(model)))
    sweep = json.loads((shared / "sweep" / "sweep.json").read_text())
    assert champion is not None
    assert champion.ref == sweep["registered"]
    assert (shared / "head" / "head" / "config.json").exists()
    assert json.loads((shared / "slim" / "slim.json").read_text())["num_layers"] == 6
    rows = json.loads((shared / "bench.json").read_text())["rows"]
    assert {row["identical_to_greedy"] for row in rows} == {1.0}
    assert (shared / "report" / "bench.md").exists()


def test_without_its_token_a_job_is_refused(with_auth: JobCluster) -> None:
    assert httpx.get(f"{with_auth.url}/api/jobs/", timeout=10).status_code == 401


def test_ray_job_submit_on_a_cluster_without_auth(shared: Path, tmp_path: Path) -> None:
    env = runtime_env(shared) | {"working_dir": None}
    env.pop("working_dir")
    with job_cluster(has_auth=False) as cluster:
        done = subprocess.run(
            [
                *(str(Path(sys.executable).with_name("ray")), "job", "submit"),
                *("--working-dir", ".", "--runtime-env-json", json.dumps(env), "--", "python"),
                *(
                    "jobs/label_traces.py",
                    str(shared / "traces"),
                    "--out",
                    str(tmp_path / "labels"),
                ),
                *("--workers", "1", "--json"),
            ],
            cwd=REPO,
            env=cluster.environment,
            capture_output=True,
            text=True,
            timeout=JOB_TIMEOUT_S,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"traces": 9' in done.stdout
