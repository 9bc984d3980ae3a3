"""The measured cost table of the target at hand: made by `calibrate`, found by `hvd_cost`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from hvd_ray.bench.calibrate import (
    NUM_REPEATS,
    ROWS,
    Told,
    measure_cache_draft,
    measure_verify,
)
from hvd_ray.bench.workloads import load_shipped
from hvd_ray.config import Config
from hvd_ray.drafting.ngram import NgramDrafter
from hvd_ray.drafting.suffix import SuffixDrafter
from hvd_ray.engines.base import Engine
from hvd_ray.fetch import model_fingerprint, resolve_model
from hvd_ray.home import calibration_dir
from hvd_ray.payoff.cost_file import CostFile, CostKey, read_costs
from hvd_ray.provenance import cpu_model, provenance
from hvd_ray.text import TextCodec
from hvd_ray.types import Source


def cost_key(config: Config) -> CostKey:
    """What a cost table must have been measured for to hold here. Loads torch."""
    import torch

    has_cuda = torch.cuda.is_available()
    return CostKey(
        model=model_fingerprint(resolve_model(config.model).path_or_id),
        dtype=config.dtype,
        engine="torch",
        device=torch.cuda.get_device_name() if has_cuda else cpu_model(),
        num_threads=config.num_threads or torch.get_num_threads(),
    )


def costs_path(key: CostKey) -> Path:
    """Where the table for `key` is kept, under HVD_HOME."""
    digest = hashlib.sha256(key.model_dump_json().encode()).hexdigest()[:16]
    return calibration_dir() / f"{key.engine}-{key.dtype}-{digest}.json"


def find_costs(config: Config) -> CostFile:
    """The table of `policy.costs`, or this machine's own.

    Raises:
        UserError: there is none, or it was measured for something else.
    """
    key = cost_key(config)
    given = config.policy.costs
    return read_costs(Path(given) if given else costs_path(key), key=key)


def measure_costs(
    engine: Engine,
    codec: TextCodec,
    config: Config,
    *,
    rows: Sequence[int] = ROWS,
    num_repeats: int = NUM_REPEATS,
    on_repeat: Told | None = None,
) -> CostFile:
    """Measure a cost table; nothing else should run meanwhile."""
    prompt = _real_prompt(codec)
    times = measure_verify(engine, rows=rows, num_repeats=num_repeats, on_repeat=on_repeat)
    suffix_ms = measure_cache_draft(SuffixDrafter(config.drafting.suffix), prompt)
    ngram_ms = measure_cache_draft(NgramDrafter(config.drafting.ngram), prompt)
    return CostFile(
        key=cost_key(config),
        rows=tuple(rows),
        verify_ms=times.median_ms,
        draft_ms={Source.SUFFIX: round(suffix_ms, 5), Source.NGRAM: round(ngram_ms, 5)},
        provenance=provenance(
            config=config, num_repeats=num_repeats, spread=round(times.spread, 3)
        ),
    )


def _real_prompt(codec: TextCodec) -> list[int]:
    """The longest prompt of a shipped workload: look-ups cost more on repetitive text."""
    prompts = load_shipped(["tool_loop"]).prompts
    texts = ["\n".join(message.content for message in prompt.messages) for prompt in prompts]
    return codec.encode(max(texts, key=len))
