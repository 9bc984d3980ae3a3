"""`hvd traces collect` and `hvd traces label` on Ray, with a tiny model: rows, kills, refusals."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from hvd_ray.payoff.features import FEATURE_NAMES, FEATURE_VERSION
from hvd_ray.traces.store import read_labels, read_steps, read_traces

pytestmark = pytest.mark.ray

EPOCH = datetime.fromtimestamp(0, UTC)
NUM_PROMPTS = 24


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    """Sessions of three prompts; the fifth is far over the model's context."""
    file = tmp_path_factory.mktemp("prompts") / "notes.jsonl"
    rows = []
    for number in range(NUM_PROMPTS):
        text = f"Say the name of note {number // 3} and the name of note {number}."
        if number == 5:
            text = "the name and the name " * 400
        rows.append(
            {
                "id": f"p{number}",
                "session_id": f"s{number // 3}",
                "split": "test" if number < 6 else "train",
                "messages": [{"role": "user", "content": text}],
            }
        )
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return file


class Hvd:
    """The command line in processes of their own, on the tests' cluster."""

    def __init__(self, ray, home: Path) -> None:
        address = ray.get_runtime_context().gcs_address
        self.env = os.environ | {"RAY_ADDRESS": address, "HVD_HOME": str(home)}

    def start(self, *args: object) -> subprocess.Popen:
        command = [sys.executable, "-m", "hvd_ray.cli", "traces", *map(str, args)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=self.env, stdout=pipe, stderr=pipe, text=True)

    def run(self, *args: object) -> subprocess.CompletedProcess:
        process = self.start(*args)
        stdout, stderr = process.communicate(timeout=300)
        return subprocess.CompletedProcess(args, process.returncode, stdout, stderr)

    def json(self, *args: object) -> dict:
        done = self.run(*args, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def hvd(ray_session, tmp_path_factory) -> Hvd:
    return Hvd(ray_session, tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def collect_args(prompts, tiny_llama_path) -> list:
    return [
        "collect", "--prompts", prompts, "--model", tiny_llama_path, "--dtype", "float32",
        "--max-tokens", 40, "--policy", "suffix", "--workers", 2,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def collected(hvd, collect_args, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "traces"
    result = hvd.json(*collect_args, "--out", out)
    assert (result["traces"], result["failed"]) == (NUM_PROMPTS, 1)
    return out


def _trace_rows(out: Path):
    traces = {trace.trace_id: replace(trace, created_at=EPOCH) for trace in read_traces(out)}
    assert len(traces) == len(read_traces(out)), "a trace stands there twice"
    steps = {
        trace_id: [replace(step, draft_us=0.0, verify_us=0.0) for step in of_trace]
        for trace_id, of_trace in read_steps(out).items()
        if trace_id in traces
    }
    return traces, steps


def _labels(out: Path):
    table = read_labels(out, feature_names=FEATURE_NAMES, feature_version=FEATURE_VERSION)
    return table.sort_by([("trace_id", "ascending"), ("position", "ascending")])


def _kill_once_a_part_is_there(process: subprocess.Popen, folder: Path) -> None:
    """`kill -9` of the driver, as early as something can be lost."""
    deadline = time.monotonic() + 240
    while not list(folder.glob("*.parquet")):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "no part appeared"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def test_every_prompt_is_there_once_with_its_session_and_split(collected, prompts):
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    traces = {trace.prompt_id: trace for trace in read_traces(collected)}
    assert set(traces) == {row["id"] for row in rows}
    for row in rows:
        trace = traces[row["id"]]
        assert (trace.split, trace.session_id) == (row["split"], f"notes/{row['session_id']}")
        assert (trace.error is None) == (row["id"] != "p5")
    assert "context" in traces["p5"].error
    assert max(len(trace.output_token_ids) for trace in traces.values()) == 40


def test_the_steps_add_up_to_the_outputs(collected):
    steps = read_steps(collected)
    for trace in read_traces(collected):
        emitted = sum(step.emitted for step in steps.get(trace.trace_id, ()))
        assert emitted == len(trace.output_token_ids)


def test_a_killed_collection_ends_with_the_same_rows(hvd, collect_args, collected, tmp_path):
    out = tmp_path / "traces"
    _kill_once_a_part_is_there(hvd.start(*collect_args, "--out", out), out / "traces")
    found = {trace.trace_id for trace in read_traces(out)}
    assert 0 < len(found) < NUM_PROMPTS, "killed half-way"
    result = hvd.json(*collect_args, "--out", out)
    assert result["resumed"]
    assert result["traces"] == NUM_PROMPTS
    assert _trace_rows(out) == _trace_rows(collected)


def test_labels_are_the_same_for_any_number_of_workers(hvd, collected, tmp_path):
    tables = []
    for workers in (1, 2):
        out = tmp_path / f"labels-{workers}"
        result = hvd.json("label", collected, "--out", out, "--workers", workers)
        assert (result["traces"], result["failed"]) == (NUM_PROMPTS - 1, 1)
        tables.append(_labels(out))
        assert result["positions"] == tables[-1].num_rows
    assert tables[0].equals(tables[1])
    assert set(tables[0]["split"].to_pylist()) == {"train", "test"}


def test_a_killed_labelling_ends_with_the_same_rows(hvd, collected, tmp_path):
    args = ["label", collected, "--shards", 6, "--out"]
    _kill_once_a_part_is_there(hvd.start(*args, tmp_path / "killed"), tmp_path / "killed/labels")
    for name in ("killed", "whole"):
        hvd.json(*args, tmp_path / name)
    assert _labels(tmp_path / "killed").equals(_labels(tmp_path / "whole"))


def test_other_settings_are_refused_and_nothing_is_written(hvd, collect_args, collected):
    before = {path: path.stat().st_mtime_ns for path in collected.rglob("*.parquet")}
    done = hvd.run(*collect_args, "--out", collected, "--max-tokens", 41)
    assert done.returncode == 2
    assert "max_tokens=40, and this run has max_tokens=41" in done.stderr
    assert "Traceback" not in done.stderr
    assert {path: path.stat().st_mtime_ns for path in collected.rglob("*.parquet")} == before


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ('{"id": "a", "prompt": "good"}\n{"id": "b", "prompt"', "bad.jsonl:2"),
        ('{"id": "a", "prompt": ""}', "bad.jsonl:1: empty prompt"),
        (json.dumps({"prompt": "the name " * 3000}), "context"),
        ("", "is empty"),
    ],
)
def test_bad_prompts_are_one_clear_line(hvd, tiny_llama_path, tmp_path, lines, reason):
    file = tmp_path / "bad.jsonl"
    file.write_text(lines)
    out = tmp_path / "out"
    done = hvd.run("collect", "--prompts", file, "--model", tiny_llama_path, "--out", out)
    assert done.returncode == 2
    error = done.stderr.strip().splitlines()[-1]
    assert error.startswith("hvd: error:")
    assert reason in error
    assert "Traceback" not in done.stderr
    assert not out.exists(), "nothing was written"


def test_a_cluster_of_ones_own_starts_and_ends_with_the_run(hvd, collected, tmp_path):
    private = {key: value for key, value in hvd.env.items() if key != "RAY_ADDRESS"}
    private |= {"TMPDIR": str(tmp_path), "HOME": str(tmp_path)}
    private.pop("RAY_AUTH_MODE", None)
    private.pop("RAY_TMPDIR", None)
    out = tmp_path / "labels"
    done = subprocess.run(
        [sys.executable, "-m", "hvd_ray.cli", "traces", "label", str(collected),
         "--out", str(out), "--json"],
        env=private, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["positions"] > 0
    assert not (tmp_path / ".ray").exists(), "no token was left in the home folder"
    assert not list(tmp_path.glob("hvd-*")), "the temporary folder is gone"
