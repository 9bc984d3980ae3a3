"""Kill a stage's processes at random moments, over and over; its result must be as if nothing was.

    make chaos                       # 50 kills over collect, label, train, tune and the drafter
    python -m tests.e2e.chaos --kills 8 --stages collect,label --seed 3

Each round runs one stage into a new folder, on one Ray head of this program's own, and kills the
driver or any of Ray's worker processes (actors, trials, tasks) with SIGKILL, one to three times; a
driver that died is started again with the same command. Then the rows are compared with those of a
run left in peace, and the tracking store is asked how many runs there are.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from hvd_ray.payoff.features import FEATURE_NAMES, FEATURE_VERSION
from hvd_ray.traces.store import read_labels, read_steps, read_traces
from hvd_ray.tracking.store import open_store
from tests.conftest import save_tiny_llama
from tests.e2e.job_cluster import job_cluster
from tests.e2e.kills import ray_workers

EPOCH = datetime.fromtimestamp(0, UTC)
STAGE_TIMEOUT_S = 300.0
MOST_STARTS = 12
NUM_PROMPTS = 48
NUM_TRIALS = 3
NUM_STEPS = 12
KINDS = ("driver", "worker")


@dataclass(frozen=True)
class Stage:
    """A command that can be killed and typed again, and what its result comes to."""

    name: str
    command: Callable[[Path], Sequence[object]]
    result: Callable[[Path], Any]


def run_stage(
    stage: Stage, out: Path, *, env: dict[str, str], log: Path, kills: Sequence[tuple[float, str]]
) -> Counter[str]:
    """Run a stage to its end, killing at the given seconds; returns what was killed.

    A kill whose turn comes after the end is left out.
    """
    done: Counter[str] = Counter()
    waiting = list(kills)
    for _ in range(MOST_STARTS):
        process = _start(stage, out, env, log)
        while process.poll() is None and waiting:
            delay, kind = waiting[0]
            if _ended_within(process, delay):
                break
            waiting.pop(0)
            done[kill(process, kind)] += 1
        code = process.wait(STAGE_TIMEOUT_S)
        if code == 0:
            return done
        assert code == -signal.SIGKILL, (
            f"{stage.name} ended with {code}:\n{log.read_text()[-3000:]}"
        )
    raise AssertionError(f"{stage.name} did not end after {MOST_STARTS} starts")


def kill(driver: subprocess.Popen[bytes], kind: str) -> str:
    """SIGKILL the driver or a worker; the driver where no worker is at work now."""
    victims = [] if kind == "driver" else ray_workers()
    while victims:
        victim = random.choice(victims)
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            victims.remove(victim)
        else:
            return kind
    driver.send_signal(signal.SIGKILL)
    return "driver"


def _start(stage: Stage, out: Path, env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "hvd_ray.cli", *map(str, stage.command(out))]
    with log.open("a") as output:
        return subprocess.Popen(command, env=env, stdout=output, stderr=output)


def _ended_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


# -- what a result comes to ----------------------------------------------------------------------


def trace_rows(out: Path) -> Any:
    """Traces and steps but for the clock; a row that stands there twice shows in the count."""
    traces = [replace(trace, created_at=EPOCH) for trace in read_traces(out)]
    steps = {
        trace_id: [replace(step, draft_us=0.0, verify_us=0.0) for step in of_trace]
        for trace_id, of_trace in read_steps(out).items()
    }
    return sorted(traces, key=lambda trace: trace.trace_id), steps


def label_rows(out: Path) -> Any:
    table = read_labels(out, feature_names=FEATURE_NAMES, feature_version=FEATURE_VERSION)
    return table.sort_by([("trace_id", "ascending"), ("position", "ascending")]).to_pylist()


def tracked_runs(home: Path, experiment: str) -> list[Any]:
    client = open_store(f"sqlite:///{home}/tracking/mlflow.db").client
    found = client.get_experiment_by_name(experiment)
    return [] if found is None else list(client.search_runs([found.experiment_id]))


def payoff_result(out: Path, home: Path) -> Any:
    """The weights, and one finished run with one registered version."""
    runs = tracked_runs(home, out.name)
    assert [run.info.status for run in runs] == ["FINISHED"], runs
    client = open_store(f"sqlite:///{home}/tracking/mlflow.db").client
    versions = client.search_model_versions(f"run_id = '{runs[0].info.run_id}'")
    assert len(versions) == 1, versions
    return sorted(path.read_bytes() for path in out.glob("*.safetensors"))


def sweep_result(out: Path, home: Path) -> Any:
    """So many trials, each with one finished run under the sweep's one."""
    result = json.loads((out / "sweep.json").read_text(encoding="utf-8"))
    rows = result["trials"]
    assert len({row["trial"] for row in rows}) == len(rows) == NUM_TRIALS
    assert {row["status"] for row in rows} <= {"finished", "stopped early"}, rows
    runs = tracked_runs(home, out.name)
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in runs if run not in parents and run.info.status != "KILLED"]
    assert [run.info.run_id for run in parents] == [result["run_id"]]
    assert {run.info.status for run in (*parents, *children)} == {"FINISHED"}
    assert sorted(run.info.run_name for run in children) == sorted(
        f"trial-{row['trial']}" for row in rows
    )
    return [row["params"] for row in rows]


def head_result(out: Path) -> Any:
    """A head, and every step logged once."""
    assert (out / "head" / "model.safetensors").exists()
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["step"] for line in lines]


# -- the stages ----------------------------------------------------------------------------------


def write_prompts(path: Path) -> None:
    rows = [
        {
            "id": f"p{number}",
            "session_id": f"s{number // 2}",
            "split": "test" if number // 2 % 4 == 0 else "train",
            "messages": [{"role": "user", "content": f"Say note {number // 2}, note {number}."}],
        }
        for number in range(NUM_PROMPTS)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


def stages(work: Path, home: Path) -> list[Stage]:
    """In an order in which each finds what it needs in `whole-*`."""
    model, prompts = work / "tiny", work / "notes.jsonl"
    traces, labels = work / "whole-collect", work / "whole-label"
    return [
        Stage(
            "collect",
            lambda out: (
                *("traces", "collect", "--prompts", prompts, "--model", model, "--out", out),
                *("--dtype", "float32", "--max-tokens", 64, "--policy", "suffix", "--workers", 2),
            ),
            trace_rows,
        ),
        Stage(
            "label",
            lambda out: ("traces", "label", traces, "--out", out, "--shards", 8, "--workers", 2),
            label_rows,
        ),
        Stage(
            "train",
            lambda out: (
                *("train", labels, "--kind", "survival", "--epochs", 30, "--out", out),
                *(f"model={model}", f"tracking.experiment={out.name}"),
            ),
            lambda out: payoff_result(out, home),
        ),
        Stage(
            "tune",
            lambda out: (
                *("tune", "--labels", labels, "--traces", traces, "--out", out, "--resume"),
                *("--costs", "pass", f"trials={NUM_TRIALS}", "concurrency=1", "taus=[0, 6]"),
                *("space.depth=1", "space.width={choice: [8, 16]}", "space.epochs={int: [2, 4]}"),
                *("asha={grace_epochs: 1, reduction_factor: 2}", f"tracking.experiment={out.name}"),
            ),
            lambda out: sweep_result(out, home),
        ),
        Stage(
            "drafter",
            lambda out: (
                *("drafter", "train", traces, "--run", out, "--target", model, "--threads", 1),
                *("--steps", NUM_STEPS, "--rows-per-step", 32, "--draft-vocab", 64),
                *("--regression-steps", 2),
            ),
            head_result,
        ),
    ]


@dataclass
class Chaos:
    """Stages, what each comes to in peace, and what was killed so far."""

    work: Path
    env: dict[str, str]
    stages: list[Stage]
    rng: random.Random
    peace: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    kills: Counter[str] = field(default_factory=Counter)
    num_rounds: int = 0

    def run(self, stage: Stage, out: Path, kills: Sequence[tuple[float, str]] = ()) -> Counter[str]:
        return run_stage(stage, out, env=self.env, log=self.work / "log", kills=kills)

    def leave_in_peace(self, stage: Stage) -> None:
        """The run that the others are compared with; later stages read its folder."""
        started = time.monotonic()
        out = self.work / f"whole-{stage.name}"
        self.run(stage, out)
        self.seconds[stage.name] = time.monotonic() - started
        self.peace[stage.name] = stage.result(out)
        print(f"{stage.name:8} in peace: {self.seconds[stage.name]:.1f} s", flush=True)

    def disturb(self, stage: Stage) -> bool:
        """One round; whether its result is the undisturbed one."""
        out = self.work / f"{stage.name}-{self.num_rounds}"
        plan = [
            (self.rng.uniform(0, self.seconds[stage.name]), self.rng.choice(KINDS))
            for _ in range(self.rng.randint(1, 3))
        ]
        killed = self.run(stage, out, plan)
        self.kills.update(killed)
        self.num_rounds += 1
        result = stage.result(out)
        is_same = bool(result == self.peace[stage.name])
        words = ", ".join(f"{kind} {count}" for kind, count in killed.items()) or "none in time"
        verdict = "equal" if is_same else "DIFFERENT"
        print(f"{self.num_rounds:3} {stage.name:8} killed: {words:22} {verdict}", flush=True)
        if not is_same:
            print(f"expected {self.peace[stage.name]!r:.600}\ngot      {result!r:.600}")
        return is_same


@contextmanager
def chaos(seed: int) -> Iterator[Chaos]:
    """Everything but the first peaceful runs."""
    random.seed(seed)
    with tempfile.TemporaryDirectory(prefix="hvdc") as folder, job_cluster(has_auth=False) as head:
        work = Path(folder)
        home = work / "home"
        save_tiny_llama(work / "tiny", num_layers=6)
        write_prompts(work / "notes.jsonl")
        own = {"HVD_HOME": str(home), "RAY_ADDRESS": head.gcs_address, "OMP_NUM_THREADS": "1"}
        yield Chaos(work, head.environment | own, stages(work, home), random.Random(seed))


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill stages and compare what they come to.")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--stages", default="collect,label,train,tune,drafter")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    wanted = args.stages.split(",")
    num_different = 0
    with chaos(args.seed) as running:
        for stage in running.stages:
            if stage.name in (*wanted, "collect", "label"):
                running.leave_in_peace(stage)
        chosen = [stage for stage in running.stages if stage.name in wanted]
        while running.kills.total() < args.kills:
            stage = chosen[running.num_rounds % len(chosen)]
            num_different += not running.disturb(stage)
    print(f"{dict(running.kills)} in {running.num_rounds} rounds, {num_different} different")
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
