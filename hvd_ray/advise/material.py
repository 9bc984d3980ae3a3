"""The traffic to advise on: logs or trace folders as traces, and which of them learn and judge."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from hvd_ray.errors import UserError
from hvd_ray.payoff.dataset import TEST, TRAIN
from hvd_ray.pipelines.import_transcripts import ImportOptions, import_transcripts
from hvd_ray.pipelines.shards import RunProgress
from hvd_ray.traces.schema import Trace, cut_at_loop
from hvd_ray.traces.store import finished_parts, read_steps, read_traces
from hvd_ray.traces.walk import in_time_order
from hvd_ray.types import Step

Sides = Literal["test", "all"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What was read, in time order, and what became of it."""

    traces: tuple[Trace, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Counts for the report."""

    @property
    def tokenizer_sha(self) -> str:
        return self.traces[0].tokenizer_sha


@dataclass(frozen=True, slots=True)
class Roles:
    """Who learns and who judges, as trace ids; the others only fill the cache."""

    learning: frozenset[str]
    judged: frozenset[str]

    def of(self, trace: Trace) -> str:
        """`train`, `test` or nothing: the split for `payoff.dataset`."""
        if trace.trace_id in self.judged:
            return TEST
        return TRAIN if trace.trace_id in self.learning else ""


def read_traffic(
    places: Sequence[Path],
    *,
    tokenizer: str,
    import_settings: Mapping[str, Any],
    cut_loops: bool,
    progress: RunProgress,
) -> Traffic:
    """Logs are imported on the way, trace folders are read as they are.

    Args:
        places: files and folders of logs, or folders of traces; not both.
        tokenizer: for logs; traces have their tokens.
        import_settings: fields of `ImportOptions`, for logs.
        cut_loops: end a trace where it starts to repeat itself: a cache loves loops, users don't.
        progress: hears of the import.

    Raises:
        UserError: nothing usable is there, or the traces are of several tokenizers.
    """
    are_traces = [_holds_traces(place) for place in places]
    if any(are_traces) and not all(are_traces):
        raise UserError(
            f"{places[are_traces.index(True)]} holds traces, others logs: give one kind"
        )
    if not places:
        raise UserError("no log was named: expected files or folders of conversations, or traces")
    facts: dict[str, Any] = {}
    if any(are_traces):
        traces = [trace for place in places for trace in read_traces(place)]
    else:
        traces, facts = _imported(places, tokenizer, import_settings, progress)
    usable = [t for t in traces if t.error is None and t.output_token_ids]
    if not usable:
        raise UserError(f"{places[0]}: holds no answer to advise on")
    if len({trace.tokenizer_sha for trace in usable}) > 1:
        raise UserError(f"{places[0]}: holds traces of several tokenizers; ask for each apart")
    return _traffic(traces, usable, facts, cut_loops=cut_loops)


def recorded_steps(place: Path) -> dict[str, tuple[Step, ...]]:
    """The cycles that a collection kept beside its traces.

    Raises:
        UserError: there are none.
    """
    return read_steps(place)


def deal_roles(
    traces: Sequence[Trace],
    *,
    sides: Sides,
    is_learning: bool,
    judged_tokens: int,
    learned_tokens: int,
) -> Roles:
    """Choose the sessions that a predictor learns from and those that systems are judged on.

    Whole sessions, every workload its share, in the order of a hash, until the budget of output
    tokens is spent; one session of each workload at the least.

    Raises:
        UserError: a predictor is to be learned and one of the two sides has no session.
    """
    judged = traces if sides == "all" else [t for t in traces if t.split == TEST]
    learning = [t for t in traces if t.split == TRAIN] if is_learning else []
    if not judged or (is_learning and not learning):
        raise UserError(
            "a predictor learns from some sessions and is judged on others, and the log has "
            f"{len({t.session_id for t in traces})} session(s) with none on one side; give a "
            "longer log, or --predictor none --split all for what needs no predictor"
        )
    return Roles(
        frozenset(_within(learning, learned_tokens)), frozenset(_within(judged, judged_tokens))
    )


def _within(traces: Sequence[Trace], budget: int) -> Iterable[str]:
    """Ids of the sessions that the budget allows, dealt to the workloads by turns."""
    workloads: dict[str, dict[str, list[Trace]]] = defaultdict(lambda: defaultdict(list))
    for trace in traces:
        workloads[trace.workload][trace.session_id].append(trace)
    queues = [
        [sessions[name] for name in sorted(sessions, key=_hash)] for sessions in workloads.values()
    ]
    spent, turn = 0, 0
    while any(turn < len(queue) for queue in queues):
        for queue in queues:
            if turn < len(queue) and (turn == 0 or spent < budget):
                spent += sum(len(trace.output_token_ids) for trace in queue[turn])
                yield from (trace.trace_id for trace in queue[turn])
        turn += 1


def _hash(session: str) -> str:
    return hashlib.sha256(session.encode()).hexdigest()


def _holds_traces(place: Path) -> bool:
    if place.suffix == ".parquet":
        return True
    return place.is_dir() and any(
        next(finished_parts(folder), None) for folder in (place, place / "traces")
    )


def _imported(
    places: Sequence[Path],
    tokenizer: str,
    settings: Mapping[str, Any],
    progress: RunProgress,
) -> tuple[list[Trace], dict[str, Any]]:
    """The text of a log is never kept: its token ids lie in a folder that goes with this run."""
    with TemporaryDirectory(prefix="hvd-advise-") as folder:
        out = Path(folder) / "imported"
        options = ImportOptions(logs=tuple(places), out=out, tokenizer=tokenizer, **settings)
        found = import_transcripts(options, progress=progress)
        traces = read_traces(out)
    kept = ("formats", "files", "rows", "rows_bad", "rows_without_answer", "answers_left_out")
    return traces, {name: found[name] for name in kept}


def _traffic(
    traces: Sequence[Trace], usable: Sequence[Trace], facts: dict[str, Any], *, cut_loops: bool
) -> Traffic:
    cut = [cut_at_loop(trace) for trace in usable]
    num_looping = sum(after is not before for after, before in zip(cut, usable, strict=True))
    kept = [t for t in cut if t.output_token_ids] if cut_loops else list(usable)
    counts = {
        "traces": len(kept),
        "traces_failed": len(traces) - len(usable),
        "traces_looping": num_looping,
        "loops_are_cut": cut_loops,
        "sessions": len({trace.session_id for trace in kept}),
        "prompt_tokens": sum(len(trace.prompt_token_ids) for trace in kept),
        "output_tokens": sum(len(trace.output_token_ids) for trace in kept),
    }
    return Traffic(tuple(in_time_order(kept)), {**facts, **counts})
