"""Collecting traces, without Ray: what is to be decoded, in which order, into which file.

Sessions are dealt to shards by their hash, a shard's requests are decoded one after the other
with one decoder, and every few of them become one part on disk. The order and the parts depend
on the prompts alone, so a run that was killed goes on where it stopped and ends with the rows
that it would have had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from hvd_ray.bench.plan import Sampling, ask
from hvd_ray.bench.workloads import Prompt, split_of
from hvd_ray.decode import Decoder
from hvd_ray.engines.base import EngineCapabilities
from hvd_ray.errors import UserError
from hvd_ray.pipelines.shards import KEPT, Report
from hvd_ray.pipelines.suspects import FOLDER, MAX_DEATHS, PartWatch
from hvd_ray.text import TextCodec
from hvd_ray.traces.label import shard_of
from hvd_ray.traces.schema import TRACES_SCHEMA, Trace, trace_id_of
from hvd_ray.traces.store import (
    num_rows,
    read_table,
    read_trace_part,
    write_steps,
    write_traces,
)
from hvd_ray.types import SamplingParams, Step, scope_key

NUM_SHARDS = 8
TRACES_PER_PART = 8
"""What a kill may lose of a shard, at the most."""
_NOT_YET = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What a trace says of the model that made it."""

    model: str
    fingerprint: str
    """Of configuration, vocabulary and weights."""
    tokenizer_sha: str
    capabilities: EngineCapabilities


@dataclass(frozen=True, slots=True)
class Part:
    """Traces that are decoded one after the other and written together.

    Before they are decoded they have no output; those that cannot be have an error already.
    """

    name: str
    traces: tuple[Trace, ...]

    def traces_file(self, out: Path) -> Path:
        return out / "traces" / f"{self.name}.parquet"

    def steps_file(self, out: Path) -> Path:
        return out / "steps" / f"{self.name}.parquet"

    def suspects_file(self, out: Path) -> Path:
        return out / FOLDER / f"{self.name}.json"


@dataclass(frozen=True, slots=True)
class CollectShard:
    """Parts that share a decoder and its cache, in their order."""

    parts: tuple[Part, ...]

    @property
    def num_traces(self) -> int:
        return sum(len(part.traces) for part in self.parts)

    def is_finished(self, out: Path) -> bool:
        return all(part.traces_file(out).exists() for part in self.parts)


def plan_traces(
    prompts: Sequence[Prompt],
    *,
    codec: TextCodec,
    target: TargetFacts,
    sampling: Sampling,
    policy: str,
) -> list[Trace]:
    """The traces to come, in the order of the prompts; a prompt that cannot work has its error.

    Raises:
        UserError: not one of the prompts can work; the message is the first one's.
    """
    traces = [_plan_trace(prompt, codec, target, sampling, policy) for prompt in prompts]
    errors = [trace.error for trace in traces if trace.error is not None]
    if len(errors) == len(traces):
        more = f" (and {len(errors) - 1} more like it)" if len(errors) > 1 else ""
        raise UserError(errors[0] + more if errors else "no prompt was given")
    return traces


def plan_shards(traces: Sequence[Trace], *, num_shards: int = NUM_SHARDS) -> list[CollectShard]:
    """Deal the traces to shards, whole sessions, in their order; the largest shard first."""
    dealt: dict[int, list[Trace]] = {}
    for trace in traces:
        number = shard_of(trace.scope, trace.session_id, num_shards=num_shards)
        dealt.setdefault(number, []).append(trace)
    shards = [_shard(number, members) for number, members in sorted(dealt.items())]
    return sorted(shards, key=lambda shard: -shard.num_traces)


def collect_shard(
    shard: CollectShard, *, decoder: Decoder, out: Path, report: Report, run: str = ""
) -> None:
    """Decode what is not on disk yet, part by part.

    What is on disk enters the decoder's cache, so that the steps of the rest are those of a run
    that was never killed. A trace at which workers of this `run` keep dying becomes an error.
    """
    for part in shard.parts:
        file = part.traces_file(out)
        if file.exists():
            _remember(read_trace_part(file), decoder)
            continue
        watch = PartWatch(part.suspects_file(out), run=run)
        steps: list[tuple[str, Step]] = []
        traces = [_collect(trace, decoder, steps, report, watch) for trace in part.traces]
        write_steps(steps, part.steps_file(out))
        write_traces(traces, file)  # last: a part counts as done once its traces are there
        watch.close()
        report({KEPT: 1})


def _plan_trace(
    prompt: Prompt, codec: TextCodec, target: TargetFacts, sampling: Sampling, policy: str
) -> Trace:
    params, token_ids, error = SamplingParams(), tuple[int, ...](), None
    try:
        asked = ask([prompt], codec=codec, capabilities=target.capabilities, sampling=sampling)
    except UserError as refused:
        error = str(refused)
    else:
        request = asked[prompt.workload][0].request
        params, token_ids = request.sampling, request.prompt_token_ids
    session_id = f"{prompt.workload}/{prompt.session_id or prompt.id}"
    return Trace(
        trace_id=_trace_id(prompt, token_ids, target, params),
        prompt_id=prompt.id,
        workload=prompt.workload,
        family=prompt.family,
        scope=scope_key(model=target.model),
        session_id=session_id,
        created_at=_NOT_YET,
        model=target.model,
        tokenizer_sha=target.tokenizer_sha,
        prompt_token_ids=token_ids,
        sampling=params,
        context_length=target.capabilities.context_length,
        policy=policy,
        engine=f"{target.capabilities.name} {target.capabilities.dtype}",
        split=prompt.split or split_of(session_id),
        error=error,
    )


def _trace_id(
    prompt: Prompt, token_ids: tuple[int, ...], target: TargetFacts, params: SamplingParams
) -> str:
    """The policy is no part of it: in a lossless mode it changes no token."""
    model = (target.fingerprint, target.capabilities.name, target.capabilities.dtype)
    return trace_id_of(prompt.workload, prompt.id, token_ids, model, _as_json(params))


def _as_json(params: SamplingParams) -> Mapping[str, Any]:
    values = {name: getattr(params, name) for name in params.__dataclass_fields__}
    return values | {"logit_bias": sorted(params.logit_bias.items())}


def _shard(number: int, traces: Sequence[Trace]) -> CollectShard:
    starts = range(0, len(traces), TRACES_PER_PART)
    return CollectShard(
        tuple(
            Part(f"s{number:04d}-p{index:05d}", tuple(traces[start : start + TRACES_PER_PART]))
            for index, start in enumerate(starts)
        )
    )


def _collect(
    trace: Trace,
    decoder: Decoder,
    steps: list[tuple[str, Step]],
    report: Report,
    watch: PartWatch,
) -> Trace:
    """Decode one trace; a fault of this request is its error and not the end of the run."""
    if trace.error is None and watch.is_given_up(trace.trace_id):
        trace = replace(trace, error=f"given up: {MAX_DEATHS} workers died while decoding it")
    if trace.error is not None:
        report({"done": 1, "failed": 1})
        return replace(trace, created_at=datetime.now(UTC))
    watch.begin(trace.trace_id)
    try:
        completion = decoder.generate(trace.request())
    except (UserError, RuntimeError) as error:  # torch reports its faults as RuntimeError
        report({"done": 1, "failed": 1})
        cause = next(iter(str(error).splitlines()), type(error).__name__)
        return replace(trace, created_at=datetime.now(UTC), error=f"decoding failed: {cause}")
    steps += [(trace.trace_id, step) for step in completion.steps]
    report({"done": 1, "tokens": len(completion.token_ids), "passes": len(completion.steps)})
    return replace(
        trace,
        created_at=datetime.now(UTC),
        output_token_ids=completion.token_ids,
        finish_reason=completion.finish_reason,
    )


def _remember(traces: Sequence[Trace], decoder: Decoder) -> None:
    """Put finished outputs into the decoder's cache, as decoding them would have."""
    if decoder.cache_drafter is None:
        return
    for trace in traces:
        if trace.error is None:
            decoder.cache_drafter.start(trace.request())
            decoder.cache_drafter.observe(trace.trace_id, trace.output_token_ids, None)
            decoder.cache_drafter.stop(trace.trace_id)


@dataclass(frozen=True, slots=True)
class CollectSummary:
    """What a finished folder holds."""

    traces: int
    failed: int
    tokens: int
    target_passes: int
    first_error: str | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def summarise(out: Path, shards: Sequence[CollectShard]) -> CollectSummary:
    """Count what is on disk, and see that every planned trace is there exactly once."""
    parts = [part for shard in shards for part in shard.parts]
    columns = ("trace_id", "error", "output_token_ids")
    rows = pa.concat_tables(
        read_table(part.traces_file(out), "traces", TRACES_SCHEMA, columns=columns)
        for part in parts
    )
    planned = sorted(trace.trace_id for part in parts for trace in part.traces)
    if sorted(rows["trace_id"].to_pylist()) != planned:
        raise UserError(f"{out}: its parts lack traces or repeat some; start with a new folder")
    errors = sorted(rows["error"].drop_null().to_pylist())
    return CollectSummary(
        traces=len(planned),
        failed=len(errors),
        tokens=pc.sum(pc.list_value_length(rows["output_token_ids"])).as_py() or 0,
        target_passes=sum(num_rows(part.steps_file(out)) for part in parts),
        first_error=errors[0] if errors else None,
    )
