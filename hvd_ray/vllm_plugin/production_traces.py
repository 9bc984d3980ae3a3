"""Sampled traces of what the engine served, for the next training round; off by default.

Token ids only, no text: stop strings and salts do not leave the process, a scope is written as a
digest. Files appear whole, the oldest go once the folder holds more than it may, and writing
happens in a thread of its own, so that a slow disk costs traces, never steps. A file is written
when it is full, when its oldest trace has waited for a minute, and at the engine's end.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic

from hvd_ray.errors import UserError
from hvd_ray.home import ensure_dir, writes_into
from hvd_ray.traces.schema import Trace, trace_id_of
from hvd_ray.traces.store import finished_parts, write_steps, write_traces
from hvd_ray.types import FinishReason, SamplingParams, Step
from hvd_ray.vllm_plugin.options import TraceOptions
from hvd_ray.vllm_plugin.requests import Tracked

_log = logging.getLogger(__name__)
_MAX_STEPS = 100_000
"""Steps kept of requests that are still running; one more request is not sampled beyond."""
_MAX_WAITING_PARTS = 4
"""Finished traces that wait for the disk, in files' worth; more are dropped."""
_MAX_WAIT_S = 60.0
"""No finished trace waits longer for its file to fill."""
_END_S = 3.0
"""What the writer gets at the engine's end, which vLLM makes a hard one after five seconds."""


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
class Finished:
    """A sampled request that has ended."""

    trace: Trace
    steps: tuple[Step, ...]
    ended_at: float
    """On the monotonic clock, in seconds."""


@dataclass(slots=True)
class TraceSampler:
    """Collects the steps of sampled requests; a thread writes those that have ended."""

    options: TraceOptions
    origin: Origin
    on_written: Callable[[], None] = lambda: None
    """Called in the writer's thread after each file, when the numbers below are true."""
    max_wait_s: float = _MAX_WAIT_S
    num_dropped: int = field(default=0, init=False)
    """Traces that were lost: the disk was too slow or full, or a parameter has no column."""
    num_kept: int = field(default=0, init=False)
    """Traces that were written."""
    _running: dict[str, list[Step]] = field(default_factory=dict, init=False)
    _num_steps: int = field(default=0, init=False)
    _waiting: list[Finished] = field(default_factory=list, init=False)
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    """Held for what both threads change: `_waiting`, the numbers and the end."""
    _is_closing: bool = field(default=False, init=False)
    _num_parts: int = field(default=0, init=False)
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
            self._count(dropped=1)
            return
        trace = _trace_of(tracked, sampling, self.origin)
        with self._changed:
            if len(self._waiting) >= _MAX_WAITING_PARTS * self.options.rows_per_part:
                self.num_dropped += 1
                return
            self._waiting.append(Finished(trace, tuple(steps), monotonic()))
            self._changed.notify()
        self._start_writer()

    def close(self) -> None:
        """Write what is left and end the writer; no request may end after it."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_END_S)
            with self._changed:  # what a slow disk has not taken by now
                self.num_dropped += len(self._waiting)
                self._waiting.clear()

    def _is_sampled(self, key: str) -> bool:
        digest = hashlib.sha256(f"{self.origin.instance_id} {key}".encode()).digest()
        return int.from_bytes(digest[:8]) < self.options.share * 2**64

    def _start_writer(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="hvd-traces", daemon=True)
            self._thread.start()

    def _count(self, *, kept: int = 0, dropped: int = 0) -> None:
        with self._changed:
            self.num_kept += kept
            self.num_dropped += dropped

    def _write_all(self) -> None:
        while part := self._next_part():
            self._write(part)
            self.on_written()

    def _next_part(self) -> list[Finished]:
        """One file's worth, as soon as it is due; nothing at the end."""
        with self._changed:
            while (wait_s := self._seconds_left()) > 0:
                self._changed.wait(min(wait_s, threading.TIMEOUT_MAX))
            part = self._waiting[: self.options.rows_per_part]
            del self._waiting[: len(part)]
            return part

    def _seconds_left(self) -> float:
        """Until the next file is due."""
        if self._is_closing or len(self._waiting) >= self.options.rows_per_part:
            return 0.0
        if not self._waiting:
            return float("inf")
        return self._waiting[0].ended_at + self.max_wait_s - monotonic()

    def _write(self, part: Sequence[Finished]) -> None:
        folder = Path(self.options.folder)
        name = f"part-{self.origin.instance_id}-{self._num_parts:06d}.parquet"
        try:
            write_part(folder, part, name=name)
        except (UserError, OSError) as error:
            self._count(dropped=len(part))
            _log.warning("hvd: traces are lost: %s", error)
            return
        self._num_parts += 1
        self._count(kept=len(part))
        try:
            trim_folder(folder, self.options.max_mib * 2**20)
        except OSError as error:
            _log.warning("hvd: old traces cannot be removed: %s", error)


def check_folder(folder: Path) -> None:
    """Make the folder, and a file in it that goes at once.

    Raises:
        UserError: traces cannot be written there.
    """
    with writes_into(folder), tempfile.TemporaryFile(dir=ensure_dir(folder)):
        pass


def write_part(folder: Path, part: Sequence[Finished], *, name: str) -> None:
    """Write the two files of a part.

    Raises:
        UserError: the folder cannot be written.
    """
    steps = ((one.trace.trace_id, step) for one in part for step in one.steps)
    write_steps(steps, folder / "steps" / name)
    write_traces((one.trace for one in part), folder / "traces" / name)


def trim_folder(folder: Path, max_bytes: int) -> None:
    """Remove the oldest parts, traces and steps together, until the rest is small enough."""
    tables = (folder / "traces", folder / "steps")
    sizes: dict[Path, int] = {}
    written: dict[str, float] = {}
    for path in (path for table in tables for path in finished_parts(table)):
        with suppress(FileNotFoundError):  # another engine trims the folder too
            stat = path.stat()
            sizes[path] = stat.st_size
            written[path.name] = min(stat.st_mtime, written.get(path.name, stat.st_mtime))
    total = sum(sizes.values())
    for name in sorted(written, key=lambda name: (written[name], name)):
        if total <= max_bytes:
            return
        for table in tables:
            (table / name).unlink(missing_ok=True)
            total -= sizes.get(table / name, 0)


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
