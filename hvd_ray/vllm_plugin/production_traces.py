"""Sampled traces of what the engine served, for the next training round; off by default.

Token ids only, no text: stop strings and salts do not leave the process, a scope is written as a
digest. Files appear whole, the oldest go once the folder holds more than it may, and writing
happens in a thread of its own, so that a slow disk costs traces, never steps.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from hvd_ray.errors import UserError
from hvd_ray.traces.schema import Trace, trace_id_of
from hvd_ray.traces.store import finished_parts, write_steps, write_traces
from hvd_ray.types import FinishReason, SamplingParams, Step
from hvd_ray.vllm_plugin.options import TraceOptions
from hvd_ray.vllm_plugin.requests import Tracked

_log = logging.getLogger(__name__)
_MAX_STEPS = 100_000
"""Steps kept of requests that are still running; one more request is not sampled beyond."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What all traces of an engine share."""

    instance_id: str
    model: str
    tokenizer_sha: str
    policy: str
    engine: str
    context_length: int


@dataclass(frozen=True, slots=True)
class Part:
    """One file's worth."""

    number: int
    traces: tuple[Trace, ...]
    steps: tuple[tuple[str, Step], ...]


@dataclass(slots=True)
class TraceSampler:
    """Collects the steps of sampled requests and hands finished ones to the writer."""

    options: TraceOptions
    origin: Origin
    num_dropped: int = field(default=0, init=False)
    """Finished traces that were lost: the disk was too slow, or a parameter has no column."""
    num_kept: int = field(default=0, init=False)
    _running: dict[str, list[Step]] = field(default_factory=dict, init=False)
    _num_steps: int = field(default=0, init=False)
    _traces: list[Trace] = field(default_factory=list, init=False)
    _steps: list[tuple[str, Step]] = field(default_factory=list, init=False)
    _num_parts: int = field(default=0, init=False)
    _queue: queue.Queue[Part | None] = field(default_factory=lambda: queue.Queue(4), init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def observe(self, tracked: Tracked, step: Step) -> None:
        """Keep the step where its request is sampled."""
        steps = self._running.get(tracked.key)
        if steps is None:
            if step.cycle or not self._is_sampled(tracked.key) or self._num_steps >= _MAX_STEPS:
                return
            steps = self._running[tracked.key] = []
        steps.append(step)
        self._num_steps += 1

    def end(self, tracked: Tracked, sampling: SamplingParams | None) -> None:
        """The request is over; `sampling` is None where ours has no name for its parameters."""
        steps = self._running.pop(tracked.key, None)
        if steps is None:
            return
        self._num_steps -= len(steps)
        if sampling is None or not tracked.profile.is_readable:
            self.num_dropped += 1
            return
        trace = _trace_of(tracked, sampling, self.origin)
        self._traces.append(trace)
        self._steps += [(trace.trace_id, step) for step in steps]
        if len(self._traces) >= self.options.rows_per_part:
            self.flush()

    def flush(self) -> None:
        """Hand what is finished to the writer, or drop it where the writer lags behind."""
        if not self._traces:
            return
        part = Part(self._num_parts, tuple(self._traces), tuple(self._steps))
        self._traces.clear()
        self._steps.clear()
        self._start_writer()
        try:
            self._queue.put_nowait(part)
        except queue.Full:
            self.num_dropped += len(part.traces)
            return
        self._num_parts += 1
        self.num_kept += len(part.traces)

    def close(self) -> None:
        """Write what is left and end the writer."""
        self.flush()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _is_sampled(self, key: str) -> bool:
        digest = hashlib.sha256(f"{self.origin.instance_id} {key}".encode()).digest()
        return int.from_bytes(digest[:8]) < self.options.share * 2**64

    def _start_writer(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="hvd-traces", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def _write_all(self) -> None:
        while (part := self._queue.get()) is not None:
            try:
                write_part(Path(self.options.folder), part, name=self.origin.instance_id)
                trim_folder(Path(self.options.folder), self.options.max_mib * 2**20)
            except UserError as error:
                self.num_dropped += len(part.traces)
                _log.warning("hvd: traces are lost: %s", error)


def write_part(folder: Path, part: Part, *, name: str) -> None:
    """Write the two files of a part.

    Raises:
        UserError: the folder cannot be written.
    """
    file = f"part-{name}-{part.number:06d}.parquet"
    write_steps(part.steps, folder / "steps" / file)
    write_traces(part.traces, folder / "traces" / file)


def trim_folder(folder: Path, max_bytes: int) -> None:
    """Remove the oldest parts, traces and steps together, until the rest is small enough."""
    tables = (folder / "traces", folder / "steps")
    sizes = {path: path.stat() for table in tables for path in finished_parts(table)}
    total = sum(stat.st_size for stat in sizes.values())
    oldest_first = sorted({p.name for p in sizes}, key=lambda name: _age(name, sizes))
    for name in oldest_first:
        if total <= max_bytes:
            return
        for table in tables:
            if (stat := sizes.get(table / name)) is not None:
                (table / name).unlink(missing_ok=True)
                total -= stat.st_size


def _age(name: str, sizes: dict[Path, os.stat_result]) -> tuple[float, str]:
    return min(stat.st_mtime for path, stat in sizes.items() if path.name == name), name


def _trace_of(tracked: Tracked, sampling: SamplingParams, origin: Origin) -> Trace:
    context = tracked.context
    trace_id = trace_id_of(origin.instance_id, tracked.key)
    tokens: Sequence[int] = context.token_ids.view().tolist()
    return Trace(
        trace_id=trace_id,
        prompt_id=trace_id,
        workload="production",
        family="production",
        scope=hashlib.sha256(tracked.profile.scope.encode()).hexdigest()[:16],
        session_id=trace_id,
        created_at=datetime.now(UTC),
        model=origin.model,
        tokenizer_sha=origin.tokenizer_sha,
        prompt_token_ids=tuple(tokens[: context.prompt_len]),
        output_token_ids=tuple(tokens[context.prompt_len :]),
        finish_reason=_finish_reason(tracked),
        sampling=sampling,
        context_length=origin.context_length,
        policy=origin.policy,
        engine=origin.engine,
    )


def _finish_reason(tracked: Tracked) -> FinishReason:
    """As far as the worker can tell: a stop string ends a request by an abort from outside."""
    context = tracked.context
    last = int(context.token_ids.tail(1)[0])
    if last in tracked.profile.stop_token_ids:
        return "stop"
    return "length" if context.num_generated >= context.max_tokens else "abort"
