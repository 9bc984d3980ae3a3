"""Train one EAGLE-3 head with several workers: Ray Train around `run_training`, data-parallel."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvd_ray.drafting.eagle3_job import TrainJob, open_metrics, run_training
from hvd_ray.drafting.eagle3_training import TrainConfig, World
from hvd_ray.pipelines.cluster import connected
from hvd_ray.pipelines.shards import SPARE_CPUS

MAX_DEATHS = 8
"""How often the workers begin again, each time from the last checkpoint."""


def train_on_workers(
    job: TrainJob, config: TrainConfig, *, num_workers: int, use_gpu: bool, storage: Path
) -> Path:
    """Train on a Ray cluster; returns the head's folder.

    Each worker reads its own shards and gradients are averaged after every step, so a step sees
    `num_workers * rows_per_step` rows. All paths must be reachable by every worker. `storage`
    keeps Ray Train's own records. A worker that dies takes the others with it; all go on from
    the last checkpoint.

    Raises:
        UserError: the cluster cannot be reached or is too small.
    """
    num_gpus = num_workers if use_gpu else 0
    with connected(num_cpus=num_workers + SPARE_CPUS, num_gpus=num_gpus):
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer

        trainer = TorchTrainer(
            _train_worker,
            train_loop_config={"job": job, "config": config},
            scaling_config=ScalingConfig(num_workers=num_workers, use_gpu=use_gpu),
            run_config=RunConfig(
                name=job.run.name,
                storage_path=str(storage.absolute()),
                failure_config=FailureConfig(max_failures=MAX_DEATHS),
            ),
        )
        trainer.fit()
    return job.run / "head"


def _train_worker(settings: dict[str, Any]) -> None:
    from ray import train

    context = train.get_context()
    world = World(rank=context.get_world_rank(), size=context.get_world_size())
    job: TrainJob = settings["job"]
    config: TrainConfig = settings["config"]
    opened: Any = open_metrics(job.run) if world.is_first else nullcontext()
    with opened as file:

        def log_metrics(metrics: Any, step: int) -> None:  # of the first worker alone
            file.write(json.dumps({"step": step, **metrics}) + "\n")
            file.flush()

        run_training(job, config, log_metrics=log_metrics, world=world)
    if world.is_first:
        (job.run / "config.json").write_text(json.dumps(asdict(config), indent=1) + "\n")
