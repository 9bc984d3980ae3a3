"""Compare challenger and champion on test sessions and move the alias, as a Ray job or a script.

    python jobs/promote_payoff.py
    ray job submit --working-dir . --runtime-env jobs/env/cpu.yaml -- \
        python jobs/promote_payoff.py --labels /shared/labels --traces /shared/traces

Without a champion what ships for the target is to be beaten. Exits with 1, so that the job shows as
failed, if the champion or what ships stays. Its flags are those of `hvd promote`.
"""

from hvd_ray.job import run_job

if __name__ == "__main__":
    run_job("promote", output=None)
