"""What the plugin costs in vLLM when it does nothing.

    python scripts/vllm_overhead.py --prompts 24 --max-tokens 64 --out docs/bench/vllm-overhead.json

Four engines answer the same prompts in turns, one request at a time: vLLM without the plugin, vLLM
with it loaded but not configured, and, configured with cache and head, the engine asked for
`{"hvd": "off"}` by every request. The one without the plugin is there twice: what the two of it
differ by is noise. The ratio is tokens per second over those of plain vLLM, its interval a paired
bootstrap over prompts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

from hvd_ray.bench.engine_process import EngineProcess
from hvd_ray.bench.plan import Question, Sampling, ask
from hvd_ray.bench.stats import Work, paired_speedup
from hvd_ray.bench.vllm_engines import Wave, engine_arguments, memory_share, target_limits
from hvd_ray.bench.workloads import load_shipped, select
from hvd_ray.config import Config, load_config
from hvd_ray.fetch import resolve_model
from hvd_ray.home import atomic_path
from hvd_ray.provenance import provenance
from hvd_ray.text import HFTextCodec

PLAIN = "plain vLLM"
AGAIN = "plain vLLM once more"
LOADED = "plugin loaded, not configured"
OFF = "plugin configured, every request off"
WITHOUT = {"VLLM_PLUGINS": ""}


def engines_of(config: Config, wave: Wave) -> dict[str, EngineProcess]:
    """What is compared, by name."""
    shared = memory_share(4)
    plain = engine_arguments("greedy", config, wave) | shared
    hybrid = engine_arguments("hvd_cost", config, wave) | shared
    return {
        PLAIN: EngineProcess(plain, WITHOUT),
        AGAIN: EngineProcess(plain, WITHOUT),
        LOADED: EngineProcess(plain, {"VLLM_PLUGINS": "hvd_ray"}),
        OFF: EngineProcess(hybrid, {"VLLM_PLUGINS": "hvd_ray"}, {"hvd": "off"}),
    }


def measure(
    engines: dict[str, EngineProcess], questions: Sequence[Question], repeats: int
) -> dict[str, list[float]]:
    """Seconds of each prompt by engine, summed over repeats; outputs are checked to be equal."""
    seconds: dict[str, list[float]] = {name: [0.0] * len(questions) for name in engines}
    names = list(engines)
    for engine in engines.values():
        engine.serve([questions[0].request])  # warms up
    for turn in range(repeats * len(questions)):
        place = turn % len(questions)
        first = turn % len(names)
        said = {}
        for name in names[first:] + names[:first]:
            taken, (answer,) = engines[name].serve([questions[place].request])
            seconds[name][place] += taken
            said[name] = answer
        lengths = {len(answer.token_ids) for answer in said.values()}
        assert len(lengths) == 1, "outputs differ in length"
        assert not said[OFF].drafts, "it was off"
        print(f"\r{turn + 1} of {repeats * len(questions)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return seconds


def ratios(seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Speed over plain vLLM's, one row an engine."""
    ones = [1.0] * len(seconds[PLAIN])
    baseline = Work.of(tokens=ones, seconds=seconds[PLAIN])
    rows = []
    for name in (AGAIN, LOADED, OFF):
        work = Work.of(tokens=ones, seconds=seconds[name])
        found = paired_speedup(work, baseline=baseline, clusters=list(map(str, range(len(ones)))))
        rows.append({"engine": name, "speed": found.ratio, "ci": [found.low, found.high]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    config = load_config(None, [f"dtype={given.dtype}", "tracking.uri=none"])
    codec = HFTextCodec(resolve_model(config.model).path_or_id)
    limits = target_limits(config)
    sampling = Sampling(given.max_tokens, 0.0, config.seed)
    by_workload = ask(
        select(load_shipped().prompts), codec=codec, capabilities=limits, sampling=sampling
    )
    in_turn = (q for group in zip(*by_workload.values(), strict=False) for q in group)
    questions = list(islice(in_turn, given.prompts))
    with ExitStack() as opened:
        engines = engines_of(config, Wave(1))
        for name, engine in engines.items():
            print(f"starting {name}", file=sys.stderr)
            opened.callback(engine.close)
            engine.start()
            engine.wait_ready()
        seconds = measure(engines, questions, given.repeats)
    rows = ratios(seconds)
    for row in rows:
        low, high = row["ci"]
        print(f"{row['engine']:40} {row['speed']:.3f}x ({low:.3f}-{high:.3f})")
    if given.out is not None:
        about = provenance(config=config, prompts=len(questions), max_tokens=given.max_tokens)
        tree = {"provenance": about, "speed_over_plain_vllm": rows, "seconds": seconds}
        with atomic_path(given.out) as draft:
            draft.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
