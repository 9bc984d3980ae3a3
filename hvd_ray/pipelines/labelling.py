"""Labelling traces, without Ray: which traces share a cache, and the labels of such a shard."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from hvd_ray.config import SuffixConfig
from hvd_ray.errors import UserError
from hvd_ray.pipelines.shards import KEPT, Report
from hvd_ray.traces.label import (
    FeatureWriter,
    ModelLabeller,
    ShardLabels,
    label_shard,
    shard_of,
)
from hvd_ray.traces.schema import TRACES_SCHEMA, Trace
from hvd_ray.traces.store import (
    parts_of,
    read_footer,
    read_table,
    read_trace_part,
    readable_rows,
    write_table,
)

NUM_SHARDS = 4
"""A replica's cache holds what a shard's does, so few and full ones are closest to serving."""
_COUNT_KEY = b"hvd_ray.count."
_PLAN_COLUMNS = (
    "trace_id",
    "scope",
    "session_id",
    "model",
    "tokenizer_sha",
    "output_token_ids",
    "error",
    "created_at",
)


@dataclass(frozen=True, slots=True)
class LabelShard:
    """The traces of one shard: the files that hold some of them, and how many positions."""

    number: int
    num_shards: int
    files: tuple[Path, ...]
    num_positions: int

    def labels_file(self, out: Path) -> Path:
        return out / "labels" / f"s{self.number:04d}.parquet"

    def read(self) -> list[Trace]:
        """Its traces, as they stand in the files."""
        return [trace for file in self.files for trace in read_trace_part(file) if self._has(trace)]

    def _has(self, trace: Trace) -> bool:
        return self.number == shard_of(trace.scope, trace.session_id, num_shards=self.num_shards)


@dataclass(frozen=True, slots=True)
class LabelPlan:
    """All that is to be labelled."""

    shards: tuple[LabelShard, ...]
    """The largest first."""
    model: str
    tokenizer_sha: str
    traces_hash: str
    """Names the traces and their order in time, in whatever files they stand."""

    @property
    def num_positions(self) -> int:
        return sum(shard.num_positions for shard in self.shards)


@dataclass(slots=True)
class _Growing:
    files: dict[Path, None]
    num_positions: int = 0


def plan_labels(place: Path, *, num_shards: int = NUM_SHARDS) -> LabelPlan:
    """Deal the traces under `place` to shards, from their ids alone.

    Raises:
        UserError: there are none, a file is broken or of another schema, a trace stands there
            twice, or the traces are of several tokenizers.
    """
    growing: dict[int, _Growing] = {}
    seen: dict[str, Path] = {}
    targets: dict[str, str] = {}
    names: list[str] = []
    for file in parts_of(place, "traces"):
        for row in _plan_rows(file):
            _refuse_twice(row["trace_id"], file, seen)
            names.append(f"{row['trace_id']} {row['created_at'].isoformat()}")
            if row["error"] is None:
                targets[row["tokenizer_sha"]] = row["model"]
            number = shard_of(row["scope"], row["session_id"], num_shards=num_shards)
            shard = growing.setdefault(number, _Growing({}))
            shard.files[file] = None
            shard.num_positions += row["num_positions"]
    if not names:
        raise UserError(f"{place}: its files hold no trace, so there is nothing to label")
    if not targets:
        raise UserError(f"{place}: every trace there has failed, so there is nothing to label")
    if len(targets) > 1:
        raise UserError(f"{place}: holds traces of several tokenizers; label them apart")
    ((sha, model),) = targets.items()
    shards = [
        LabelShard(number, num_shards, tuple(found.files), found.num_positions)
        for number, found in sorted(growing.items())
    ]
    shards.sort(key=lambda shard: -shard.num_positions)
    return LabelPlan(tuple(shards), model, sha, _hash(names))


def label_one(
    shard: LabelShard,
    *,
    drafter_config: SuffixConfig,
    extractor: FeatureWriter,
    cut_loops: bool,
    out: Path,
    report: Report,
    model_labeller: ModelLabeller | None = None,
) -> None:
    """Label a shard and write its part, with what was left out in its metadata."""
    labels = label_shard(
        shard.read(),
        drafter_config=drafter_config,
        extractor=extractor,
        cut_loops=cut_loops,
        model_labeller=model_labeller,
        on_trace=lambda num_positions: report({"done": num_positions}),
    )
    counts = {_COUNT_KEY + name.encode(): str(n).encode() for name, n in _counts(labels).items()}
    table = labels.table.replace_schema_metadata(labels.table.schema.metadata | counts)
    write_table(table, shard.labels_file(out))
    num_cut = shard.num_positions - labels.num_positions
    report({"done": num_cut, KEPT: 1})  # what was cut is done, too


@dataclass(frozen=True, slots=True)
class LabelSummary:
    """What a finished folder holds."""

    positions: int = 0
    traces: int = 0
    failed: int = 0
    """Traces without an output."""
    loops_cut: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def summarise(out: Path, plan: LabelPlan) -> LabelSummary:
    """Add up the parts on disk, from their footers."""
    totals: Counter[str] = Counter()
    for shard in plan.shards:
        footer = read_footer(shard.labels_file(out))
        totals["positions"] += footer.num_rows
        for key, value in footer.metadata.items():
            if key.startswith(_COUNT_KEY):
                totals[key.removeprefix(_COUNT_KEY).decode()] += int(value)
    return LabelSummary(**totals)


def _counts(labels: ShardLabels) -> dict[str, int]:
    return {
        "traces": labels.num_traces,
        "failed": labels.num_failed,
        "loops_cut": labels.num_loops_cut,
    }


def _plan_rows(file: Path) -> list[dict[str, Any]]:
    """What the plan needs of each trace; outputs are counted and not read out.

    All but the long prompts is read, so that a row that is none of traces is found before
    anything is claimed or written.
    """
    columns = [name for name in TRACES_SCHEMA.names if name != "prompt_token_ids"]
    table = read_table(file, "traces", TRACES_SCHEMA, columns=columns).select(_PLAN_COLUMNS)
    lengths = pc.list_value_length(table["output_token_ids"])
    table = table.drop_columns(["output_token_ids"]).append_column("num_positions", lengths)
    with readable_rows(file, "traces"):
        rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def _refuse_twice(trace_id: str, file: Path, seen: dict[str, Path]) -> None:
    if trace_id in seen:
        raise UserError(
            f"trace {trace_id} stands in {seen[trace_id]} and in {file}; remove one of the two"
        )
    seen[trace_id] = file


def _hash(names: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:32]
