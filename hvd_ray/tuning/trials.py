"""The trials of a sweep on Ray Tune: Optuna's search, ASHA, some at once, resumed after a kill."""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvd_ray.errors import UserError
from hvd_ray.pipelines.cluster import connected
from hvd_ray.tuning.folder import SweepFolder
from hvd_ray.tuning.objective import EPOCH, SPEED
from hvd_ray.tuning.space import SweepSettings
from hvd_ray.tuning.watch import SweepWatch

FINISHED, STOPPED, FAILED = "finished", "stopped early", "failed"

_SECONDS_BETWEEN_SNAPSHOTS = "2"
"""Of the experiment's state: trials take seconds, and what a kill finds unsaved runs again."""

_MAX_DEATHS = 3
"""How often a trial begins again: Tune does not tell a worker's death from an error of its own."""

Row = dict[str, Any]
"""A trial's `trial`, `number`, `status`, `params`, `metrics` and `error`."""


def run_trials(folder: SweepFolder, sweep: SweepSettings, watch: SweepWatch) -> list[Row]:
    """Run the trials that are left, and tell how all of them ended.

    Raises:
        UserError: every trial failed, or the cluster is too small.
    """
    _set_environment()
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # failures stand in the rows
    with connected(num_cpus=sweep.concurrency) as ray:
        from hvd_ray.tuning import ray_hooks

        key = str(folder.path)
        ray_hooks.watches[key] = watch
        try:
            tuner = _tuner(ray, folder, sweep, watch)
            with warnings.catch_warnings():
                # a trial that a kill broke off reports its rungs again
                warnings.filterwarnings("ignore", message="The reported value is ignored")
                results = tuner.fit()
        finally:
            del ray_hooks.watches[key]
        rows = [_row(number, result) for number, result in enumerate(results, start=1)]
    if all(row["status"] == FAILED for row in rows):
        where = folder.trials / f"trial-{rows[0]['trial']}" / "error.txt"
        raise UserError(f"every trial failed, the first: {rows[0]['error']} (see {where})")
    return rows


def best_of(rows: list[Row]) -> Row:
    """The trial with the greatest speed at its last rung; those that failed are left out."""
    good = [row for row in rows if row["status"] != FAILED]
    return max(good, key=lambda row: float(row["metrics"][SPEED]))


def _tuner(ray: Any, folder: SweepFolder, sweep: SweepSettings, watch: SweepWatch) -> Any:
    """Ray's tuner: the one that a kill left behind, or a new one."""
    from ray import tune

    from hvd_ray.tuning import ray_hooks

    del ray  # connected, which is what counts
    trial = tune.with_parameters(ray_hooks.trial, folder=str(folder.path))
    trainable = tune.with_resources(trial, {"cpu": 1})
    if _has_state(folder.trials):
        tuner = tune.Tuner.restore(str(folder.trials), trainable, resume_errored=True)
        results = [result.metrics or {} for result in tuner.get_results()]
        watch.done |= {result["trial_id"] for result in results if result.get("done")}
        return tuner
    shutil.rmtree(folder.trials, ignore_errors=True)
    return tune.Tuner(
        trainable,
        tune_config=_tune_config(tune, sweep),
        run_config=tune.RunConfig(
            name=folder.trials.name,
            storage_path=str(folder.path),
            callbacks=[ray_hooks.Forwarding(str(folder.path))],
            failure_config=tune.FailureConfig(max_failures=_MAX_DEATHS),
            verbose=0,
        ),
    )


def _tune_config(tune: Any, sweep: SweepSettings) -> Any:
    import optuna
    from ray.tune.schedulers import ASHAScheduler
    from ray.tune.search.optuna import OptunaSearch

    from hvd_ray.tuning import ray_hooks

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    point = sweep.space.paper_point()
    search = OptunaSearch(
        sweep.space.suggest,
        metric=SPEED,
        mode="max",
        sampler=optuna.samplers.TPESampler(seed=sweep.seed, n_startup_trials=sweep.startup_trials),
        points_to_evaluate=[point] if point else None,
    )
    scheduler = ASHAScheduler(
        time_attr=EPOCH,
        max_t=sweep.space.max_epochs,
        grace_period=min(sweep.asha.grace_epochs, sweep.space.max_epochs),
        reduction_factor=sweep.asha.reduction_factor,
    )
    return tune.TuneConfig(
        metric=SPEED,
        mode="max",
        search_alg=search,
        scheduler=scheduler,
        num_samples=sweep.trials,
        max_concurrent_trials=sweep.concurrency,
        reuse_actors=True,
        trial_dirname_creator=ray_hooks.folder_name,
    )


def _has_state(experiment: Path) -> bool:
    """Whether Tune has saved anything to go on from."""
    is_begun = (experiment / "tuner.pkl").exists()
    return is_begun and any(experiment.glob("experiment_state-*.json"))


def _row(number: int, result: Any) -> Row:
    from hvd_ray.tuning.ray_hooks import own_metrics

    metrics: Mapping[str, Any] = result.metrics or {}
    params = dict(result.config or {})
    if result.error is not None:
        status = FAILED
    else:
        status = FINISHED if metrics[EPOCH] >= params["epochs"] else STOPPED
    return {
        "trial": metrics.get("trial_id", Path(result.path).name),
        "number": number,
        "status": status,
        "params": params,
        "metrics": own_metrics(dict(metrics)) if SPEED in metrics else {},
        "error": None if result.error is None else _last_line(result.error),
    }


def _last_line(error: BaseException) -> str:
    """Ray's errors carry the worker's traceback, which ends with the cause."""
    return str(error).strip().splitlines()[-1]


def _set_environment() -> None:
    """What Tune reads when it starts; the user's own settings win."""
    os.environ.setdefault("TUNE_GLOBAL_CHECKPOINT_S", _SECONDS_BETWEEN_SNAPSHOTS)
    os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")  # Ctrl-C ends the command
    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # the new one writes to stdout whatever it is told
