"""Small traffic with something to draft from, as an import would have made it."""

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from hvd_ray.traces.schema import Trace
from hvd_ray.types import SamplingParams

START = datetime(2026, 1, 1, tzinfo=UTC)
VOCAB = 27


def conversation(number: int, *, workload: str, split: str, repeats: bool) -> list[Trace]:
    """Three turns, each prompt all that was said before; phrases come again, noise does not."""
    rng = np.random.default_rng([number, len(workload)])
    phrases = np.random.default_rng(7).integers(1, VOCAB, (4, 14))
    said: list[int] = rng.integers(1, VOCAB, 6).tolist()
    traces = []
    for turn in range(3):
        said += rng.integers(1, VOCAB, 4).tolist()
        output: list[int] = []
        while len(output) < 40:
            wide = rng.integers(1, 5000, 12).tolist()
            output += phrases[rng.integers(0, 4)].tolist() if repeats else wide
        traces.append(
            Trace(
                trace_id=f"{workload}-{number}-{turn}",
                prompt_id=f"{number}#{turn}",
                workload=workload,
                family="",
                scope="toy",
                session_id=f"{workload}-{number}",
                created_at=START + timedelta(minutes=number, seconds=turn),
                model="toy",
                tokenizer_sha="letters",
                prompt_token_ids=tuple(said),
                output_token_ids=tuple(output),
                finish_reason="stop",
                sampling=SamplingParams(max_tokens=4096),
                context_length=8192,
                split=split,
            )
        )
        said += output
    return traces


@pytest.fixture(scope="session")
def traffic() -> list[Trace]:
    """Tools repeat themselves, chat does not; in time order."""
    traces = [
        trace
        for number in range(12)
        for workload, repeats in (("tools", True), ("chat", False))
        for trace in conversation(
            number, workload=workload, split="test" if number % 2 else "train", repeats=repeats
        )
    ]
    return sorted(traces, key=lambda trace: (trace.created_at, trace.trace_id))
