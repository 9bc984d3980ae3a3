"""Tables and plots from results of the bench, as a Ray job or a plain script.

    python jobs/report.py bench.json --out report
    ray job submit --working-dir . --runtime-env jobs/env/cpu.yaml -- \
        python jobs/report.py /shared/bench.json --out /shared/report

Its flags are those of `hvd report`; `--replay` and `--transfer` with `--workers N` use the cluster.
"""

from hvd_ray.job import run_job

if __name__ == "__main__":
    run_job("report")
