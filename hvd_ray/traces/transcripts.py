"""Transcripts become traces: every answer of a conversation, with all that stood before it.

A trace's prompt is `messages[:k]` through the chat template, up to and with the opening of the
answer; its output is the answer's tokens and the token that ends the turn. Token ids are all that
is kept of a text (whoever has the tokenizer can turn them back).

Where a log tells no times, they are made up, so that they rise strictly: a file comes after the
files before it, a row after the rows before it, a turn after the turns before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa

from hvd_ray.traces.schema import TRACES_SCHEMA, Trace, trace_id_of, traces_to_table
from hvd_ray.traces.transcripts_entries import (
    AnswerEnd,
    BadLogRowError,
    Continuation,
    Dialogue,
    LogEntry,
    whole_text,
)
from hvd_ray.traces.transcripts_plan import LogSource
from hvd_ray.traces.transcripts_render import ChatTemplate, DialogueRenderer
from hvd_ray.traces.transcripts_tokens import SegmentTokenizer, Tokenizer
from hvd_ray.types import Int32Array, SamplingParams, scope_key

Turns = Literal["all", "last"]

NO_LIMIT = 2**20
"""Stands for a budget or a context that the log does not tell: more than any it may have had."""
_FIRST_MOMENT = datetime.fromtimestamp(0, UTC)
_FILE_STEP = timedelta(days=30)
_ROW_STEP = timedelta(milliseconds=10)
_TURN_STEP = timedelta(microseconds=1)
_SECOND_US = 1_000_000


class TranscriptTokenizer(ChatTemplate, Tokenizer, Protocol):
    """A tokenizer with its chat template."""

    @property
    def end_texts(self) -> Sequence[str]:
        """The texts of tokens that may end a turn."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """A raw prompt's ids, with what the tokenizer puts before every text."""
        ...


@dataclass(frozen=True, slots=True)
class ImportRules:
    """What an import makes of what it reads, beside the tokenizer."""

    model: str
    """The tokenizer's model; the target of traces whose row names no other."""
    tokenizer_sha: str
    context_length: int | None = None
    """Of the model that answered; None: nothing is cut or left out."""
    turns: Turns = "all"
    """`last` where every row of a log repeats the conversation up to its answer."""
    split_of: Callable[[str], str] = lambda _: ""
    """The split of a session whose row names none."""


@dataclass(frozen=True, slots=True, eq=False)
class ImportedTrace:
    """A trace whose token ids are still arrays, which may be views of a conversation's."""

    facts: Trace
    """The trace without its token ids."""
    prompt_ids: Int32Array
    output_ids: Int32Array

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    def trace(self) -> Trace:
        return replace(
            self.facts,
            prompt_token_ids=tuple(self.prompt_ids.tolist()),
            output_token_ids=tuple(self.output_ids.tolist()),
        )


@dataclass(frozen=True, slots=True)
class _Answer:
    place: int
    end: AnswerEnd
    created_at: datetime | None
    prompt_ids: Int32Array
    output_ids: Int32Array


class TranscriptImporter:
    """Makes traces of log entries with one tokenizer."""

    def __init__(self, tokenizer: TranscriptTokenizer, rules: ImportRules) -> None:
        self._tokenizer = tokenizer
        self._rules = rules
        self._renderer = DialogueRenderer(tokenizer, tokenizer.end_texts)
        self._segments = SegmentTokenizer(tokenizer)
        self._unknown_sampling = SamplingParams(max_tokens=rules.context_length or NO_LIMIT)
        ends = tokenizer.encode(tokenizer.end_texts) if tokenizer.end_texts else []
        self._end_ids = {int(ids[0]) for ids in ends if len(ids) == 1}

    def traces(self, entry: LogEntry, source: LogSource) -> Iterator[ImportedTrace]:
        """The traces of an entry, in the order of its turns; those beyond the context are left out.

        Raises:
            UserError: the chat template refuses the dialogue, or makes of it what is no text.
        """
        for answer in self._answers(entry.body):
            fitted = self._fitted(answer)
            if fitted is not None:
                yield self._trace(entry, fitted, source)

    def num_answers(self, entry: LogEntry) -> int:
        """How many answers of an entry are asked for, those without room among them."""
        body = entry.body
        return len(body.answers) if isinstance(body, Dialogue) and self._takes_all else 1

    @property
    def _takes_all(self) -> bool:
        return self._rules.turns == "all"

    def _answers(self, body: Dialogue | Continuation) -> Iterator[_Answer]:
        if isinstance(body, Continuation):
            whole_text(body.prompt + body.completion, "the text")
            prompt = np.array(self._tokenizer.encode_prompt(body.prompt), dtype=np.int32)
            output = self._segments.tokenize(body.completion).token_ids
            yield _Answer(0, body.end, None, prompt, self._ended(output, body.end))
            return
        last, checked = body.answers[-1], ""
        for found in self._renderer.answers(body):
            if not self._takes_all and found.place != last:
                continue
            message = body.messages[found.place]
            if found.text is not checked:  # the last place before the tokenizer, which dies of it
                checked = whole_text(found.text, "the dialogue")
            prompt, output = self._segments.cut(found.text, found.start, found.end)
            output = self._ended(output, message.end)
            yield _Answer(found.place, message.end, message.created_at, prompt, output)

    def _ended(self, output: Int32Array, end: AnswerEnd) -> Int32Array:
        """The output with its end token, or without it where the model did not come to its end."""
        is_closed = len(output) > 0 and int(output[-1]) in self._end_ids
        if end != "stop":
            return output[:-1] if is_closed else output
        if is_closed or self._tokenizer.eos_token_id is None:
            return output
        return np.append(output, np.int32(self._tokenizer.eos_token_id))

    def _fitted(self, answer: _Answer) -> _Answer | None:
        """The answer as far as the context reaches; None where nothing of it is left."""
        room = (self._rules.context_length or NO_LIMIT) - len(answer.prompt_ids)
        if room <= 0 or not len(answer.output_ids):
            return None
        if len(answer.output_ids) <= room:
            return answer
        return replace(answer, output_ids=answer.output_ids[:room], end="length")

    def _trace(self, entry: LogEntry, answer: _Answer, source: LogSource) -> ImportedTrace:
        rules = self._rules
        model = entry.model or rules.model
        session_id = f"{entry.workload}/{entry.session_id}"
        facts = Trace(
            trace_id=trace_id_of(
                *(source.label, entry.line, entry.part, answer.place),
                *(rules.tokenizer_sha, rules.context_length),
            ),
            prompt_id=f"{entry.id}#{answer.place}",
            workload=entry.workload,
            family=entry.family,
            scope=scope_key(model=model),
            session_id=session_id,
            created_at=_moment(entry, answer, source.index),
            model=model,
            tokenizer_sha=rules.tokenizer_sha,
            finish_reason=answer.end,
            sampling=self._sampling(entry.sampling, len(answer.output_ids)),
            context_length=rules.context_length or NO_LIMIT,
            engine="imported",
            split=entry.split or rules.split_of(session_id),
        )
        return ImportedTrace(facts, answer.prompt_ids, answer.output_ids)

    def _sampling(self, asked: SamplingParams | None, num_output: int) -> SamplingParams:
        """How the answer was sampled; a budget never below what was written.

        An unknown budget is that of the context. A budget as long as the answer would tell every
        position how much is still to come.
        """
        if asked is None:
            return self._unknown_sampling
        return replace(asked, max_tokens=max(asked.max_tokens, num_output))


def traces_table(traces: Sequence[ImportedTrace]) -> Any:
    """The traces as rows of `TRACES_SCHEMA`, token ids copied once and never boxed."""
    facts = [trace.facts for trace in traces]
    columns: dict[str, Any] = {
        name: [getattr(fact, name) for fact in facts] for name in TRACES_SCHEMA.names
    }
    columns["sampling"] = _sampling_array(facts)
    columns["prompt_token_ids"] = _list_array([trace.prompt_ids for trace in traces])
    columns["output_token_ids"] = _list_array([trace.output_ids for trace in traces])
    return pa.table(columns, schema=TRACES_SCHEMA)


def _sampling_array(facts: Sequence[Trace]) -> Any:
    """One struct a trace; most of an import's traces share the very same object."""
    distinct = list({id(fact.sampling): fact for fact in facts}.values())
    places = {id(fact.sampling): place for place, fact in enumerate(distinct)}
    structs = traces_to_table(distinct)["sampling"].combine_chunks()
    return structs.take(pa.array([places[id(fact.sampling)] for fact in facts], pa.int32()))


def _list_array(arrays: Sequence[Int32Array]) -> Any:
    offsets = np.zeros(len(arrays) + 1, dtype=np.int32)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    values = np.concatenate(arrays) if arrays else np.zeros(0, np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def _moment(entry: LogEntry, answer: _Answer, file_index: int) -> datetime:
    """When the answer was finished: as the log says, or made up.

    Many logs count whole seconds, in which a session may have several requests: the row's place
    in the file then stands for the microseconds.
    """
    turn = answer.place * _TURN_STEP
    if answer.created_at is not None:
        return answer.created_at
    if entry.created_at is None:
        try:
            return _FIRST_MOMENT + file_index * _FILE_STEP + entry.line * _ROW_STEP + turn
        except OverflowError:
            raise BadLogRowError("comes after too many files without times; import fewer") from None
    if entry.created_at.microsecond:
        return entry.created_at + turn
    return entry.created_at + (entry.line % _SECOND_US) * _TURN_STEP + turn
