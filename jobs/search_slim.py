"""Find a slim model of the target on Ray Tune, as a Ray job or a plain script.

    python jobs/search_slim.py traces --out slim --skip 0.3 --trials 16
    ray job submit --working-dir . --runtime-env jobs/env/cpu.yaml -- \
        python jobs/search_slim.py /shared/traces --out /shared/slim --skip 0.3 \
        --trials 64 --concurrency 16 model=Qwen/Qwen3-8B

A trial an actor, each with the target loaded once; what the trials read lies in the output's
folder, so every node must see it. Name the result with `tiers.slim=/shared/slim/slim.json`. Its
flags are those of `hvd slim search`.
"""

from hvd_ray.job import run_job

if __name__ == "__main__":
    run_job("slim", "search")
