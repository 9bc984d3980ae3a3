"""Does anything grow? Many short requests with outputs of their own, through one real engine.

    python scripts/vllm_memory.py --requests 10000 --out docs/bench/vllm-memory.json

Every prompt is of random tokens, so that no output is another's; the cache's cap is reached after a
fraction of them. From then on cache, tables and resident memory should stay where they are. Exits
with 1 where they do not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

TOLERANCE = 1.03
"""How much more memory the last tenth may take than the tenth after the cap was reached."""


def start(given: argparse.Namespace) -> Any:
    """An engine in this process, with cache and head."""
    os.environ.update(
        {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_PLUGINS": "hvd_ray",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
    )
    from vllm import LLM

    from hvd_ray.bench.vllm_engines import Wave, engine_arguments
    from hvd_ray.config import load_config

    settings = [
        "tracking.uri=none",
        f"dtype={given.dtype}",
        f"drafting.suffix.max_cached_tokens={given.cap}",
    ]
    config = load_config(None, settings)
    arguments = engine_arguments("hvd_cost", config, Wave(given.concurrency, max_model_len=256))
    return LLM(enforce_eager=True, distributed_executor_backend="uni", **arguments).llm_engine


def serve(engine: Any, given: argparse.Namespace) -> Iterator[int]:
    """Keep `concurrency` requests running; yields how many have ended, at each end."""
    from vllm import SamplingParams

    rng = random.Random(given.seed)
    vocab = engine.model_config.get_vocab_size()
    asked = ended = 0
    while ended < given.requests:
        while asked < given.requests and asked - ended < given.concurrency:
            prompt = [rng.randrange(vocab) for _ in range(rng.randint(6, 12))]
            params = SamplingParams(
                temperature=0, max_tokens=rng.randint(4, 8), ignore_eos=True, detokenize=False
            )
            engine.add_request(str(asked), {"prompt_token_ids": prompt}, params)
            asked += 1
        for output in engine.step():
            if output.finished:
                ended += 1
                yield ended


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def state_of(engine: Any) -> dict[str, float]:
    drafter = engine.model_executor.driver_worker.worker.model_runner.drafter
    table = drafter._session.hybrid.router.table
    return {
        "cache_tokens": table.cache.num_cached_tokens,
        "evictions": table.cache.num_evictions,
        "requests_in_view": len(table),
        "rows_for_head": drafter._backlog.num_rows,
        "resident_mib": round(resident_mib(), 1),
    }


def verdict(points: list[dict[str, float]], cap: int) -> list[str]:
    """What grew although it should not."""
    full = [point for point in points if point["evictions"] > 0]
    if len(full) < 10:
        return ["the cap was reached too late to say: more requests, or a smaller --cap"]
    faults = [
        f"{point['cache_tokens']:.0f} tokens in the cache, over the cap of {cap}"
        for point in points
        if point["cache_tokens"] > cap
    ]
    tenth = max(1, len(full) // 10)
    early, late = (
        sum(point["resident_mib"] for point in part) / tenth
        for part in (full[tenth : 2 * tenth], full[-tenth:])
    )
    if late > TOLERANCE * early:
        faults.append(f"memory rose from {early:.0f} to {late:.0f} MiB after the cap was reached")
    return faults


def main() -> None:
    from hvd_ray.home import atomic_path
    from hvd_ray.provenance import provenance

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--cap", type=int, default=10_000, help="tokens the cache may hold")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    engine = start(given)
    every = max(1, given.requests // 50)
    points: list[dict[str, float]] = []
    began = perf_counter()
    for ended in serve(engine, given):
        if ended % every == 0:
            points.append({"requests": ended, **state_of(engine)})
            print(f"\r{ended} of {given.requests}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    engine.step()  # the last ones leave
    faults = verdict(points, given.cap)
    print("\n".join(faults) or f"flat: {points[-1]}")
    if given.out is not None:
        asked = {k: v for k, v in vars(given).items() if k != "out"}
        about = provenance(options=asked)
        seconds = round(perf_counter() - began, 1)
        tree = {"provenance": about, "faults": faults, "seconds": seconds, "points": points}
        with atomic_path(given.out) as draft:
            draft.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
