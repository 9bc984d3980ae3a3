"""Decode prompts with the target and keep traces and steps, as a Ray job or a plain script.

    python jobs/collect_traces.py --workloads doc_edit --out traces --policy suffix
    ray job submit --working-dir . --runtime-env jobs/env/gpu.yaml -- \
        python jobs/collect_traces.py --out /shared/traces --model Qwen/Qwen3-8B --workers 4 \
        --gpus-per-worker 1

One engine an actor. Killed and submitted again, it goes on where it was and ends with the same
rows. Its flags are those of `hvd traces collect`.
"""

from hvd_ray.job import run_job

if __name__ == "__main__":
    run_job("traces", "collect")
