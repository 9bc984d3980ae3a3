"""All that the vLLM plugin does of its own in a step, without an engine: for `bench.micro`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvd_ray.config import Config
from hvd_ray.drafting.suffix import SuffixDrafter
from hvd_ray.payoff.joint_policy import BatchSurvivalEstimator, JointCostPolicy
from hvd_ray.traces.schema import Trace
from hvd_ray.types import MAX_COUNT, Int32Array
from hvd_ray.vllm_plugin.requests import Profile, RequestTable, Row
from hvd_ray.vllm_plugin.router import Limits, Router
from hvd_ray.vllm_plugin.step_costs import LearntCosts


@dataclass(slots=True)
class _Running:
    """A trace that is told token by token."""

    name: str
    token_ids: Int32Array
    prompt_len: int
    num_told: int

    def next_row(self) -> Row:
        self.num_told += 1
        return Row(self.name, self, self.token_ids[: self.num_told], self.prompt_len, 1)


class PluginSteps:
    """Traces as a batch of vLLM's would tell them, a token a step; one that ends makes room."""

    def __init__(
        self,
        traces: Sequence[Trace],
        config: Config,
        batch_size: int,
        estimator: BatchSurvivalEstimator,
    ) -> None:
        table = RequestTable(SuffixDrafter(config.drafting.suffix), lambda _: Profile("micro"))
        policy = JointCostPolicy(estimator, LearntCosts())
        self._router = Router(table, policy, Limits(MAX_COUNT, eagle3_tokens=4, lookup_ms=1e6))
        self._traces = traces
        self._batch_size = batch_size
        self._num_started = 0
        self._running: list[_Running] = []

    def next_rows(self) -> list[Row]:
        """What the next step brings."""
        self._running = [one for one in self._running if one.num_told < len(one.token_ids)]
        while len(self._running) < self._batch_size:
            self._running.append(self._start())
        return [one.next_row() for one in self._running]

    def step(self, rows: Sequence[Row]) -> None:
        """What `HybridSession.choose` does, counts and costs aside."""
        table = self._router.table
        table.forget_absent({row.request_id: row.handle for row in rows})
        table.observe(rows)
        self._router.choose(rows, max_draft_tokens=32)

    def _start(self) -> _Running:
        trace = self._traces[self._num_started % len(self._traces)]
        self._num_started += 1
        ids = np.array(trace.prompt_token_ids + trace.output_token_ids, dtype=np.int32)
        prompt_len = len(trace.prompt_token_ids)
        return _Running(str(self._num_started), ids, prompt_len, prompt_len)
