"""Train an EAGLE-3 head on what the target said, as a Ray job or a plain script.

    python jobs/train_drafter.py traces --run head --steps 2000
    ray job submit --working-dir . --runtime-env jobs/env/gpu.yaml -- \
        python jobs/train_drafter.py /shared/traces --run /shared/head --target Qwen/Qwen3-8B \
        --workers 4 --gpus

Data-parallel with Ray Train from two workers on: each reads its own shards, gradients are averaged.
Killed and submitted again, it goes on from its last checkpoint. Its flags are those of
`hvd drafter train`; it learns from traces as well as from `hvd drafter collect`'s responses.
"""

from hvd_ray.job import run_job

if __name__ == "__main__":
    run_job("drafter", "train", output="--run")
