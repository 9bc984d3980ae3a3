"""`hvd traces collect` and `hvd traces label` on Ray, with a tiny model: rows, kills, refusals."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from hvd_ray.config import Config
from hvd_ray.drafting.eagle3_checkpoint import save_head
from hvd_ray.errors import UserError
from hvd_ray.payoff.features import FEATURE_NAMES, FEATURE_VERSION
from hvd_ray.pipelines.collect import CollectOptions, collect
from hvd_ray.pipelines.label import LabelOptions, label
from hvd_ray.traces.store import finished_parts, read_labels, read_steps, read_traces
from hvd_ray.tuning.data import LabelNote, ModelNote
from tests.e2e.kills import worker_killed_once
from tests.unit.drafting.eagle3_heads import random_head

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


class Silent:
    """A `RunProgress` that tells nobody."""

    def stage(self, text): ...
    def expect(self, total): ...
    def advance(self, done, text): ...


@pytest.fixture(scope="module")
def env(ray_session, tmp_path_factory) -> Iterator[dict[str, str]]:
    """For processes of their own on the tests' cluster, and for this one: a home of the tests'."""
    home = str(tmp_path_factory.mktemp("home"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HVD_HOME", home)
        address = ray_session.get_runtime_context().gcs_address
        yield os.environ | {"RAY_ADDRESS": address}


@pytest.fixture(scope="module")
def collect_into(env, prompts, tiny_llama_path) -> Callable[..., dict]:  # noqa: ARG001
    config = Config(model=str(tiny_llama_path), dtype="float32")

    def run(out: Path, **changes: object) -> dict:
        options = CollectOptions(
            out=out, prompt_files=(prompts,), policy="suffix", max_tokens=40, num_workers=2
        )
        return collect(replace(options, **changes), config, progress=Silent())

    return run


@pytest.fixture(scope="module")
def collected(collect_into, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "traces"
    result = collect_into(out)
    assert (result["traces"], result["failed"]) == (NUM_PROMPTS, 1)
    return out


def _label(traces: Path, out: Path, **options: object) -> dict:
    return label(LabelOptions(traces, out, **options), Config(), progress=Silent())


def _start(env, *args: object) -> subprocess.Popen:
    command = [sys.executable, "-m", "hvd_ray.cli", "traces", *map(str, args)]
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


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
    while not list(finished_parts(folder)):  # a part that is being written does not count
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


def test_a_killed_collection_ends_with_the_same_rows(
    env, prompts, tiny_llama_path, collect_into, collected, tmp_path
):
    out = tmp_path / "traces"
    process = _start(
        env, "collect", "--prompts", prompts, "--model", tiny_llama_path, "--dtype", "float32",
        "--max-tokens", 40, "--policy", "suffix", "--workers", 1, "--out", out,
    )  # fmt: skip
    _kill_once_a_part_is_there(process, out / "traces")
    assert 0 < len(read_traces(out)) < NUM_PROMPTS, "killed half-way"
    result = collect_into(out)
    assert result["resumed"]
    assert result["traces"] == NUM_PROMPTS
    assert _trace_rows(out) == _trace_rows(collected)


def test_a_killed_worker_leaves_the_rows_as_they_would_be(collect_into, collected, tmp_path):
    out = tmp_path / "traces"
    with worker_killed_once(lambda: list((out / "traces").glob("*.parquet"))) as killed:
        result = collect_into(out)
    assert killed, "a worker was there to be killed"
    assert (result["traces"], result["failed"]) == (NUM_PROMPTS, 1)
    assert _trace_rows(out) == _trace_rows(collected)
    assert not (out / "suspects").exists()


def test_labels_are_the_same_for_any_number_of_workers(collected, tmp_path):
    tables = []
    for workers in (1, 2):
        out = tmp_path / f"labels-{workers}"
        result = _label(collected, out, num_workers=workers)
        assert (result["traces"], result["failed"]) == (NUM_PROMPTS - 1, 1)
        tables.append(_labels(out))
        assert result["positions"] == tables[-1].num_rows
    assert tables[0].equals(tables[1])
    assert set(tables[0]["split"].to_pylist()) == {"train", "test"}


@pytest.fixture(scope="module")
def with_head(tiny_llama_path, tmp_path_factory) -> Config:
    """The tiny target's own settings with a random head for it."""
    from transformers import AutoConfig

    target = AutoConfig.from_pretrained(str(tiny_llama_path))
    head = random_head(
        variant=lambda base: replace(
            base,
            vocab_size=target.vocab_size,
            draft_vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            target_hidden_size=target.hidden_size,
            aux_layer_ids=(0, 1, 2),
            max_position_embeddings=150,
        )
    )
    folder = tmp_path_factory.mktemp("heads") / "random"
    save_head(head, folder, dtype=torch.float32)
    settings = {"dtype": "float32", "drafting": {"eagle3": {"head": str(folder)}}}
    return Config.model_validate(settings)


def test_labels_of_a_head_are_the_same_for_any_number_of_workers(collected, with_head, tmp_path):
    tables = []
    for workers in (1, 2):
        out = tmp_path / f"labels-{workers}"
        options = LabelOptions(collected, out, num_workers=workers, with_eagle3=True)
        label(options, with_head, progress=Silent())
        tables.append(_labels(out))
    assert tables[0].equals(tables[1])
    column = tables[0]["eagle3_accepted_len"]
    assert column.null_count == 0
    assert max(column.to_pylist()) >= 1
    noted = LabelNote.read(out)
    assert noted.eagle3 == ModelNote(num_tokens=4, context_length=150)
    facts = json.loads((out / "manifest.json").read_text())["settings"]["eagle3"]
    assert facts["dtype"] == "float32"
    assert len(facts["target"]) == len(facts["head"]) == 64


def test_traces_of_another_target_are_refused(collected, with_head, tiny_llama_path, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(tiny_llama_path, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    options = LabelOptions(collected, tmp_path / "out", model=str(other), with_eagle3=True)
    with pytest.raises(UserError, match="collected from another model than"):
        label(options, with_head, progress=Silent())


def test_a_killed_labelling_ends_with_the_same_rows(env, collected, tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = _start(env, "label", collected, "--shards", 6, "--out", killed)
    _kill_once_a_part_is_there(process, killed / "labels")
    assert _label(collected, killed, num_shards=6)["resumed"]
    _label(collected, whole, num_shards=6)
    assert _labels(killed).equals(_labels(whole))


def test_other_settings_are_refused_and_nothing_is_written(collect_into, collected):
    before = {path: path.stat().st_mtime_ns for path in collected.rglob("*")}
    with pytest.raises(UserError, match="max_tokens=40, and this run has max_tokens=41"):
        collect_into(collected, max_tokens=41)
    assert {path: path.stat().st_mtime_ns for path in collected.rglob("*")} == before


def test_a_finished_folder_is_left_as_it_is(collect_into, collected):
    before = {path: path.stat().st_mtime_ns for path in collected.rglob("*.parquet")}
    assert collect_into(collected, num_workers=1)["traces"] == NUM_PROMPTS
    assert {path: path.stat().st_mtime_ns for path in collected.rglob("*.parquet")} == before


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ('{"id": "a", "prompt": "good"}\n{"id": "b", "prompt"', r"bad\.jsonl:2"),
        ('{"id": "a", "prompt": ""}', r"bad\.jsonl:1: empty prompt"),
        (json.dumps({"prompt": "the name " * 3000}), r"bad\.jsonl:1: .*context"),
        ("", "is empty"),
    ],
)
def test_bad_prompts_are_one_clear_line(collect_into, tmp_path, lines, reason):
    file = tmp_path / "bad.jsonl"
    file.write_text(lines)
    with pytest.raises(UserError, match=reason) as refused:
        collect_into(tmp_path / "out", prompt_files=(file,))
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists(), "nothing was written"


def test_a_bad_line_is_skipped_if_asked(collect_into, tmp_path):
    file = tmp_path / "mixed.jsonl"
    file.write_text('{"id": "a", "prompt": "Say the name."}\n{"id": "b", "prompt"\n')
    result = collect_into(tmp_path / "out", prompt_files=(file,), on_bad_line="skip")
    assert (result["traces"], result["skipped_lines"]) == (1, 1)
    assert result["skipped"][0].startswith(f"{file}:2: ")


def test_a_cluster_that_does_not_answer_is_a_clear_line(env, collected, tmp_path):
    silent = env | {"RAY_ADDRESS": "127.0.0.1:9"}
    process = _start(silent, "label", collected, "--out", tmp_path / "labels")
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 2
    last = stderr.strip().splitlines()[-1]
    assert last.startswith("hvd: error: no Ray cluster answers at 127.0.0.1:9")
    assert "Traceback" not in stderr


def test_a_cluster_of_ones_own_starts_and_ends_with_the_run(env, collected, tmp_path):
    private = env | {"TMPDIR": str(tmp_path), "HOME": str(tmp_path)}
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_TMPDIR"):
        private.pop(name, None)
    process = _start(private, "label", collected, "--out", tmp_path / "labels", "--json")
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    assert json.loads(stdout)["positions"] > 0
    assert not (tmp_path / ".ray").exists(), "no token was left in the home folder"
    assert not list(tmp_path.glob("hvd-ray-*")), "the temporary folder is gone"
