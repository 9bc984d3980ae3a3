"""Replay traces and label what the cache's draft was worth, as a Ray job or a plain script.

    python jobs/label_traces.py traces --out labels --workers 2
    ray job submit --working-dir . --runtime-env jobs/env/cpu.yaml -- \
        python jobs/label_traces.py /shared/traces --out /shared/labels --shards 64 --workers 32

No model is needed, only its tokenizer. A shard is the unit of work and of caching: the labels
depend on `--shards`, never on `--workers`. Its flags are those of `hvd traces label`.
"""

from hvd_ray.job import run_job

if __name__ == "__main__":
    run_job("traces", "label")
