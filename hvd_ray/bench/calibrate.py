"""Measure what a cycle costs on this machine: target passes by rows, and drafting.

Every repeat runs all numbers of rows in turn, in another order each time, so that whatever else
the machine does meets all of them alike; the median of the repeats is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TypeVar

import numpy as np

from hvd_ray.drafting.base import Drafter
from hvd_ray.engines.base import Engine, TieredEngine
from hvd_ray.types import Int32Array, Request

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CONTEXT_LEN = 512
NUM_REPEATS = 15
NUM_LOOKUPS = 200


@dataclass(frozen=True, slots=True)
class VerifyTimes:
    """Target passes by rows."""

    median_ms: tuple[float, ...]
    """One for each number of rows, never falling."""
    spread: float
    """Interquartile range over median, the middle one of all rows."""


Result = TypeVar("Result")
Told = Callable[[], None]
"""Called once after each repeat."""


def measure_verify(
    engine: Engine,
    *,
    rows: Sequence[int] = ROWS,
    context_len: int = CONTEXT_LEN,
    num_repeats: int = NUM_REPEATS,
    seed: int = 0,
    on_repeat: Told | None = None,
) -> VerifyTimes:
    """Time target passes for each number of rows.

    Args:
        engine: of the target.
        rows: rising numbers of rows.
        context_len: cached positions before the pass.
        num_repeats: passes measured for each number of rows, after two that are not counted.
        seed: of the token ids; values do not matter to the cost.
        on_repeat: hears of the progress.
    """
    rng = np.random.default_rng(seed)
    context_len = min(context_len, engine.capabilities.context_length - max(rows))
    cache = engine.new_cache()
    engine.forward(_ids(rng, engine, context_len), cache, num_logits=1)
    times_ms: dict[int, list[float]] = {count: [] for count in rows}
    for repeat in range(num_repeats + 2):
        for count in rng.permutation(rows).tolist():
            token_ids = _ids(rng, engine, count)
            _, elapsed_ms = timed(partial(engine.forward, token_ids, cache, num_logits=count))
            engine.truncate(cache, context_len)
            if repeat >= 2:
                times_ms[count].append(elapsed_ms)
        if on_repeat:
            on_repeat()
    return verify_times([times_ms[count] for count in rows])


def measure_tiers(
    engine: TieredEngine,
    *,
    rows: Sequence[int] = ROWS,
    context_len: int = CONTEXT_LEN,
    num_repeats: int = NUM_REPEATS,
    on_repeat: Told | None = None,
) -> tuple[VerifyTimes, VerifyTimes]:
    """The target's and the slim model's passes, measured in turns so that they compare.

    Args are those of `measure_verify`.
    """
    rng = np.random.default_rng(0)
    context_len = min(context_len, engine.capabilities.context_length - max(rows))
    cache = engine.new_cache()
    context = _ids(rng, engine, context_len)
    engine.forward_slim(context, cache, num_logits=1)
    engine.forward(context, cache, num_logits=1)
    arms = [engine.forward, engine.forward_slim]
    times_ms: dict[tuple[int, int], list[float]] = {(a, n): [] for a in (0, 1) for n in rows}
    for repeat in range(num_repeats + 2):
        for at in rng.permutation(2 * len(rows)).tolist():
            arm, count = at % 2, rows[at // 2]
            token_ids = _ids(rng, engine, count)
            _, elapsed_ms = timed(partial(arms[arm], token_ids, cache, num_logits=count))
            engine.truncate(cache, context_len)
            if repeat >= 2:
                times_ms[arm, count].append(elapsed_ms)
        if on_repeat:
            on_repeat()
    full, slim = ([times_ms[arm, count] for count in rows] for arm in (0, 1))
    return verify_times(full), verify_times(slim)


def timed(call: Callable[[], Result]) -> tuple[Result, float]:
    """What the call gives and its milliseconds, with all that it set off on a GPU."""
    _wait_for_gpu()
    started = perf_counter()
    result = call()
    _wait_for_gpu()
    return result, (perf_counter() - started) * 1e3


def _wait_for_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def verify_times(times_ms: Sequence[Sequence[float]]) -> VerifyTimes:
    """Repeats for each number of rows as their medians, and how far they disagree."""
    low, median, high = np.quantile(np.array(times_ms), (0.25, 0.5, 0.75), axis=1)
    spread = float(np.median((high - low) / median))
    return VerifyTimes(tuple(np.maximum.accumulate(median).round(4).tolist()), spread)


def measure_cache_draft(drafter: Drafter, prompt: Sequence[int]) -> float:
    """Median milliseconds of a cycle's look-up and observation on a real prompt."""
    half = len(prompt) // 2
    drafter.start(Request("calibrate", tuple(prompt[:half])))
    times_ms = []
    for token in prompt[half : half + NUM_LOOKUPS]:
        started = perf_counter()
        drafter.propose("calibrate", 64)
        drafter.observe("calibrate", (token,), None)
        times_ms.append((perf_counter() - started) * 1e3)
    drafter.stop("calibrate")
    return float(np.median(times_ms))


def measure_model_draft(
    engine: Engine,
    drafter: Drafter,
    *,
    context_len: int = CONTEXT_LEN,
    num_tokens: int = 4,
    num_repeats: int = NUM_REPEATS,
) -> tuple[float, float]:
    """`(fixed, per token)` milliseconds of a model draft of 1 and of `num_tokens` tokens.

    The fixed part is the catch-up over one committed token; both follow from two draft lengths.
    """
    assert num_tokens > 1
    rng = np.random.default_rng(0)
    prompt = _ids(rng, engine, min(context_len, engine.capabilities.context_length // 2))
    drafter.start(Request("calibrate", tuple(prompt.tolist())))
    cache = engine.new_cache()
    hidden = engine.forward(prompt, cache, num_logits=1).hidden_TD
    times_ms: dict[int, list[float]] = {1: [], num_tokens: []}
    for repeat in range(2 * num_repeats + 4):
        token = int(rng.integers(engine.capabilities.vocab_size))
        drafter.observe("calibrate", (token,), hidden)
        length = (1, num_tokens)[repeat % 2]
        draft, elapsed_ms = timed(partial(drafter.propose, "calibrate", length))
        assert len(draft) == length, "the drafter declined; its time would be nobody's"
        if repeat >= 4:
            times_ms[length].append(elapsed_ms)
        hidden = engine.forward(np.array([token], np.int32), cache, num_logits=1).hidden_TD
    drafter.stop("calibrate")
    one, many = (float(np.median(times_ms[length])) for length in (1, num_tokens))
    per_token = max(0.0, (many - one) / (num_tokens - 1))
    return max(0.0, one - per_token), per_token


def _ids(rng: np.random.Generator, engine: Engine, count: int) -> Int32Array:
    ids: Int32Array = rng.integers(0, engine.capabilities.vocab_size, count).astype(np.int32)
    return ids
