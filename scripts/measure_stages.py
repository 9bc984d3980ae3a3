"""Measure what the stages cost here, for `hvd plan`: small real runs on a machine left alone.

    python scripts/measure_stages.py --traces imported/ --out hvd_ray/assets/stage_costs.json

Each stage runs at two sizes with one worker of one thread; the slope is the cost of a token, the
rest is fixed. Costs are seconds of CPU, since the clock would tell the work of others here, too.
Labelling also runs with 1, 2 and 4 logical workers, and the times of the model stand beside the
clock and the CPU. `--traces` is a folder of real traces (`hvd traces import`), taken as often as
`--copies` says under tenants of their own, which share no cache.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from hvd_ray.bench.plan import Sampling
from hvd_ray.bench.workloads import load_shipped
from hvd_ray.config import Config, load_config
from hvd_ray.home import atomic_path
from hvd_ray.payoff.dataset import read_labels_table
from hvd_ray.payoff.features import FEATURE_NAMES, FEATURE_VERSION
from hvd_ray.pipelines.collect import CollectOptions, collect, open_target
from hvd_ray.pipelines.collection import plan_traces
from hvd_ray.pipelines.label import LabelOptions, label
from hvd_ray.pipelines.labelling import plan_labels
from hvd_ray.provenance import provenance
from hvd_ray.scaling.costs import StageCosts
from hvd_ray.scaling.load import Load
from hvd_ray.scaling.model import Machines, plan_stage
from hvd_ray.traces.label import shard_of
from hvd_ray.traces.store import read_labels, read_traces, write_traces
from hvd_ray.tuning.run import SweepOptions, run_sweep
from hvd_ray.tuning.space import load_sweep

SHARDS = 16
WORKERS = (1, 2, 4)
COLLECTED = (1, 2)
"""Prompts of each shipped workload."""
TRIALS = 2
"""Of 8 epochs each."""


@dataclass
class Run:
    """One run of a stage: a `RunProgress` that keeps the time, and the memory of its workers."""

    began_s: float = field(default_factory=time.monotonic)
    ray_s: float = 0.0
    first_s: float = 0.0
    seconds: float = 0.0
    """By the clock."""
    worker_cpu_s: float = 0.0
    """Of CPU, all workers together; without workers, this process's own."""
    other_cpu_s: float = 0.0
    """Of CPU, this process and Ray's own."""
    tokens: int = 0
    traces: int = 0
    worker_bytes: int = 0

    def stage(self, text: str) -> None:
        if "starting Ray" in text:
            self.ray_s = time.monotonic() - self.began_s

    def expect(self, total: int) -> None: ...

    def advance(self, done: int, text: str) -> None:
        del text
        if done and not self.first_s:
            self.first_s = time.monotonic() - self.began_s

    def as_json(self) -> dict[str, Any]:
        return {
            "seconds": round(self.seconds, 2),
            "until_ray_s": round(self.ray_s, 2),
            "until_first_report_s": round(self.first_s, 2),
            "worker_cpu_s": round(self.worker_cpu_s, 2),
            "other_cpu_s": round(self.other_cpu_s, 2),
            "tokens": self.tokens,
            "traces": self.traces,
            "worker_mb": round(self.worker_bytes / 1e6),
        }


@contextmanager
def timed() -> Iterator[Run]:
    """A run with its seconds, and what Ray's processes below this one used."""
    run, is_over = Run(), threading.Event()
    used: dict[tuple[int, bool], float] = {}
    own_s = time.process_time()

    def watch() -> None:
        while not is_over.wait(0.2):
            for process in psutil.Process().children(recursive=True):
                try:
                    title = "".join(process.cmdline()[:1])
                    is_worker = "MapWorker" in title or "ImplicitFunc" in title
                    times = process.cpu_times()
                    used[process.pid, is_worker] = times.user + times.system
                    if is_worker:
                        run.worker_bytes = max(run.worker_bytes, process.memory_info().rss)
                except psutil.Error:
                    continue

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield run
    finally:
        run.seconds = time.monotonic() - run.began_s
        is_over.set()
        watcher.join()
        own_s = time.process_time() - own_s
        workers = {pid: cpu_s for (pid, is_worker), cpu_s in used.items() if is_worker}
        others = [cpu_s for (pid, _), cpu_s in used.items() if pid not in workers]
        run.worker_cpu_s = sum(workers.values()) or own_s
        run.other_cpu_s = sum(others) + (own_s if workers else 0.0)


def multiply(place: Path, out: Path, copies: int, *, share: int = 1) -> None:
    """The traces of every `share`th session under `place`, once more for each of the tenants."""
    traces = [
        trace
        for trace in read_traces(place)
        if trace.error is None and shard_of("", trace.session_id, num_shards=share) == 0
    ]
    for copy in range(copies):
        renamed = [
            replace(trace, trace_id=f"{copy}-{trace.trace_id}", scope=f"{copy}/{trace.scope}")
            for trace in traces
        ]
        write_traces(renamed, out / "traces" / f"part-{copy:03d}.parquet")
    shutil.copy(place / "manifest.json", out)


def measure_collect(work: Path, config: Config, limit: int) -> Run:
    with timed() as run:
        options = CollectOptions(out=work / f"collected-{limit}", limit=limit, max_tokens=64,
                                 policy="suffix", num_workers=1)  # fmt: skip
        result = collect(options, config, progress=run)
    run.tokens, run.traces = result["tokens"], result["traces"]
    return run


def measure_label(traces: Path, out: Path, *, workers: int) -> Run:
    with timed() as run:
        options = LabelOptions(traces, out, num_shards=SHARDS, num_workers=workers)
        result = label(options, Config(), progress=run)
    run.tokens, run.traces = result["positions"], result["traces"]
    return run


def measure_train(labels: Path) -> Run:
    """As `hvd train` does it, registering left out."""
    from hvd_ray.payoff.training import train_predictor
    from hvd_ray.payoff.training_settings import TrainingSettings

    with timed() as run:
        table = read_labels(labels, feature_names=FEATURE_NAMES, feature_version=FEATURE_VERSION)
        data = read_labels_table(table)
        train_predictor(data, TrainingSettings(kind="survival", epochs=20), model="", provenance={})
    run.tokens = data.num_positions
    run.worker_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return run


def measure_tune(labels: Path, traces: Path, out: Path) -> Run:
    """Two short trials, one after the other; the sweep's preparation and end are its driver's."""
    sweep, _ = load_sweep(None, [f"trials={TRIALS}", "concurrency=1", "space.epochs=8"])
    config = load_config(None, ["tracking.uri=none"])
    with timed() as run:
        result = run_sweep(SweepOptions(labels, traces, out, "pass"), sweep, config, progress=run)
    assert len(result["trials"]) == TRIALS
    return run


def slope(small: Run, large: Run) -> tuple[float, float]:
    """Microseconds a token, and the seconds that both runs took besides."""
    token_s = (large.worker_cpu_s - small.worker_cpu_s) / (large.tokens - small.tokens)
    return max(0.0, token_s * 1e6), max(0.0, small.worker_cpu_s - small.tokens * token_s)


def disk_bytes(folder: Path, tokens: int) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*.parquet")) / tokens


def stage_costs(work: Path, traces: Path, copies: int) -> dict[str, Any]:
    """All stages' costs, the runs behind them and the curve."""
    config = load_config(None, ["num_threads=1"])
    said = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    collects = [measure_collect(work, config, limit) for limit in COLLECTED]
    said(f"collect: {[run.as_json() for run in collects]}")
    few, many = work / "few", work / "many"
    multiply(traces, few, copies, share=2)
    multiply(traces, many, copies)
    labels = {1: measure_label(few, work / "labels-few", workers=1)}
    curve = {
        workers: measure_label(many, work / f"labels-{workers}", workers=workers)
        for workers in WORKERS
    }
    said(f"label: {[run.as_json() for run in (labels[1], *curve.values())]}")
    trains = [measure_train(work / name) for name in ("labels-few", "labels-1")]
    said(f"train: {[run.as_json() for run in trains]}")
    tunes = [
        measure_tune(work / name, place, work / f"sweep-{name}")
        for name, place in (("labels-few", few), ("labels-1", many))
    ]
    for run, labelled in zip(tunes, trains, strict=True):
        run.tokens = labelled.tokens
    said(f"tune: {[run.as_json() for run in tunes]}")
    costs = {
        "collect": _sharded(
            collects,
            disk_bytes(work / f"collected-{COLLECTED[1]}", collects[1].tokens),
            collect_planning(config),
        ),
        "label": _sharded(
            [labels[1], curve[1]],
            disk_bytes(work / "labels-1", curve[1].tokens),
            planning(lambda: plan_labels(many, num_shards=SHARDS), curve[1].traces),
        ),
        "train": _train_cost(trains),
        "tune": _tune_cost(tunes, trains),
    }
    return {
        **costs,
        "provenance": provenance(
            config=config,
            model=config.model,
            dtype=config.dtype,
            load_before=[round(load, 2) for load in os.getloadavg()],
            costs_are="seconds of CPU of one worker with one thread",
            label_traces=f"{copies} copies of imported transcripts, {curve[1].traces} traces",
            runs={
                "collect": [run.as_json() for run in collects],
                "label": [run.as_json() for run in (labels[1], curve[1])],
                "train": [run.as_json() for run in trains],
                "tune": [run.as_json() for run in tunes],
            },
            label_curve={str(n): run.as_json() for n, run in curve.items()},
        ),
    }


def planning(plan: Callable[[], object], num_traces: int) -> dict[str, float]:
    """What the driver's planning costs for each trace, in time and in memory."""
    started = time.monotonic()
    plan()
    seconds = time.monotonic() - started
    tracemalloc.start()
    kept = plan()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del kept
    return {
        "driver_trace_us": round(seconds / num_traces * 1e6, 1),
        "driver_trace_bytes": round(most / num_traces),
    }


def collect_planning(config: Config) -> dict[str, float]:
    prompts = load_shipped().prompts
    codec, target = open_target(config)
    sampling = Sampling(max_tokens=64, temperature=None, seed=0)
    return planning(
        lambda: plan_traces(
            prompts, codec=codec, target=target, sampling=sampling, policy="suffix"
        ),
        len(prompts),
    )


def _sharded(runs: list[Run], disk: float, planned: dict[str, float]) -> dict[str, Any]:
    """Costs of a stage over shards, from one worker at two sizes."""
    small, large = runs
    token_us, start_s = slope(small, large)
    grown = max(0, large.worker_bytes - small.worker_bytes)
    held = (large.tokens - small.tokens) / SHARDS
    return {
        "work": "shards",
        "token_us": round(token_us, 3),
        "worker_start_s": round(start_s, 2),
        "driver_s": round(min(small.other_cpu_s, large.other_cpu_s), 2),
        "worker_mb": round(small.worker_bytes / 1e6),
        "worker_token_bytes": round(grown / held),
        "driver_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
        **planned,
        "disk_token_bytes": round(disk, 2),
    }


def _train_cost(runs: list[Run]) -> dict[str, Any]:
    token_us, fixed_s = slope(*runs)
    grown = max(0, runs[1].worker_bytes - runs[0].worker_bytes)
    return {
        "work": "whole",
        "token_us": round(token_us, 3),
        "worker_start_s": 0,
        "driver_s": round(fixed_s, 2),
        "worker_mb": round(runs[0].worker_bytes / 1e6),
        "worker_token_bytes": round(grown / (runs[1].tokens - runs[0].tokens)),
    }


def _tune_cost(runs: list[Run], trains: list[Run]) -> dict[str, Any]:
    """A trial holds the labels as training does; what is no trial is the driver's."""
    small, large = runs
    token_us, fixed_s = slope(small, large)
    return {
        **_train_cost(trains),
        "work": "trials",
        "token_us": round(token_us / TRIALS, 3),
        "worker_start_s": round(fixed_s, 2),
        "driver_s": round(min(small.other_cpu_s, large.other_cpu_s), 2),
    }


def show_curve(costs: StageCosts) -> None:
    """Labelling as measured and as simulated, on this machine's cores."""
    curve = costs.provenance["label_curve"]
    cores = len(os.sched_getaffinity(0))
    for workers, run in curve.items():
        load = Load(run["tokens"], trace_tokens=max(1, run["tokens"] // run["traces"]))
        shards = list(load.shard_tokens(SHARDS))
        plan = plan_stage(costs.label, load, Machines(int(workers), cores), shard_tokens=shards)
        print(
            f"label, {workers} workers on {cores} cores: {run['seconds']:.1f} s by the clock, "
            f"{run['worker_cpu_s']:.1f} s of the workers' CPU; simulated {plan.seconds:.1f} s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure stage costs for `hvd plan`.")
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hvdm") as folder:
        found = stage_costs(Path(folder), args.traces, args.copies)
    costs = StageCosts.model_validate(found)
    with atomic_path(args.out) as draft:
        draft.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    show_curve(costs)


if __name__ == "__main__":
    main()
