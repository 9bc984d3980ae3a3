"""One walk over the traffic: every position looked up once, described, and remembered.

Reading the prompts and asking the cache is most of the work; everything that follows replays what
was found here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from hvd_ray.advise.material import Roles
from hvd_ray.config import SuffixConfig
from hvd_ray.drafting.base import Drafter
from hvd_ray.drafting.suffix import SuffixDrafter
from hvd_ray.payoff.dataset import TEST
from hvd_ray.traces.label import FeatureWriter, TraceLabels, label_trace, labels_to_table
from hvd_ray.traces.schema import Trace
from hvd_ray.tuning.recorded import DraftRecord, remember
from hvd_ray.types import Draft, Request, Source

Told = Callable[[Trace], None]


@dataclass(frozen=True, slots=True)
class JudgedTrace:
    """A trace that systems are judged on, with its look-ups."""

    trace: Trace
    record: DraftRecord


@dataclass(frozen=True, slots=True)
class Walked:
    """What the walk found."""

    judged: tuple[JudgedTrace, ...]
    """In time order."""
    labels: Any
    """A pyarrow.Table of `labels_schema`: the learning traces as `train`, the judged as `test`."""


def walk(
    traces: Iterable[Trace],
    roles: Roles,
    *,
    suffix: SuffixConfig,
    extractor: FeatureWriter,
    on_trace: Told,
) -> Walked:
    """Go through the traffic in time order with one cache, as one replica would have seen it."""
    drafter = _Recording(SuffixDrafter(suffix))
    judged: list[JudgedTrace] = []
    labels: list[TraceLabels] = []
    for trace in traces:
        role = roles.of(trace)
        if role:
            labels.append(
                label_trace(replace(trace, split=role), drafter=drafter, extractor=extractor)
            )
            record = DraftRecord.of(drafter.taken())
            if role == TEST:
                judged.append(JudgedTrace(trace, record))
        else:
            remember(trace, drafter)
        on_trace(trace)
    return Walked(tuple(judged), labels_to_table(labels))


@dataclass(slots=True)
class _Recording:
    """A drafter that keeps what it proposed."""

    inner: Drafter
    _drafts: list[Draft] = field(default_factory=list)

    @property
    def source(self) -> Source:
        return self.inner.source

    def start(self, request: Request) -> None:
        self.inner.start(request)

    def observe(self, request_id: str, token_ids: tuple[int, ...], hidden: object | None) -> None:
        self.inner.observe(request_id, token_ids, hidden)

    def propose(self, request_id: str, limit: int) -> Draft:
        self._drafts.append(self.inner.propose(request_id, limit))
        return self._drafts[-1]

    def stop(self, request_id: str) -> None:
        self.inner.stop(request_id)

    def taken(self) -> list[Draft]:
        """The proposals since this was last called."""
        drafts, self._drafts = self._drafts, []
        return drafts
