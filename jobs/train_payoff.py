"""Train a payoff predictor on labels and register it, as a Ray job or a plain script.

    python jobs/train_payoff.py labels --out predictor
    ray job submit --working-dir . --runtime-env jobs/env/cpu.yaml --entrypoint-num-cpus 4 -- \
        python jobs/train_payoff.py /shared/labels --out /shared/predictor

One process: the driver itself, placed by `--entrypoint-num-cpus`. Killed and submitted again, it
trains anew, in the same tracking run. Its flags are those of `hvd train`.
"""

from hvd_ray.job import run_job

if __name__ == "__main__":
    run_job("train")
