"""Sweep payoff predictors and policies on Ray Tune, as a Ray job or a plain script.

    python jobs/tune_payoff.py --config tune_configs/quick.yaml \
        --labels labels --traces traces --out sweep
    ray job submit --working-dir . --runtime-env jobs/env/cpu.yaml -- \
        python jobs/tune_payoff.py --config tune_configs/payoff.yaml \
        --labels /shared/labels --traces /shared/traces --out /shared/sweep trials=128

A trial an actor. A job that is killed and submitted again goes on where it was; labels, traces
and the sweep's folder must lie where every node sees them. Its flags are those of `hvd tune`.
"""

from hvd_ray.job import run_job

if __name__ == "__main__":
    run_job("tune", always=("--resume",))
