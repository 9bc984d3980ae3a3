"""Sweep payoff predictors, as a Ray job or a plain script.

    python jobs/tune_payoff.py --config tune_configs/quick.yaml \
        --labels labels --traces traces --out sweep
    ray job submit --working-dir . -- python jobs/tune_payoff.py --config tune_configs/payoff.yaml \
        --labels /shared/labels --traces /shared/traces --out /shared/sweep trials=128

A job that is killed and submitted again goes on where it was. On a cluster, labels, traces and
the sweep's folder must lie where every node sees them; a Ray of its own is started otherwise.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hvd_ray.commands.traces_progress import shown_progress
from hvd_ray.config import load_config
from hvd_ray.tuning.run import SweepOptions, run_sweep
from hvd_ray.tuning.space import load_sweep


def main() -> None:
    parser = argparse.ArgumentParser(description="Sweep payoff predictors and policies.")
    parser.add_argument("--config", type=Path, help="a file of tune_configs/")
    parser.add_argument("--labels", type=Path, required=True)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--costs", help="a cost table, or pass; default: this machine's table")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()

    sweep, others = load_sweep(args.config, args.settings)
    options = SweepOptions(args.labels, args.traces, args.out, args.costs, is_resumed=True)
    with shown_progress("items") as progress:
        result = run_sweep(options, sweep, load_config(None, others), progress=progress)
    best, whole = result["best"], result["test"][0]
    print(f"best trial {best['number']}: {best['params']}")
    print(f"test sessions, {result['unit']}: {whole['speeds']}")
    print(f"registered: {result['registered']}; page: {args.out / 'sweep.html'}")


if __name__ == "__main__":
    main()
