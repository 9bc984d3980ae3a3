"""One engine's drafting, step by step: what was sampled comes in, drafts go out."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

from hvd_ray.types import Draft, Source, Step
from hvd_ray.vllm_plugin import compat, compat_runner
from hvd_ray.vllm_plugin.metrics import Counters, CountFile, count_file
from hvd_ray.vllm_plugin.parts import Hybrid, open_hybrid
from hvd_ray.vllm_plugin.production_traces import TraceSampler
from hvd_ray.vllm_plugin.request_counts import COUNTS
from hvd_ray.vllm_plugin.requests import RequestTable, Row, Tracked
from hvd_ray.vllm_plugin.router import Choice


@dataclass(slots=True, weakref_slot=True)
class HybridSession:
    """What stands between the runner and the router, from the worker's start to its end."""

    runner: Any
    hybrid: Hybrid
    file: CountFile
    traces: TraceSampler | None = None
    counters: Counters = field(default_factory=Counters)
    on_step: Callable[[Tracked, Step], None] = lambda _tracked, _step: None
    """Told of each cycle of each request."""
    _pass_started: float = field(default=0.0, init=False)
    _pass_rows: int = field(default=0, init=False)
    _is_closed: bool = field(default=False, init=False)

    @classmethod
    def open(cls, runner: Any) -> HybridSession:
        """The session of a runner that has just been made; says what runs.

        Raises:
            UserError: predictor or cost table cannot be found or do not fit.
        """
        options = compat.options_of(runner.vllm_config)
        target = compat.target_of(runner.vllm_config)
        hybrid = open_hybrid(
            options, target, profile_of=lambda state: compat_runner.profile_of(target.model, state)
        )
        file = CountFile(count_file(runner.vllm_config.instance_id))
        traces = None
        if options.traces is not None:
            traces = TraceSampler(options.traces, compat.origin_of(runner.vllm_config, options))
        session = cls(runner, hybrid, file, traces)
        session._listen(hybrid.router.table)
        file.remove_stale()
        # For engines in their caller's process, which may go without being shut down or even
        # collected: the model must not stay for our sake.
        atexit.register(_end, weakref.ref(session), file)
        compat_runner.lift_length_limit(runner)
        compat_runner.time_steps(runner, session.start_pass)
        hybrid.facts["draft_tokens"] = f"at most {runner.num_spec_tokens}"
        compat.log_line(hybrid.start_line)
        return session

    def close(self) -> None:
        """The engine ends, whatever still runs: write the traces, take the counts away."""
        if self._is_closed:
            return
        self._is_closed = True
        self.hybrid.router.table.forget_absent({})
        if self.traces is not None:
            self.traces.close()
            kept, dropped = self.traces.num_kept, self.traces.num_dropped
            compat.log_line(f"hvd: {kept} traces written since the start, {dropped} dropped")
        self.file.remove()

    def start_pass(self, num_rows: int) -> None:
        """The target starts on a step of so many rows."""
        self._pass_started = perf_counter()
        self._pass_rows = num_rows

    def choose(
        self, sampled_token_ids: Sequence[Sequence[int]], max_draft_tokens: int
    ) -> list[Choice | None]:
        """A choice for each request of the step; None for those in prefill."""
        pass_ms = (perf_counter() - self._pass_started) * 1e3
        rows = compat_runner.rows_of(self.runner, sampled_token_ids)
        self._learn(rows, pass_ms)
        router = self.hybrid.router
        router.table.pass_us = pass_ms * 1e3
        router.table.forget_absent(self.runner.requests)
        router.table.observe(rows)
        choices = router.choose(rows, max_draft_tokens=max_draft_tokens)
        self.counters.add("hvd_lookup_seconds_total", router.lookup_us / 1e6)
        self.counters.add("hvd_decision_seconds_total", router.decide_us / 1e6)
        return choices

    def observe_head(self, num_tokens: int, num_rows: int, ms: float, *, is_typical: bool) -> None:
        """The head took so long for a chain of so many tokens (0: it only read its rows).

        Reading a prompt is not typical: it is paid once, and is no part of what a draft costs.
        """
        self.counters.add("hvd_head_seconds_total", ms / 1e3)
        num_passes = max(1, num_tokens)
        if self.hybrid.learnt is None:
            return
        if is_typical:
            self.hybrid.learnt.head.observe(num_passes, ms)
        else:
            self.hybrid.learnt.observe_reading(num_rows, num_passes, ms)

    def give(self, choices: Sequence[Choice | None], drafts: Sequence[Draft]) -> list[list[int]]:
        """Note what each request is given, in vLLM's form."""
        for choice, draft in zip(choices, drafts, strict=True):
            if choice is not None:
                self.hybrid.router.note(choice, draft)
        self._update_gauges()
        self.file.write(self.counters)
        return [list(draft.token_ids) for draft in drafts]

    def counts(self) -> dict[str, float]:
        """The counters by name and label's value, e.g. `hvd_steps_total suffix`."""
        return {
            f"{name} {value}".strip(): number
            for (name, _, value), number in self.counters.values.items()
        }

    def _listen(self, table: RequestTable) -> None:
        table.on_step = self._on_step
        table.on_outcome = self.counters.count_outcome
        table.on_end = self._on_end
        if self.traces is not None:
            self.traces.on_written = partial(_show, self.traces, self.counters, self.file)

    def _on_step(self, tracked: Tracked, step: Step, skipped: str) -> None:
        self.counters.count_step(step, skipped=skipped)
        COUNTS.note(tracked.request_id, step)
        self.on_step(tracked, step)
        if step.source == Source.EAGLE3:
            self.hybrid.acceptance.observe(step.drafted, step.accepted)
        if self.traces is not None:
            self.traces.observe(tracked, step)

    def _on_end(self, tracked: Tracked) -> None:
        COUNTS.take(tracked.request_id)  # nobody has asked for them: it was aborted
        if self.traces is not None:
            self.traces.end(tracked, compat_runner.sampling_of(tracked.handle))
            _put_traces(self.traces, self.counters)

    def _update_gauges(self) -> None:
        cache = self.hybrid.router.table.cache
        self.counters.put("hvd_cache_tokens", cache.num_cached_tokens)
        self.counters.put("hvd_cache_scopes", cache.num_scopes)
        self.counters.put("hvd_cache_evictions_total", cache.num_evictions)
        self.counters.put("hvd_lookups_left_out_total", self.hybrid.router.num_unlooked)
        self.counters.put("hvd_requests", len(self.hybrid.router.table))

    def _learn(self, rows: Sequence[Row], pass_ms: float) -> None:
        """Take in what a pass of decoding requests cost; prefill is not ours to judge."""
        verified = sum(1 + row.num_drafted for row in rows)
        if self.hybrid.learnt is not None and verified == self._pass_rows:
            self.hybrid.learnt.target.observe(verified, pass_ms)


def _put_traces(traces: TraceSampler, counters: Counters) -> None:
    counters.put("hvd_traces", traces.num_kept)
    counters.put("hvd_traces_dropped", traces.num_dropped)


def _show(traces: TraceSampler, counters: Counters, file: CountFile) -> None:
    """A file of traces was written, maybe long after the last step."""
    _put_traces(traces, counters)
    file.write(counters, now=True)


def _end(session: weakref.ref[HybridSession], file: CountFile) -> None:
    if (alive := session()) is not None:
        alive.close()
    file.remove()
