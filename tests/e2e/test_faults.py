"""What dies and what is poisoned: workers, a training, a disk without room."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from hvd_ray.engines.toy import ToyCodec
from hvd_ray.errors import UserError
from hvd_ray.home import writes_into
from hvd_ray.payoff.token_classes import TokenClasses
from hvd_ray.pipelines.shards import KEPT, run_shards
from hvd_ray.pipelines.suspects import PartWatch
from hvd_ray.traces.store import write_traces
from hvd_ray.tracking.store import open_store
from tests.conftest import save_tiny_llama
from tests.e2e.chaos import NUM_PROMPTS, label_rows, write_prompts
from tests.unit.tuning.conftest import VOCAB, label_folder, phrase_traces

REPO = Path(__file__).parents[2]
POISON = "poison"


class Worker:
    """Writes a file for each item of its shard; dies at the poisoned one."""

    def __init__(self, out: Path, *, is_watchful: bool) -> None:
        self._out, self._is_watchful = out, is_watchful

    def run(self, shard, report):
        file = self._out / f"{shard[0]}.txt"
        if file.exists():
            return
        watch = PartWatch(self._out / f"{shard[0]}.json", run="this")
        done = [self._one(item, watch) for item in shard]
        file.write_text("\n".join(done))
        with (self._out / "written").open("a") as log:
            log.write(f"{shard[0]}\n")
        report({"done": len(shard), KEPT: 1})

    def _one(self, item, watch):
        if self._is_watchful and watch.is_given_up(item):
            return "given up"
        watch.begin(item)
        if item == POISON:
            os._exit(1)
        return item


class FullDisk:
    """A worker whose disk has no room."""

    def __init__(self, out: Path) -> None:
        self._out = out

    def run(self, shard, report):  # noqa: ARG002
        with writes_into(self._out):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._out))


SHARDS = [["a", "b"], ["c", POISON, "d"], ["e"], ["f"]]


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_an_item_that_kills_its_workers_is_given_up_and_the_rest_gets_done(tmp_path):
    worker = partial(Worker, tmp_path, is_watchful=True)
    run_shards(SHARDS, worker, num_workers=2, on_counts=lambda _: None)
    rows = sorted(line for f in tmp_path.glob("*.txt") for line in f.read_text().splitlines())
    assert rows == ["a", "b", "c", "d", "e", "f", "given up"]
    written = Counter((tmp_path / "written").read_text().split())
    assert set(written.values()) == {1}, "no part was written twice"


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_a_full_disk_is_one_clear_line(tmp_path):
    worker = partial(FullDisk, tmp_path)
    with pytest.raises(UserError, match="no room left while writing") as refused:
        run_shards([["a"]], worker, num_workers=1, on_counts=lambda _: None)
    assert "\n" not in str(refused.value)


def test_a_training_that_is_killed_goes_on_in_its_own_run(tmp_path):
    folder = tmp_path / "predictor"
    write_traces(phrase_traces(), tmp_path / "traces" / "traces" / "part-0.parquet")
    classes = TokenClasses.from_codec(ToyCodec(), VOCAB)
    label_folder(tmp_path / "traces", tmp_path / "labels", classes)
    env = os.environ | {"HVD_HOME": str(tmp_path / "home"), "PYTHONPATH": str(REPO)}
    command = [
        *(sys.executable, "-m", "hvd_ray.cli", "train", str(tmp_path / "labels")),
        *("--out", str(folder), "model=toy", "--epochs"),
    ]
    first = subprocess.Popen([*command, "100000"], env=env, stderr=subprocess.DEVNULL)
    note = tmp_path / ".predictor.run"
    client = wait_for_a_run(tmp_path / "home", note, first)
    first.send_signal(signal.SIGKILL)
    first.wait()
    (before,) = all_runs(client)
    assert before.info.status == "RUNNING"
    subprocess.run([*command, "2"], env=env, check=True, capture_output=True, timeout=200)
    (after,) = all_runs(client)
    assert (after.info.run_id, after.info.status) == (before.info.run_id, "FINISHED")
    assert len(client.search_model_versions(f"run_id = '{after.info.run_id}'")) == 1
    assert not note.exists()
    assert (folder / "predictor.json").exists()


def wait_for_a_run(home, note, process, timeout_s=200):
    deadline = time.monotonic() + timeout_s
    database = home / "tracking" / "mlflow.db"
    while time.monotonic() < deadline:
        assert process.poll() is None
        if note.exists() and database.exists():
            client = open_store(f"sqlite:///{database}").client
            if all_runs(client):
                return client
        time.sleep(0.2)
    raise AssertionError("no run was begun")


def all_runs(client):
    found = client.get_experiment_by_name("hvd_ray")
    return [] if found is None else list(client.search_runs([found.experiment_id]))


@pytest.mark.ray
def test_two_nodes_share_the_work_and_one_may_go(tmp_path):
    save_tiny_llama(tmp_path / "tiny")
    write_prompts(tmp_path / "notes.jsonl")
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.two_nodes", str(tmp_path)],
        cwd=REPO,
        env=os.environ | {"HVD_HOME": str(tmp_path / "home"), "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert told, (done.stdout[-2000:], done.stderr[-2000:])  # Ray may have a word behind it
    answer = json.loads(told[-1])
    assert answer["collected"] == answer["labelled"] == NUM_PROMPTS
    assert len(answer["by_node"]) == 2, "both nodes had a share"
    assert answer["second_was_lost"]
    assert answer["shards"] == sorted(set(answer["shards"])), "no shard was labelled twice"
    assert label_rows(tmp_path / "shared-out") == label_rows(tmp_path / "alone")
    served = answer["served"]
    assert (served["replicas"], served["replicas_lost"]) == (2, 1)
    assert served["answered"] == served["asked"] == 32, "requests go on without the node"
    assert served["distinct_texts"] == 1
