"""Look-ups made once and replayed under many policies.

The cache's draft at a position depends on the prefix and on what the cache held then, not on how
decoding got there. So a sweep looks every position up once; each trial then replays without
suffix trees, several times faster, and visits the very same drafts.
Shapes: T output positions of a trace, N tokens of all its drafts, E figures of evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvd_ray.drafting.base import Drafter
from hvd_ray.drafting.evidence import NO_EVIDENCE
from hvd_ray.drafting.suffix import RuleDrafter, SuffixDrafter
from hvd_ray.home import atomic_path
from hvd_ray.payoff.cost import CostTable
from hvd_ray.payoff.policy import Policy, is_rule
from hvd_ray.traces.replay import ModelDrafts, Replay, replay
from hvd_ray.traces.schema import Trace
from hvd_ray.traces.store import read_traces, write_traces
from hvd_ray.traces.walk import walking
from hvd_ray.types import NO_DRAFT, Draft, Float32Array, Int32Array, Request, Source


@dataclass(frozen=True, slots=True, eq=False)
class DraftRecord:
    """The cache's draft at every output position of one trace, within the room it had there."""

    lengths_T: Int32Array
    token_ids_N: Int32Array
    probs_N: NDArray[np.float64]
    scores_T: NDArray[np.float64]
    match_lens_T: Int32Array
    are_local_T: NDArray[np.bool_]
    evidence_TE: Float32Array
    """Figures of `drafting.evidence`, zeros where there is no draft."""
    starts_T: NDArray[np.int64] = field(init=False)
    """Where each position's draft begins in the arrays over N."""

    def __post_init__(self) -> None:
        ends_T = np.cumsum(self.lengths_T, dtype=np.int64)
        object.__setattr__(self, "starts_T", ends_T - self.lengths_T)

    def at(self, position: int) -> Draft:
        length = int(self.lengths_T[position])
        if length == 0:
            return NO_DRAFT
        start = int(self.starts_T[position])
        return Draft(
            Source.SUFFIX,
            tuple(self.token_ids_N[start : start + length].tolist()),
            tuple(self.probs_N[start : start + length].tolist()),
            float(self.scores_T[position]),
            int(self.match_lens_T[position]),
            bool(self.are_local_T[position]),
            evidence_E=self.evidence_TE[position],
        )

    @classmethod
    def of(cls, drafts_T: Sequence[Draft]) -> DraftRecord:
        return cls(
            np.array([len(draft) for draft in drafts_T], np.int32),
            np.array([token for draft in drafts_T for token in draft.token_ids], np.int32),
            np.array([prob for draft in drafts_T for prob in draft.probs], np.float64),
            np.array([draft.score for draft in drafts_T], np.float64),
            np.array([draft.match_len for draft in drafts_T], np.int32),
            np.array([draft.is_local for draft in drafts_T], np.bool_),
            np.stack([_evidence(draft) for draft in drafts_T]),
        )


@dataclass(slots=True)
class RecordedDrafter:
    """A `Drafter` for one trace that proposes what was looked up then."""

    record: DraftRecord
    source: Source = field(default=Source.SUFFIX, init=False)
    _position: int = field(default=0, init=False)

    def start(self, request: Request) -> None:  # noqa: ARG002
        self._position = 0

    def observe(
        self,
        request_id: str,  # noqa: ARG002
        token_ids: tuple[int, ...],
        hidden: object | None = None,  # noqa: ARG002
    ) -> None:
        self._position += len(token_ids)

    def propose(self, request_id: str, limit: int) -> Draft:  # noqa: ARG002
        draft = self.record.at(self._position)
        assert len(draft) <= limit, "looked up with more room than replay has"
        return draft

    def stop(self, request_id: str) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class ReplaySet:
    """Traces with their look-ups: what a policy is judged on."""

    traces: tuple[Trace, ...]
    records: tuple[DraftRecord, ...]
    """Drafts for a predictor to cut."""
    rule_records: tuple[DraftRecord, ...]
    """Drafts as rules take them."""
    models: tuple[ModelDrafts | None, ...]
    """What a model drafter would have drafted, where the labels say so."""

    @property
    def num_tokens(self) -> int:
        return sum(len(trace.output_token_ids) for trace in self.traces)

    def part(self, places: slice) -> ReplaySet:
        """Some of the traces, with what belongs to them."""
        columns = (self.traces, self.records, self.rule_records, self.models)
        return ReplaySet(*(column[places] for column in columns))  # type: ignore[arg-type]

    def replays(self, policy: Policy, costs: CostTable) -> list[Replay]:
        """Decode every trace under the policy, in the order of `traces`."""
        records = self.rule_records if is_rule(policy) else self.records
        return [
            replay(trace, policy, drafter=RecordedDrafter(record), costs=costs, model=model)
            for trace, record, model in zip(self.traces, records, self.models, strict=True)
        ]

    def save(self, folder: Path) -> None:
        """Write `traces.parquet`, then `lookups.npz`, which thus stands for both."""
        write_traces(self.traces, folder / "traces.parquet")
        arrays: dict[str, Any] = _columns(self.records) | _columns(self.rule_records, prefix=_RULES)
        models = [_model_column(m, t) for m, t in zip(self.models, self.traces, strict=True)]
        with atomic_path(folder / "lookups.npz") as draft, draft.open("wb") as handle:
            bounds = np.array([_model_bounds(model) for model in self.models], np.int32)
            np.savez(handle, model_accepted=np.concatenate(models), model_bounds=bounds, **arrays)

    @classmethod
    def load(cls, folder: Path) -> ReplaySet:
        traces = tuple(read_traces(folder / "traces.parquet"))
        ends = np.cumsum([len(trace.output_token_ids) for trace in traces])[:-1]
        with np.load(folder / "lookups.npz", allow_pickle=False) as arrays:
            records, rule_records = _records(arrays, ends), _records(arrays, ends, prefix=_RULES)
            accepted = np.split(arrays["model_accepted"], ends)
            models = tuple(map(_model_drafts, accepted, arrays["model_bounds"].tolist()))
        return cls(traces, records, rule_records, models)


_FIELDS = {
    "lengths": "lengths_T",
    "token_ids": "token_ids_N",
    "probs": "probs_N",
    "scores": "scores_T",
    "match_lens": "match_lens_T",
    "are_local": "are_local_T",
    "evidence": "evidence_TE",
}
_RULES = "rule_"
_NO_MODEL = -1


def _columns(records: Sequence[DraftRecord], prefix: str = "") -> dict[str, NDArray[Any]]:
    return {
        prefix + name: np.concatenate([getattr(record, field) for record in records])
        for name, field in _FIELDS.items()
    }


def _records(
    arrays: Mapping[str, NDArray[Any]], ends: NDArray[np.int64], prefix: str = ""
) -> tuple[DraftRecord, ...]:
    columns = {name: arrays[prefix + name] for name in _FIELDS}
    token_ends = np.cumsum([part.sum() for part in np.split(columns["lengths"], ends)])[:-1]
    cuts = {name: token_ends if name in ("token_ids", "probs") else ends for name in _FIELDS}
    parts = [np.split(columns[name], cuts[name]) for name in _FIELDS]
    return tuple(DraftRecord(*row) for row in zip(*parts, strict=True))


class LookedUp(NamedTuple):
    """A trace with its drafts, for a predictor and for rules."""

    trace: Trace
    record: DraftRecord
    rule_record: DraftRecord


def look_up(
    shard: Iterable[Trace],
    is_judged: Callable[[Trace], bool],
    *,
    drafter: SuffixDrafter,
    on_trace: Callable[[Trace], None] = lambda _trace: None,
) -> list[LookedUp]:
    """Record the judged traces of a shard; the others only fill the cache.

    Args:
        shard: the traces that share a cache, in time order.
        is_judged: which of them policies will be judged on.
        drafter: the cache, empty.
        on_trace: hears of every trace that is done.
    """
    found = []
    for trace in shard:
        if is_judged(trace):
            found.append(_looked_up(trace, drafter))
        else:
            remember(trace, drafter)
        on_trace(trace)
    return found


def _looked_up(trace: Trace, drafter: SuffixDrafter) -> LookedUp:
    drafts, rule_drafts, rules = [], [], RuleDrafter(drafter)
    with walking(trace, drafter) as walk:
        for token in trace.output_token_ids:
            drafts.append(walk.look_up())
            rule_drafts.append(rules.propose(trace.trace_id, walk.context.room))
            walk.commit((token,))
    return LookedUp(trace, DraftRecord.of(drafts), DraftRecord.of(rule_drafts))


def remember(trace: Trace, drafter: Drafter) -> None:
    """Put the output into the cache; the prompt would only have served the trace itself."""
    drafter.start(replace(trace.request(), prompt_token_ids=()))
    drafter.observe(trace.trace_id, trace.output_token_ids, None)
    drafter.stop(trace.trace_id)


def _evidence(draft: Draft) -> Float32Array:
    return NO_EVIDENCE if draft.evidence_E is None else draft.evidence_E


def _model_column(model: ModelDrafts | None, trace: Trace) -> Int32Array:
    if model is None:
        return np.full(len(trace.output_token_ids), _NO_MODEL, np.int32)
    return model.accepted_len_T.astype(np.int32)


def _model_bounds(model: ModelDrafts | None) -> tuple[int, int]:
    return (0, 0) if model is None else (model.max_draft_tokens, model.context_length)


def _model_drafts(accepted_len_T: Int32Array, bounds: tuple[int, int]) -> ModelDrafts | None:
    if len(accepted_len_T) == 0 or (accepted_len_T == _NO_MODEL).any():
        return None
    return ModelDrafts(Source.EAGLE3, accepted_len_T, *bounds)
