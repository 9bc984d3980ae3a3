"""Kill a stage's processes at random moments, over and over; its result must be as if nothing was.

    make chaos                       # 50 kills over collect, label, train, tune and the drafter
    python -m tests.e2e.chaos --kills 8 --stages collect,label --seed 3
    python -m tests.e2e.chaos --kills 50 --folder chaos/ --out docs/chaos.json   # in instalments

Each round runs one stage into a new folder, on one Ray head of this program's own, and kills the
driver or any of Ray's worker processes (actors, trials, tasks) with SIGKILL, one to three times; a
driver that died is started again with the same command. Then the rows are compared with those of a
run left in peace, and the tracking store is asked how many runs there are.

With `--folder` the runs in peace and the count stay there, and the same command goes on where it
was broken off; a round that was cut short by that is forgotten.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from hvd_ray.home import atomic_path
from hvd_ray.payoff.features import FEATURE_NAMES, FEATURE_VERSION
from hvd_ray.provenance import provenance
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
    assert [run.info.status for run in runs] == ["FINISHED"], [run.info.status for run in runs]
    client = open_store(f"sqlite:///{home}/tracking/mlflow.db").client
    versions = client.search_model_versions(f"run_id = '{runs[0].info.run_id}'")
    assert len(versions) == 1, versions
    return sorted(path.read_bytes() for path in out.glob("*.safetensors"))


def sweep_result(out: Path, home: Path) -> Any:
    """So many trials, each with one finished run under the sweep's one.

    Their order is left out: a trial that was lost with its driver is begun anew behind the others.
    """
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
    return sorted(json.dumps(row["params"], sort_keys=True) for row in rows)


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


@dataclass(frozen=True)
class Round:
    """One stage run under fire, and whether it ended as if left in peace."""

    stage: str
    kills: dict[str, int]
    is_equal: bool
    commit: str


@dataclass
class Tally:
    """What is known so far; the file that a broken-off run goes on from."""

    seed: int
    seconds: dict[str, float] = field(default_factory=dict)
    """Of each stage in peace."""
    rounds: list[Round] = field(default_factory=list)

    @property
    def num_kills(self) -> int:
        return sum(sum(done.kills.values()) for done in self.rounds)

    def summary(self) -> dict[str, Any]:
        by_stage: dict[str, Counter[str]] = {}
        for done in self.rounds:
            by_stage.setdefault(done.stage, Counter()).update(done.kills)
        return {
            "kills": self.num_kills,
            "kills_by_stage": {stage: dict(kills) for stage, kills in by_stage.items()},
            "rounds": len(self.rounds),
            "rounds_by_stage": dict(Counter(done.stage for done in self.rounds)),
            "different": sum(not done.is_equal for done in self.rounds),
            "commits": sorted({done.commit for done in self.rounds}),
        }

    @classmethod
    def read(cls, path: Path, seed: int) -> Tally:
        if not path.exists():
            return cls(seed)
        tree = json.loads(path.read_text(encoding="utf-8"))
        return cls(tree["seed"], tree["seconds"], [Round(**row) for row in tree["rounds"]])

    def write(self, path: Path) -> None:
        with atomic_path(path) as draft:
            draft.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


@dataclass
class Chaos:
    """Stages, what each comes to in peace, and what was killed so far."""

    work: Path
    env: dict[str, str]
    stages: list[Stage]
    tally: Tally
    peace: dict[str, Any] = field(default_factory=dict)

    @property
    def tally_file(self) -> Path:
        return self.work / "tally.json"

    def run(self, stage: Stage, out: Path, kills: Sequence[tuple[float, str]] = ()) -> Counter[str]:
        return run_stage(stage, out, env=self.env, log=self.work / "log", kills=kills)

    def leave_in_peace(self, stage: Stage) -> None:
        """The run that the others are compared with; later stages read its folder."""
        out = self.work / f"whole-{stage.name}"
        if stage.name not in self.tally.seconds:
            started = time.monotonic()
            self.run(stage, out)
            self.tally.seconds[stage.name] = time.monotonic() - started
            self.tally.write(self.tally_file)
        self.peace[stage.name] = stage.result(out)
        print(f"{stage.name:8} in peace: {self.tally.seconds[stage.name]:.1f} s", flush=True)

    def disturb(self, stage: Stage) -> None:
        """One round, counted once its result was compared."""
        number = len(self.tally.rounds)
        # A folder and an experiment of its own: of a round that was broken off nothing is left.
        out = self.work / f"{stage.name}-{number}-{random.SystemRandom().randrange(10**6)}"
        rng = random.Random(f"{self.tally.seed}/{number}")
        plan = [
            (rng.uniform(0, self.tally.seconds[stage.name]), rng.choice(KINDS))
            for _ in range(rng.randint(1, 3))
        ]
        killed = self.run(stage, out, plan)
        result = stage.result(out)
        is_equal = bool(result == self.peace[stage.name])
        commit = str(provenance()["commit"])[:12]
        self.tally.rounds.append(Round(stage.name, dict(killed), is_equal, commit))
        self.tally.write(self.tally_file)
        words = ", ".join(f"{kind} {count}" for kind, count in killed.items()) or "none in time"
        verdict = "equal" if is_equal else "DIFFERENT"
        print(f"{number + 1:3} {stage.name:8} killed: {words:22} {verdict}", flush=True)
        if is_equal:
            shutil.rmtree(out)
        else:
            print(f"expected {self.peace[stage.name]!r:.600}\ngot      {result!r:.600}")


@contextmanager
def chaos(seed: int, folder: Path | None) -> Iterator[Chaos]:
    """Everything but the first peaceful runs."""
    random.seed()
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hvdc")))
        work = folder.absolute()
        head = stack.enter_context(job_cluster(has_auth=False))
        home = work / "home"
        if not (work / "notes.jsonl").exists():
            save_tiny_llama(work / "tiny", num_layers=6)
            write_prompts(work / "notes.jsonl")
        own = {"HVD_HOME": str(home), "RAY_ADDRESS": head.gcs_address, "OMP_NUM_THREADS": "1"}
        tally = Tally.read(work / "tally.json", seed)
        yield Chaos(work, head.environment | own, stages(work, home), tally)


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill stages and compare what they come to.")
    parser.add_argument("--kills", type=int, default=50, help="in all, earlier ones included")
    parser.add_argument("--stages", default="collect,label,train,tune,drafter")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep everything there and go on from it")
    parser.add_argument("--out", type=Path, help="write the count there as JSON")
    args = parser.parse_args()
    wanted = args.stages.split(",")
    with chaos(args.seed, args.folder) as running:
        for stage in running.stages:
            if stage.name in (*wanted, "collect", "label"):
                running.leave_in_peace(stage)
        chosen = [stage for stage in running.stages if stage.name in wanted]
        while running.tally.num_kills < args.kills:
            running.disturb(chosen[len(running.tally.rounds) % len(chosen)])
        found = running.tally.summary()
    print(json.dumps(found))
    if args.out is not None:
        with atomic_path(args.out) as draft:
            text = json.dumps({**found, "provenance": provenance()}, indent=1)
            draft.write_text(text + "\n", encoding="utf-8")
    return 1 if found["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
