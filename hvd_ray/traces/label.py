"""Labels by replay: what the cache's draft would have been worth at every position of a trace.

No target is needed: the accepted length of a draft is the longest prefix that the recorded output
repeats. A shard is a set of traces given by a key, never by a worker, and each shard has a cache
of its own, so the labels do not depend on how many workers there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from time import process_time
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hvd_ray.config import SuffixConfig
from hvd_ray.context import DecodeContext
from hvd_ray.drafting.base import Drafter
from hvd_ray.drafting.suffix import SuffixDrafter
from hvd_ray.payoff.features import FEATURE_NAMES, FEATURE_VERSION
from hvd_ray.traces.schema import Trace, cut_at_loop, labels_schema
from hvd_ray.traces.walk import accepted_len, in_time_order, walking
from hvd_ray.types import Draft, Float32Array, Int32Array

# Shapes: T positions of a trace's output, F features.


class FeatureWriter(Protocol):
    """Describes a draft and where it stands, in numbers."""

    def write(self, draft: Draft, context: DecodeContext, out_F: Float32Array) -> None:
        """Fill `out_F`, float32, in the order of `FEATURE_NAMES`; the draft may be empty."""
        ...


class ModelLabeller(Protocol):
    """Says what a model drafter's drafts would have been worth."""

    def __call__(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Int32Array:
        """Accepted length at every output position, int32, shape [T]; 0 where it drafts none."""
        ...


@dataclass(frozen=True, slots=True)
class TraceLabels:
    """The labels of one trace."""

    trace: Trace
    features_TF: Float32Array
    draft_len_T: Int32Array
    accepted_len_T: Int32Array
    is_visited_T: NDArray[np.bool_]
    model_accepted_len_T: Int32Array | None = None
    """The same of a model drafter, where one was asked."""


@dataclass(frozen=True, slots=True)
class ShardLabels:
    """The labels of one shard, and what was left out."""

    table: Any
    """A pyarrow.Table in the columns of `labels_schema`."""
    num_traces: int
    num_failed: int
    """Traces without an output."""
    num_loops_cut: int

    @property
    def num_positions(self) -> int:
        return int(self.table.num_rows)


def shard_of(scope: str, session_id: str, *, num_shards: int) -> int:
    """The shard of a session: scopes never mix in a cache, sessions are never split."""
    key = hashlib.sha256(f"{scope}\0{session_id}".encode()).digest()
    return int.from_bytes(key[:8], "big") % num_shards


def label_shard(
    traces: Iterable[Trace],
    *,
    drafter_config: SuffixConfig,
    extractor: FeatureWriter,
    cut_loops: bool = True,
    model_labeller: ModelLabeller | None = None,
    on_trace: Callable[[int], None] = lambda num_positions: None,  # noqa: ARG005
) -> ShardLabels:
    """Label every output position of the traces that share a cache.

    The traces are replayed in time order with an empty cache at the start; each output enters
    the cache as it is committed, as a replica would have seen it.

    Args:
        traces: in any order; those with an error are counted and left out.
        drafter_config: of the cache.
        extractor: of the features; the same as decoding uses.
        cut_loops: end a trace where it starts to repeat itself.
        model_labeller: labels a model drafter's drafts too.
        on_trace: hears of each trace that is done and its number of positions.
    """
    usable, num_failed, num_cut = _usable(traces, cut_loops=cut_loops)
    drafter = SuffixDrafter(drafter_config)
    labels = []
    for trace in in_time_order(usable):
        of_cache = label_trace(trace, drafter=drafter, extractor=extractor)
        labels.append(_with_model(of_cache, model_labeller))
        on_trace(len(trace.output_token_ids))
    return ShardLabels(labels_to_table(labels), len(usable), num_failed, num_cut)


def label_trace(trace: Trace, *, drafter: Drafter, extractor: FeatureWriter) -> TraceLabels:
    """Label one trace; its output stays in the drafter's cache.

    Features see the history of decoding that verifies every cache draft: only the drafts at
    positions which that walk visits are noted.
    """
    output = trace.output_token_ids
    size = len(output)
    features_TF = np.zeros((size, len(FEATURE_NAMES)), dtype=np.float32)
    draft_len_T, accepted_len_T = np.zeros(size, np.int32), np.zeros(size, np.int32)
    is_visited_T = np.zeros(size, dtype=np.bool_)
    next_visit = 0
    with walking(trace, drafter) as walk:
        context = walk.context
        for position, token in enumerate(output):
            draft = walk.look_up()
            accepted = accepted_len(draft, output, position)
            extractor.write(draft, context, features_TF[position])
            draft_len_T[position] = len(draft.token_ids)
            accepted_len_T[position] = accepted
            if position == next_visit:
                context.history.note(draft, is_selected=True)
                is_visited_T[position] = True
                next_visit += accepted + 1
            walk.commit((token,))
    return TraceLabels(trace, features_TF, draft_len_T, accepted_len_T, is_visited_T)


def _with_model(labels: TraceLabels, labeller: ModelLabeller | None) -> TraceLabels:
    if labeller is None:
        return labels
    trace = labels.trace
    accepted_len_T = labeller(trace.prompt_token_ids, trace.output_token_ids)
    return replace(labels, model_accepted_len_T=accepted_len_T)


def labels_to_table(labels: Sequence[TraceLabels]) -> Any:
    """The labels as rows of `labels_schema`, traces in the order given."""
    schema = labels_schema(FEATURE_NAMES, FEATURE_VERSION)
    tables = [_table(item, schema) for item in labels]
    return pa.concat_tables(tables) if tables else schema.empty_table()


def label_rate(
    traces: Sequence[Trace], *, drafter_config: SuffixConfig, extractor: FeatureWriter
) -> float:
    """Positions labelled per second of one core's time, loops included, tables left out.

    Prompts count as time but not as positions: each one is entered into the request's own tree.
    """
    drafter = SuffixDrafter(drafter_config)
    usable = in_time_order([trace for trace in traces if trace.error is None])
    started = process_time()
    for trace in usable:
        label_trace(trace, drafter=drafter, extractor=extractor)
    seconds = process_time() - started
    return sum(len(trace.output_token_ids) for trace in usable) / seconds


def _usable(traces: Iterable[Trace], *, cut_loops: bool) -> tuple[list[Trace], int, int]:
    whole, num_failed = [], 0
    for trace in traces:
        if trace.error is None:
            whole.append(trace)
        else:
            num_failed += 1
    cut = [cut_at_loop(trace) for trace in whole] if cut_loops else whole
    num_cut = sum(after is not before for after, before in zip(cut, whole, strict=True))
    return cut, num_failed, num_cut


def _table(labels: TraceLabels, schema: Any) -> Any:
    trace, size = labels.trace, len(labels.draft_len_T)
    by_feature_FT = np.ascontiguousarray(labels.features_TF.T)
    columns: dict[str, Any] = {
        "trace_id": pa.repeat(trace.trace_id, size),
        "session_id": pa.repeat(trace.session_id, size),
        "workload": pa.repeat(trace.workload, size),
        "position": np.arange(size, dtype=np.int32),
        "is_visited": labels.is_visited_T,
        "draft_len": labels.draft_len_T,
        "accepted_len": labels.accepted_len_T,
        "eagle3_accepted_len": _or_nulls(labels.model_accepted_len_T, size),
        "split": pa.repeat(trace.split, size),
    }
    for name, values_T in zip(FEATURE_NAMES, by_feature_FT, strict=True):
        columns[name] = values_T
    return pa.table(columns, schema=schema)


def _or_nulls(values_T: Int32Array | None, size: int) -> Any:
    return pa.nulls(size, pa.int32()) if values_T is None else values_T
