"""The cost table that holds here: where it lies, and what it says of a slim model."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from hvd_ray.config import Config
from hvd_ray.errors import UserError
from hvd_ray.fetch import model_fingerprint, resolve_model
from hvd_ray.home import calibration_dir
from hvd_ray.payoff.cost_file import CostFile, CostKey, read_costs
from hvd_ray.provenance import cpu_model
from hvd_ray.verify.break_even import BLOCK_ROWS, BreakEven
from hvd_ray.verify.slim_file import SlimFile


def cost_key(config: Config) -> CostKey:
    """What a cost table must have been measured for to hold here. Loads torch."""
    import torch

    has_cuda = torch.cuda.is_available()
    return CostKey(
        model=model_fingerprint(resolve_model(config.model).path_or_id),
        dtype=config.dtype,
        engine="torch",
        device=torch.cuda.get_device_name() if has_cuda else cpu_model(),
        num_threads=config.num_threads or torch.get_num_threads(),
    )


def costs_path(key: CostKey) -> Path:
    """Where the table for `key` is kept, under HVD_HOME."""
    digest = hashlib.sha256(key.model_dump_json().encode()).hexdigest()[:16]
    return calibration_dir() / f"{key.engine}-{key.dtype}-{digest}.json"


def find_costs(config: Config) -> CostFile:
    """The table of `policy.costs`, or this machine's own.

    Raises:
        UserError: there is none, or it was measured for something else.
    """
    given = config.policy.costs
    if not given and not any(calibration_dir().glob("*.json")):  # known without loading torch
        raise UserError(
            f"no cost table in {calibration_dir()}; measure one with `{calibrate_command(config)}`"
        )
    key = cost_key(config)
    path = Path(given) if given else costs_path(key)
    if not given and not path.exists() and (others := _other_threads(key)):
        raise UserError(_for_other_threads(key.num_threads, others, config))
    return read_costs(path, key=key)


def _other_threads(key: CostKey) -> list[int]:
    """The numbers of threads that tables are for which differ from `key` in nothing else."""
    found = []
    for path in calibration_dir().glob(f"{key.engine}-{key.dtype}-*.json"):
        try:
            theirs = read_costs(path).key
        except UserError:  # `hvd doctor` names it
            continue
        if theirs.model_copy(update={"num_threads": key.num_threads}) == key:
            found.append(theirs.num_threads)
    return sorted(found)


def calibrate_command(config: Config, *, num_threads: int | None = None) -> str:
    """What measures the table of a configuration, as it is typed."""
    default = Config()
    named = [
        f"{name}={getattr(config, name)}"
        for name in ("model", "dtype")
        if getattr(config, name) != getattr(default, name)
    ]
    wanted = num_threads or config.num_threads
    threads = [] if wanted is None else [f"num_threads={wanted}"]
    return " ".join(["hvd calibrate", *named, *threads])


def _for_other_threads(num_threads: int, others: list[int], config: Config) -> str:
    """A table for one thread says nothing of two; which are wanted only the reader knows."""
    again = calibrate_command(config, num_threads=num_threads)
    return (
        f"no cost table for num_threads={num_threads}, but one for "
        f"{' and '.join(map(str, others))}: add num_threads={others[0]} to use it, or measure "
        f"with `{again}`"
    )


def break_even(costs: CostFile | None, slim: SlimFile, escalated: float | None) -> BreakEven | None:
    """What is known of a slim model's costs here; None where something was not measured."""
    if costs is None or costs.slim != slim.key or escalated is None:
        return None
    slim_ms, full_ms = (
        float(np.interp(BLOCK_ROWS, costs.rows, times))
        for times in (costs.slim_ms, costs.verify_ms)
    )
    return BreakEven(slim_ms, full_ms, escalated)
