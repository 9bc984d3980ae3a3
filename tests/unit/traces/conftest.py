"""Traces to test with: written by hand, or decoded by the toy engine."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from hvd_ray.decode import Decoder
from hvd_ray.traces.schema import Trace
from hvd_ray.types import Request, SamplingParams, Step

START = datetime(2026, 1, 1, tzinfo=UTC)

MakeTrace = Callable[..., Trace]
DecodeTrace = Callable[..., tuple[Trace, tuple[Step, ...]]]


@pytest.fixture
def make_trace() -> MakeTrace:
    """A trace with the fields given and plain values elsewhere; `minute` orders it in time."""

    def make(
        trace_id: str = "t0",
        *,
        prompt: tuple[int, ...] = (1, 2, 3),
        output: tuple[int, ...] = (4, 5, 6),
        minute: int = 0,
        **fields: object,
    ) -> Trace:
        values: dict[str, object] = {
            "prompt_id": trace_id,
            "workload": "toy",
            "family": "test",
            "scope": "default",
            "session_id": "s",
            "model": "toy",
            "tokenizer_sha": "letters",
            "finish_reason": "length",
            "sampling": SamplingParams(max_tokens=max(1, len(output))),
            "context_length": 512,
        } | fields
        return Trace(
            trace_id=trace_id,
            prompt_token_ids=prompt,
            output_token_ids=output,
            created_at=START + timedelta(minutes=minute),
            **values,  # type: ignore[arg-type]
        )

    return make


@pytest.fixture
def decode_trace(make_trace: MakeTrace) -> DecodeTrace:
    """Decode a request and keep what happened: the trace and the steps of the live run."""

    def decode(
        decoder: Decoder, request: Request, **fields: object
    ) -> tuple[Trace, tuple[Step, ...]]:
        done = decoder.generate(request)
        trace = make_trace(
            request.request_id,
            prompt=request.prompt_token_ids,
            output=done.token_ids,
            scope=request.scope,
            sampling=request.sampling,
            finish_reason=done.finish_reason,
            context_length=decoder.engine.capabilities.context_length,
            **fields,
        )
        return trace, done.steps

    return decode
