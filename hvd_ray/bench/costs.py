"""Measure the cost table of the target at hand, as `hvd calibrate` does."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_ray.bench.calibrate import (
    CONTEXT_LEN,
    NUM_REPEATS,
    ROWS,
    Told,
    VerifyTimes,
    measure_cache_draft,
    measure_model_draft,
    measure_tiers,
    measure_verify,
)
from hvd_ray.bench.workloads import load_shipped
from hvd_ray.config import Config
from hvd_ray.drafting.eagle3 import Eagle3Head
from hvd_ray.drafting.eagle3_drafter import Eagle3Drafter
from hvd_ray.drafting.ngram import NgramDrafter
from hvd_ray.drafting.suffix import SuffixDrafter
from hvd_ray.engines.torch_engine import TorchEngine
from hvd_ray.errors import UserError
from hvd_ray.parts.costs import cost_key
from hvd_ray.payoff.cost_file import CostFile
from hvd_ray.provenance import provenance
from hvd_ray.systems import find_slim, head_folder, load_head, slim_path
from hvd_ray.text import TextCodec
from hvd_ray.types import Source
from hvd_ray.verify.slim_file import SlimFile


def measure_costs(
    engine: TorchEngine,
    codec: TextCodec,
    config: Config,
    *,
    rows: Sequence[int] = ROWS,
    num_repeats: int = NUM_REPEATS,
    on_repeat: Told | None = None,
) -> CostFile:
    """Measure a cost table; nothing else should run meanwhile.

    Where a head is at hand its drafts are priced too, and the target passes are those that hand
    out the hidden states it reads.

    Raises:
        UserError: a head was named and cannot be used.
    """
    prompt = _real_prompt(codec)
    head, engine = _with_head(config, engine)
    slim = _slim_at_hand(config)
    times, slim_times = _pass_times(
        engine, slim, rows=rows, num_repeats=num_repeats, on_repeat=on_repeat
    )
    suffix_ms = measure_cache_draft(SuffixDrafter(config.drafting.suffix), prompt)
    ngram_ms = measure_cache_draft(NgramDrafter(config.drafting.ngram), prompt)
    draft_ms = {Source.SUFFIX: round(suffix_ms, 5), Source.NGRAM: round(ngram_ms, 5)}
    draft_token_ms = {}
    if head is not None:
        drafter = Eagle3Drafter(head, engine.capabilities.vocab_size)
        fixed_ms, token_ms = measure_model_draft(
            engine,
            drafter,
            context_len=min(CONTEXT_LEN, head.config.max_position_embeddings // 2),
            num_repeats=num_repeats,
        )
        draft_ms[Source.EAGLE3] = round(fixed_ms, 5)
        draft_token_ms[Source.EAGLE3] = round(token_ms, 5)
    return CostFile(
        key=cost_key(config),
        rows=tuple(rows),
        verify_ms=times.median_ms,
        draft_ms=draft_ms,
        draft_token_ms=draft_token_ms,
        slim=slim.key if slim else None,
        slim_ms=slim_times.median_ms if slim_times else (),
        provenance=provenance(
            config=config, num_repeats=num_repeats, spread=round(times.spread, 3)
        ),
    )


def _slim_at_hand(config: Config) -> SlimFile | None:
    """The configured slim model; none where none ships."""
    if config.tiers.slim is None:
        try:
            slim_path(config)
        except UserError:
            return None
    return find_slim(config)


def _pass_times(
    engine: TorchEngine,
    slim: SlimFile | None,
    *,
    rows: Sequence[int],
    num_repeats: int,
    on_repeat: Told | None,
) -> tuple[VerifyTimes, VerifyTimes | None]:
    """The target's passes, and those of a slim model where there is one."""
    if slim is None:
        times = measure_verify(engine, rows=rows, num_repeats=num_repeats, on_repeat=on_repeat)
        return times, None
    from hvd_ray.engines.torch_tiers import torch_tiers

    tiers = torch_tiers(engine, slim.layers)
    return measure_tiers(tiers, rows=rows, num_repeats=num_repeats, on_repeat=on_repeat)


def _with_head(config: Config, engine: TorchEngine) -> tuple[Eagle3Head | None, TorchEngine]:
    try:
        head_folder(config)
    except UserError:
        return None, engine
    return load_head(config, engine)


def _real_prompt(codec: TextCodec) -> list[int]:
    """The longest prompt of a shipped workload: look-ups cost more on repetitive text."""
    prompts = load_shipped(["tool_loop"]).prompts
    texts = ["\n".join(message.content for message in prompt.messages) for prompt in prompts]
    return codec.encode(max(texts, key=len))
