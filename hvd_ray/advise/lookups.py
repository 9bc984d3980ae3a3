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
from hvd_ray.drafting.suffix import RuleDrafter, SuffixDrafter
from hvd_ray.payoff.dataset import TEST
from hvd_ray.payoff.policy import Policy, is_rule
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
    """Drafts for a predictor to cut."""
    rule_record: DraftRecord
    """Drafts as rules take them."""

    def record_for(self, policy: Policy | None) -> DraftRecord:
        """What a policy (None: the oracle) was proposed."""
        return self.rule_record if is_rule(policy) else self.record


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
            record, rule_record = map(DraftRecord.of, drafter.taken())
            if role == TEST:
                judged.append(JudgedTrace(trace, record, rule_record))
        else:
            remember(trace, drafter)
        on_trace(trace)
    return Walked(tuple(judged), labels_to_table(labels))


@dataclass(slots=True)
class _Recording:
    """A drafter that keeps what it proposed."""

    inner: SuffixDrafter
    _drafts: list[Draft] = field(default_factory=list)
    _rule_drafts: list[Draft] = field(default_factory=list)
    _rules: RuleDrafter = field(init=False)

    def __post_init__(self) -> None:
        self._rules = RuleDrafter(self.inner)

    @property
    def source(self) -> Source:
        return self.inner.source

    def start(self, request: Request) -> None:
        self.inner.start(request)

    def observe(self, request_id: str, token_ids: tuple[int, ...], hidden: object | None) -> None:
        self.inner.observe(request_id, token_ids, hidden)

    def propose(self, request_id: str, limit: int) -> Draft:
        self._rule_drafts.append(self._rules.propose(request_id, limit))
        self._drafts.append(self.inner.propose(request_id, limit))
        return self._drafts[-1]

    def stop(self, request_id: str) -> None:
        self.inner.stop(request_id)

    def taken(self) -> tuple[list[Draft], list[Draft]]:
        """The proposals since this was last called: for a predictor, and for the rules."""
        taken = self._drafts, self._rule_drafts
        self._drafts, self._rule_drafts = [], []
        return taken
