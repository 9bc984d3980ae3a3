"""What a trace is, and the columns of `traces/`, `steps/` and `labels/` (DESIGN, section 5).

A column is documented where it is declared; the text travels in the Parquet file as the field's
metadata. `SCHEMA_VERSION` stands in every file and rises when a column changes its meaning.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal

import pyarrow as pa

from hvd_ray.traces.loops import loop_start
from hvd_ray.types import Request, SamplingParams, Source, Step

SCHEMA_VERSION = 1
SCHEMA_KEY = b"hvd_ray.table"
VERSION_KEY = b"hvd_ray.schema_version"
FEATURE_VERSION_KEY = b"hvd_ray.feature_version"
FEATURE_NAMES_KEY = b"hvd_ray.feature_names"

TraceEnd = Literal["stop", "length", "abort", "loop"]
TableName = Literal["traces", "steps", "labels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A prompt and the tokens that the target produced for it."""

    trace_id: str
    prompt_id: str
    workload: str
    family: str
    scope: str
    """Whose past outputs may draft for this one (see `types.scope_key`)."""
    session_id: str
    created_at: datetime
    """When the output was finished; orders the traces of a scope in time."""
    model: str
    tokenizer_sha: str
    prompt_token_ids: tuple[int, ...] = ()
    output_token_ids: tuple[int, ...] = ()
    finish_reason: TraceEnd | None = None
    """`loop`: cut where a degenerate loop began, and replayed as if the budget had ended there."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    context_length: int = 0
    """The most tokens, prompt and output together, that the engine could hold."""
    policy: str = ""
    """The system that decoded it; `steps/` holds its cycles."""
    engine: str = ""
    split: str = ""
    """`train`, `test` or empty: fixed by the session, never by the position."""
    error: str | None = None
    """Why there is no output, in one line."""

    @property
    def end(self) -> int:
        """Output tokens after which no draft could go on: the budget, or where a loop was cut."""
        if self.finish_reason == "loop":
            return len(self.output_token_ids)
        return self.sampling.max_tokens

    def request(self) -> Request:
        """The request that produced it."""
        return Request(self.trace_id, self.prompt_token_ids, self.sampling, self.scope)


def cut_at_loop(trace: Trace) -> Trace:
    """The trace up to where its output starts to repeat itself, or the trace as it is."""
    start = loop_start(trace.output_token_ids)
    if start is None:
        return trace
    return replace(trace, output_token_ids=trace.output_token_ids[:start], finish_reason="loop")


def trace_id_of(*identity: object) -> str:
    """A name for what determines an output: the prompt, the model, the sampling.

    The same identity gives the same name on every machine, so a run that is repeated finds the
    rows it has already written.
    """
    text = json.dumps(identity, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:24]


def _column(name: str, kind: Any, doc: str, *, nullable: bool = False) -> Any:
    return pa.field(name, kind, nullable=nullable, metadata={"doc": doc})


def _schema(table: TableName, columns: Sequence[Any], extra: dict[bytes, bytes]) -> Any:
    version = str(SCHEMA_VERSION).encode()
    return pa.schema(columns, metadata={SCHEMA_KEY: table.encode(), VERSION_KEY: version, **extra})


_INT32_LIST = pa.list_(pa.int32())
_TIME = pa.timestamp("us", tz="UTC")
_SAMPLING = pa.struct(
    [
        ("temperature", pa.float64()),
        ("top_k", pa.int32()),
        ("top_p", pa.float64()),
        ("min_p", pa.float64()),
        ("repetition_penalty", pa.float64()),
        ("presence_penalty", pa.float64()),
        ("frequency_penalty", pa.float64()),
        ("logit_bias", pa.map_(pa.int32(), pa.float64())),
        ("max_tokens", pa.int32()),
        ("min_tokens", pa.int32()),
        ("stop", pa.list_(pa.string())),
        ("stop_token_ids", _INT32_LIST),
        ("ignore_eos", pa.bool_()),
        ("seed", pa.int64()),
        ("logprobs", pa.int32()),
    ]
)

TRACES_SCHEMA = _schema(
    "traces",
    [
        _column("trace_id", pa.string(), "name of prompt, model and sampling; unique in a folder"),
        _column("prompt_id", pa.string(), "the prompt's id in its file"),
        _column("workload", pa.string(), "the set of prompts it belongs to"),
        _column("family", pa.string(), "the kind of work: agentic, code, chat, ..."),
        _column("scope", pa.string(), "tenant, model and adapter whose cache may draft for it"),
        _column("session_id", pa.string(), "traces of one session share context"),
        _column("created_at", _TIME, "when it was finished; orders the traces of a scope"),
        _column("model", pa.string(), "the target"),
        _column("tokenizer_sha", pa.string(), "fingerprint of the tokenizer behind the token ids"),
        _column("prompt_token_ids", _INT32_LIST, "the prompt as the target read it"),
        _column("output_token_ids", _INT32_LIST, "what the target produced"),
        _column("finish_reason", pa.string(), "stop, length, abort or loop", nullable=True),
        _column("sampling", _SAMPLING, "how tokens were chosen; the fields of SamplingParams"),
        _column("context_length", pa.int32(), "tokens that the engine can hold for a request"),
        _column("policy", pa.string(), "the system that decoded it"),
        _column("engine", pa.string(), "engine, numeric format and threads"),
        _column("split", pa.string(), "train, test or empty; fixed by the session"),
        _column("error", pa.string(), "why there is no output", nullable=True),
    ],
    {},
)

STEPS_SCHEMA = _schema(
    "steps",
    [
        _column("trace_id", pa.string(), "the trace this cycle belongs to"),
        _column("cycle", pa.int32(), "number of the cycle in its trace, from 0"),
        _column("position", pa.int32(), "output tokens committed before the cycle"),
        _column("source", pa.string(), "who guessed the verified draft: suffix, ngram, none, ..."),
        _column("drafted", pa.int32(), "draft tokens verified"),
        _column("accepted", pa.int32(), "draft tokens that the target agreed with"),
        _column("emitted", pa.int32(), "tokens committed in the cycle"),
        _column("match_len", pa.int32(), "committed tokens that the look-up matched"),
        _column("score", pa.float64(), "the cache's own estimate of the accepted length"),
        _column("cache_draft_len", pa.int32(), "length of the cache's draft, verified or not"),
        _column("predicted_payoff", pa.float64(), "expected accepted length", nullable=True),
        _column("tau", pa.float64(), "threshold on the predicted payoff", nullable=True),
        _column("draft_us", pa.float64(), "time of the look-up and the decision"),
        _column("verify_us", pa.float64(), "time of the target pass"),
        _column("reason", pa.string(), "why the policy decided so"),
    ],
    {},
)

_LABEL_COLUMNS_BEFORE = [
    _column("trace_id", pa.string(), "the trace the position belongs to"),
    _column("session_id", pa.string(), "splits go by session"),
    _column("workload", pa.string(), "the set of prompts the trace belongs to"),
    _column("position", pa.int32(), "output tokens before the labelled one"),
    _column("is_visited", pa.bool_(), "decoding that verifies every cache draft stops here"),
]
_LABEL_COLUMNS_AFTER = [
    _column("draft_len", pa.int32(), "length of the cache's draft; 0 where it has none"),
    _column("accepted_len", pa.int32(), "longest prefix of the draft that the output repeats"),
    _column(
        "eagle3_accepted_len",
        pa.int32(),
        "the same for an EAGLE-3 chain, 0 where it drafts none; null: not labelled",
        nullable=True,
    ),
    _column("split", pa.string(), "train, test or empty"),
]


def labels_schema(feature_names: Sequence[str], feature_version: int) -> Any:
    """Columns of `labels/`: one float32 column for each feature, in order."""
    features = [
        _column(name, pa.float32(), "a feature; see payoff/features.py") for name in feature_names
    ]
    return _schema(
        "labels",
        [*_LABEL_COLUMNS_BEFORE, *features, *_LABEL_COLUMNS_AFTER],
        {
            FEATURE_VERSION_KEY: str(feature_version).encode(),
            FEATURE_NAMES_KEY: json.dumps(list(feature_names)).encode(),
        },
    )


def traces_to_table(traces: Iterable[Trace]) -> Any:
    """The traces as rows of `TRACES_SCHEMA`."""
    return pa.Table.from_pylist([_trace_row(trace) for trace in traces], schema=TRACES_SCHEMA)


def traces_from_table(table: Any) -> list[Trace]:
    """The inverse of `traces_to_table`."""
    rows = table.select(TRACES_SCHEMA.names).to_pylist(maps_as_pydicts="strict")
    return [_trace_from_row(row) for row in rows]


def steps_to_table(steps: Iterable[tuple[str, Step]]) -> Any:
    """`(trace_id, step)` pairs as rows of `STEPS_SCHEMA`."""
    names = STEPS_SCHEMA.names[1:]
    rows = [
        {"trace_id": trace_id, **{name: getattr(step, name) for name in names}}
        for trace_id, step in steps
    ]
    return pa.Table.from_pylist(rows, schema=STEPS_SCHEMA)


def steps_from_table(table: Any) -> dict[str, tuple[Step, ...]]:
    """The steps of each trace, in the order of their cycles."""
    found: dict[str, list[Step]] = {}
    for row in table.select(STEPS_SCHEMA.names).to_pylist():
        trace_id = row.pop("trace_id")
        row["source"] = Source(row["source"])
        found.setdefault(trace_id, []).append(Step(**row))
    return {key: tuple(sorted(steps, key=lambda s: s.cycle)) for key, steps in found.items()}


def _trace_row(trace: Trace) -> dict[str, Any]:
    row = {name: getattr(trace, name) for name in TRACES_SCHEMA.names}
    sampling = {f.name: getattr(trace.sampling, f.name) for f in _SAMPLING}
    for column in _SAMPLING:
        if pa.types.is_floating(column.type):  # given as a whole number, it may have no exact one
            sampling[column.name] = float(sampling[column.name])
    row["sampling"] = sampling | {"logit_bias": list(trace.sampling.logit_bias.items())}
    return row


def _trace_from_row(row: dict[str, Any]) -> Trace:
    sampling = row.pop("sampling")
    for name in ("stop", "stop_token_ids"):
        sampling[name] = tuple(sampling[name])
    for name in ("prompt_token_ids", "output_token_ids"):
        row[name] = tuple(row[name])
    created_at = row.pop("created_at").astimezone(UTC)
    return Trace(**row, created_at=created_at, sampling=SamplingParams(**sampling))
