"""Collect on-policy responses for drafter training with vLLM's offline engine.

Tokens only, in Parquet shards; hidden states are recomputed when training. A run that is killed
and started again skips the requests whose rows are already written. Responses are cut where they
begin to loop, because a small greedy model loops often and a loop teaches the drafter nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_ray.home import atomic_path, ensure_dir
from hvd_ray.parquet_file import opened_parquet
from hvd_ray.traces.loops import loop_start

LOOP_CHECK_EVERY = 32


@dataclass(frozen=True, kw_only=True)
class CollectRequest:
    """One response to sample; `request_id` is unique within an output folder."""

    request_id: str
    prompt_id: str
    family: str
    workload: str
    prompt_token_ids: tuple[int, ...]
    temperature: float
    split: str = "train"
    max_tokens: int


@dataclass(frozen=True, kw_only=True)
class CollectedRow:
    """A response as stored: tokens, why it ended, and how it was sampled."""

    request: CollectRequest
    output_token_ids: tuple[int, ...]
    finish_reason: str  # "stop", "length" or "loop" (cut where the loop began)


def set_fast_cpu_defaults() -> None:
    """vLLM uses one of two cores unless told otherwise; the caller's settings win."""
    cores = sorted(os.sched_getaffinity(0))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}-{cores[-1]}")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def start_engine(model: Path, *, max_num_seqs: int, max_model_len: int, seed: int = 0) -> Any:
    """vLLM's engine in this process, tuned for throughput on a CPU; on a GPU with its graphs."""
    set_fast_cpu_defaults()
    from vllm import LLM
    from vllm.platforms import current_platform

    return LLM(
        model=str(model),
        trust_remote_code=False,
        load_format="safetensors",
        dtype="bfloat16",
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        seed=seed,
        enforce_eager=current_platform.is_cpu(),
        distributed_executor_backend="uni",
        disable_log_stats=True,
    ).llm_engine


def generate(
    engine: Any,
    requests: Sequence[CollectRequest],
    *,
    max_in_flight: int,
) -> Iterator[CollectedRow]:
    """Keep the batch full and yield each response as it ends."""
    waiting = list(reversed(requests))
    in_flight: dict[str, CollectRequest] = {}
    while waiting or in_flight:
        while waiting and len(in_flight) < max_in_flight:
            _submit(engine, waiting.pop(), in_flight)
        for output in engine.step():
            row = _row_if_ended(engine, output, in_flight)
            if row is not None:
                yield row


def _submit(engine: Any, request: CollectRequest, in_flight: dict[str, CollectRequest]) -> None:
    from vllm import SamplingParams

    # No seed of its own: vLLM 0.32 cannot rewind a CPU generator, so a seeded request that is
    # prefilled in chunks ends the engine. The engine's seed is the only one.
    params = SamplingParams(
        temperature=request.temperature,
        top_p=0.95 if request.temperature > 0 else 1.0,
        max_tokens=request.max_tokens,
        detokenize=False,
    )
    prompt = {"prompt_token_ids": list(request.prompt_token_ids)}
    engine.add_request(request.request_id, prompt, params)
    in_flight[request.request_id] = request


def _row_if_ended(
    engine: Any, output: Any, in_flight: dict[str, CollectRequest]
) -> CollectedRow | None:
    request = in_flight.get(output.request_id)
    if request is None:  # the last step of a response that was aborted for looping
        return None
    tokens = tuple(output.outputs[0].token_ids)
    if not output.finished and len(tokens) % LOOP_CHECK_EVERY:
        return None
    loop = loop_start(tokens)
    if loop is None and not output.finished:
        return None
    del in_flight[output.request_id]
    if not output.finished:
        engine.abort_request([output.request_id])
    reason = "loop" if loop is not None else str(output.outputs[0].finish_reason)
    return CollectedRow(request=request, output_token_ids=tokens[:loop], finish_reason=reason)


def done_request_ids(out: Path) -> set[str]:
    """Requests that earlier runs have already written.

    Raises:
        UserError: a shard of theirs is broken.
    """
    done: set[str] = set()
    for shard in sorted(out.glob("part-*.parquet")):
        with opened_parquet(shard, what="responses") as file:
            done.update(file.read(columns=["request_id"])["request_id"].to_pylist())
    return done


def write_shard(out: Path, rows: Sequence[CollectedRow]) -> Path:
    """Write rows as the next shard; it appears whole or not at all.

    Raises:
        UserError: the place cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([_record(row) for row in rows], schema=_schema())
    path = out / f"part-{len(list(out.glob('part-*.parquet'))):05d}.parquet"
    with atomic_path(path) as draft:
        pq.write_table(table, draft)
    return path


def _record(row: CollectedRow) -> dict[str, object]:
    request = row.request
    return {
        "request_id": request.request_id,
        "prompt_id": request.prompt_id,
        "family": request.family,
        "workload": request.workload,
        "temperature": request.temperature,
        "split": request.split,
        "finish_reason": row.finish_reason,
        "prompt_token_ids": list(request.prompt_token_ids),
        "output_token_ids": list(row.output_token_ids),
    }


def _schema() -> Any:
    import pyarrow as pa

    return pa.schema(
        [
            ("request_id", pa.string()),
            ("prompt_id", pa.string()),
            ("family", pa.string()),
            ("workload", pa.string()),
            ("temperature", pa.float32()),
            ("split", pa.string()),
            ("finish_reason", pa.string()),
            ("prompt_token_ids", pa.list_(pa.int32())),
            ("output_token_ids", pa.list_(pa.int32())),
        ]
    )


def _ignore(_num_rows: int, _num_tokens: int) -> None:
    pass


def collect(
    requests: Sequence[CollectRequest],
    *,
    model: Path,
    out: Path,
    max_in_flight: int = 128,
    max_model_len: int = 4096,
    rows_per_shard: int = 128,
    seed: int = 0,
    on_rows: Callable[[int, int], None] = _ignore,
) -> None:
    """Sample every request that `out` does not hold yet.

    `seed` is the engine's; with another the same requests get other samples.
    `on_rows(num_rows, num_tokens)` is called with each shard's size once it is on disk.
    """
    ensure_dir(out)
    done = done_request_ids(out)
    todo = [request for request in requests if request.request_id not in done]
    if not todo:
        return
    engine = start_engine(model, max_num_seqs=max_in_flight, max_model_len=max_model_len, seed=seed)
    pending: list[CollectedRow] = []
    for row in generate(engine, todo, max_in_flight=max_in_flight):
        pending.append(row)
        if len(pending) == rows_per_shard:
            _flush(out, pending, on_rows)
    if pending:
        _flush(out, pending, on_rows)


def _flush(out: Path, pending: list[CollectedRow], on_rows: Callable[[int, int], None]) -> None:
    write_shard(out, pending)
    on_rows(len(pending), sum(len(row.output_token_ids) for row in pending))
    pending.clear()
