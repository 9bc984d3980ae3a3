"""Measure systems against plain decoding, as a Ray job or a plain script.

    python jobs/bench.py --systems suffix,hvd_cost --limit 4 --out bench.json
    ray job submit --working-dir . --runtime-env jobs/env/gpu.yaml --entrypoint-num-gpus 1 -- \
        python jobs/bench.py --limit 8 --out /shared/bench.json --track model=Qwen/Qwen3-8B

One process on one node, placed by `--entrypoint-num-gpus` or `--entrypoint-num-cpus`: what is
compared must run on the same machine, in turns. Give it a node to itself. Its flags are those of
`hvd bench`.
"""

from hvd_ray.job import run_job

if __name__ == "__main__":
    run_job("bench")
