"""Entries to traces: the template's text, the tokenizer's ids, times, ends, contexts."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from hvd_ray.errors import UserError
from hvd_ray.traces.schema import traces_from_table
from hvd_ray.traces.transcripts import (
    NO_LIMIT,
    ImportRules,
    TranscriptImporter,
    traces_table,
)
from hvd_ray.traces.transcripts_entries import (
    ChatMessage,
    Continuation,
    Dialogue,
    LogEntry,
    ToolCall,
)
from hvd_ray.traces.transcripts_plan import LogSource
from hvd_ray.traces.transcripts_render import DialogueRenderer
from hvd_ray.traces.transcripts_tokens import SegmentTokenizer
from hvd_ray.types import SamplingParams
from tests.unit.traces.transcript_fakes import (
    SPECIAL,
    TEMPLATES,
    FakeTokenizer,
    GreedyTokenizer,
)

SOURCE = LogSource(Path("log.jsonl"), "log.jsonl", 0, "lines", "chat")
RULES = ImportRules(model="m", tokenizer_sha="sha")


def says(role: str, content: str, **fields: object) -> ChatMessage:
    is_answer = role == "assistant" and fields.pop("is_answer", True)
    return ChatMessage(role, content, is_answer=bool(is_answer), **fields)


def dialogue(*turns: str) -> Dialogue:
    """Turns as `role:content`."""
    pairs = (turn.partition(":") for turn in turns)
    return Dialogue(tuple(says(role, content) for role, _, content in pairs))


def entry(body, **fields: object) -> LogEntry:
    values = {"line": 1, "id": "c1", "session_id": "s1", "workload": "w", "family": "f"} | fields
    return LogEntry(body=body, **values)


def imported(body, tokenizer=None, rules=RULES, **fields: object):
    importer = TranscriptImporter(tokenizer or FakeTokenizer(), rules)
    return [trace.trace() for trace in importer.traces(entry(body, **fields), SOURCE)]


TALKS = [
    dialogue("user:hi", "assistant: ab\n"),
    dialogue("system:be kind", "user:hi", "assistant:yes", "user: a\n\n", "assistant:\nno "),
    dialogue("user:hi", "user:there", "assistant:", "assistant:again", "tool:42", "assistant:x"),
    dialogue("assistant:I begin", "user:then", "assistant:go"),
    dialogue("user:q", "tool:one", "tool:two", "assistant:a", "user:r", "assistant:b<|e|>c"),
]


@pytest.mark.parametrize("talk", TALKS, ids=range(len(TALKS)))
@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "strict"])
def test_a_prompt_is_what_the_template_makes_of_the_turns_before(name, talk):
    tokenizer = FakeTokenizer(TEMPLATES[name])
    renderer = DialogueRenderer(tokenizer, SPECIAL)
    messages = [{"role": m.role, "content": m.content} for m in talk.messages]
    answers = list(renderer.answers(talk))
    assert [answer.place for answer in answers] == talk.answers
    for answer in answers:
        prompt = tokenizer.render(messages[: answer.place], with_opening=True)
        whole = tokenizer.render(messages[: answer.place + 1])
        assert answer.text[: answer.start] == prompt
        said = answer.text[answer.start : answer.end]
        if whole.startswith(prompt):
            assert whole[len(prompt) :].startswith(said)
            assert whole[len(prompt) + len(said) :].strip() == ""
        assert messages[answer.place]["content"].strip() in said
        assert answer.is_closed == said.endswith("<|e|>")


def test_a_dialogue_is_rendered_a_few_times_however_long_it_is():
    tokenizer = FakeTokenizer()
    renderer = DialogueRenderer(tokenizer, SPECIAL)
    before = tokenizer.num_renders
    talk = dialogue(*["user:a", "assistant:b"] * 200)
    assert len(list(renderer.answers(talk))) == 200
    assert tokenizer.num_renders - before == 2


@pytest.mark.parametrize("name", ["plain", "last turn thinks"])
def test_every_stretch_is_tokenised_once_though_all_prompts_hold_it(name):
    tokenizer = FakeTokenizer(TEMPLATES[name])
    turns = [f"{role}:{'long text ' * 50}{k}" for k in range(100) for role in ("user", "assistant")]
    traces = imported(dialogue(*turns), tokenizer)
    num_text = sum(map(len, turns))
    assert sum(len(trace.prompt_token_ids) for trace in traces) > 50 * num_text
    assert tokenizer.num_chars < 5 * num_text


@pytest.mark.parametrize("make", [FakeTokenizer, GreedyTokenizer])
@pytest.mark.parametrize("name", ["plain", "trimming", "last turn thinks", "no specials"])
@pytest.mark.parametrize("talk", TALKS, ids=range(len(TALKS)))
def test_prompts_have_the_ids_of_the_whole_text(make, name, talk):
    tokenizer = make(TEMPLATES[name])
    segments = SegmentTokenizer(tokenizer)
    for answer in DialogueRenderer(tokenizer, SPECIAL).answers(talk):
        prompt, output = segments.cut(answer.text, answer.start, answer.end)
        (expected,) = tokenizer.encode([answer.text[: answer.start]])
        assert prompt.tolist() == expected.tolist()
        said = answer.text[answer.start : answer.end]
        # What follows the prompt, or the answer by itself where a token would reach over.
        (whole,) = tokenizer.encode([answer.text[: answer.end]])
        (alone,) = tokenizer.encode([said])
        assert output.tolist() in (whole[len(expected) :].tolist(), alone.tolist())


def test_a_token_that_would_reach_into_the_answer_is_cut():
    tokenizer = FakeTokenizer()
    (trace,) = imported(dialogue("user:x", "assistant:\nb"), tokenizer)
    assert tokenizer.decode(trace.prompt_token_ids).endswith("<|s|>assistant\n")
    assert tokenizer.decode(trace.output_token_ids) == "\nb<|e|>"
    (whole,) = tokenizer.encode(["<|s|>assistant\n\nb"])
    assert "\n\n" in [tokenizer.decode([token]) for token in whole]


def test_calls_and_results_and_tools_are_written_out_where_the_template_has_no_place_for_them():
    tokenizer = FakeTokenizer(TEMPLATES["strict"])
    calls = (ToolCall("find", '{"x":1,  "y": "ü"}'), ToolCall("stop", "{}"))
    talk = Dialogue(
        (
            says("user", "go"),
            says("assistant", "Sure.", tool_calls=calls),
            says("tool", "42"),
            says("assistant", "", tool_calls=calls[1:]),
        ),
    )
    first, second = imported(talk, tokenizer)
    assert tokenizer.decode(first.output_token_ids) == (
        'Sure.\n<tool_call>\n{"name": "find", "arguments": {"x":1,  "y": "ü"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call><|e|>'
    )
    prompt = tokenizer.decode(second.prompt_token_ids)
    assert "<|s|>user\n<tool_response>\n42\n</tool_response><|e|>" in prompt
    assert tokenizer.decode(second.output_token_ids).startswith("<tool_call>")


def test_turns_are_joined_for_a_template_that_wants_them_to_alternate():
    tokenizer = FakeTokenizer(TEMPLATES["strict"])
    talk = dialogue(
        "system:be kind", "user:a", "user:b", "assistant:c", "tool:1", "tool:2", "assistant:d"
    )
    first, second = imported(talk, tokenizer)
    assert tokenizer.decode(first.prompt_token_ids) == (
        "<|s|>user\nbe kind\n\na\n\nb<|e|>\n<|s|>assistant\n"
    )
    assert tokenizer.decode(second.prompt_token_ids).endswith(
        "<|s|>user\n<tool_response>\n1\n</tool_response>\n\n"
        "<tool_response>\n2\n</tool_response><|e|>\n<|s|>assistant\n"
    )
    assert (first.prompt_id, second.prompt_id) == ("c1#3", "c1#6")


@pytest.mark.parametrize("with_system", [True, False])
def test_tools_on_offer_stand_in_the_system_turn(with_system):
    tokenizer = FakeTokenizer()
    turns = [*([says("system", "Be kind.")] if with_system else []), says("user", "go")]
    tool = {"type": "function", "function": {"name": "find"}}
    talk = Dialogue((*turns, says("assistant", "ok")), (tool,))
    (trace,) = imported(talk, tokenizer)
    system = "Be kind.\n\n" if with_system else ""
    assert tokenizer.decode(trace.prompt_token_ids) == (
        f'<|s|>system\n{system}<tools>\n{{"type": "function", "function": {{"name": "find"}}}}\n'
        "</tools><|e|>\n<|s|>user\ngo<|e|>\n<|s|>assistant\n"
    )
    assert trace.prompt_id == f"c1#{len(turns)}"


def test_a_template_that_renders_calls_and_tools_is_given_them():
    tokenizer = FakeTokenizer(TEMPLATES["native tools"])
    tool = {"type": "function", "function": {"name": "find"}}
    call = ToolCall("find", '{"x":1}')
    talk = Dialogue((says("user", "go"), says("assistant", "", tool_calls=(call,))), (tool,))
    (trace,) = imported(talk, tokenizer)
    assert tokenizer.decode(trace.prompt_token_ids).startswith("<|s|>tools\n[{")
    assert tokenizer.decode(trace.output_token_ids) == '[find({"x": 1})]<|e|>'


def test_a_dialogue_that_the_template_refuses_is_an_error_of_the_users():
    talk = dialogue("user:a", "assistant:b", "assistant:c")
    with pytest.raises(UserError, match="refuses the dialogue: roles must alternate"):
        imported(talk, FakeTokenizer(TEMPLATES["strict"]))


@pytest.mark.parametrize(
    ("end", "output"), [("stop", "ok<|e|>"), ("length", "ok"), ("abort", "ok")]
)
@pytest.mark.parametrize("name", ["plain", "no specials"])
def test_only_an_answer_that_came_to_its_end_has_the_end_token(name, end, output):
    tokenizer = FakeTokenizer(TEMPLATES[name])
    talk = Dialogue((says("user", "go"), says("assistant", "ok", end=end)))
    (trace,) = imported(talk, tokenizer)
    text = tokenizer.decode(trace.output_token_ids)
    assert (text.replace("\n", ""), trace.finish_reason) == (output, end)


def test_a_continuation_has_no_template():
    tokenizer = FakeTokenizer()
    (trace,) = imported(Continuation("Once ", "upon"), tokenizer)
    assert tokenizer.decode(trace.prompt_token_ids) == "Once "
    assert tokenizer.decode(trace.output_token_ids) == "upon<|e|>"


def test_a_context_cuts_answers_and_leaves_out_those_without_room():
    tokenizer = FakeTokenizer()
    talk = dialogue("user:hello there", "assistant:0123456789", "user:more", "assistant:no room")
    whole = imported(talk, tokenizer)
    room = len(whole[0].prompt_token_ids) + 4
    rules = replace(RULES, context_length=room)
    (trace,) = imported(talk, tokenizer, rules)
    assert trace.output_token_ids == whole[0].output_token_ids[:4]
    assert (trace.finish_reason, trace.context_length) == ("length", room)
    importer = TranscriptImporter(tokenizer, rules)
    assert importer.num_answers(entry(talk)) == 2


def test_the_budget_does_not_tell_how_long_the_answer_is():
    short, long = imported(dialogue("user:a", "assistant:b", "user:a", "assistant:" + "b" * 500))
    assert short.sampling.max_tokens == long.sampling.max_tokens == NO_LIMIT
    asked = SamplingParams(max_tokens=20, temperature=0.5)
    short, long = imported(
        dialogue("user:a", "assistant:b", "user:a", "assistant:" + "b" * 500), sampling=asked
    )
    assert short.sampling == asked
    assert long.sampling == replace(asked, max_tokens=len(long.output_token_ids))


def test_facts_of_a_trace():
    rules = replace(RULES, split_of=lambda session: f"split of {session}")
    body = dialogue("user:a", "assistant:b")
    (trace,) = imported(body, rules=rules)
    assert (trace.prompt_id, trace.session_id) == ("c1#1", "w/s1")
    assert (trace.model, trace.scope) == ("m", "default/m/")
    assert (trace.workload, trace.family, trace.split) == ("w", "f", "split of w/s1")
    (named,) = imported(body, rules=rules, model="gpt", split="test")
    assert (named.model, named.scope, named.split) == ("gpt", "default/gpt/", "test")


def test_times_rise_within_a_session_and_ids_never_repeat():
    importer = TranscriptImporter(FakeTokenizer(), RULES)
    talk = dialogue("user:a", "assistant:b", "user:a", "assistant:b")
    sources = [SOURCE, replace(SOURCE, label="z.jsonl", index=1)]
    traces = [
        trace.trace()
        for source in sources
        for line in (1, 2, 10_000)
        for part in (0, 1)
        for trace in importer.traces(entry(talk, line=line, part=part), source)
    ]
    assert len({trace.trace_id for trace in traces}) == len(traces) == 24
    for part in (0, 1):
        of_part = [t.created_at for t in traces[2 * part :: 4] + traces[2 * part + 1 :: 4]]
        assert len(set(of_part)) == len(of_part)
    times = [traces[k].created_at for k in range(0, 24, 4)]
    assert times == sorted(set(times))


@pytest.mark.parametrize("fraction_us", [0, 123_456])
def test_the_logs_own_times_are_kept_and_told_apart(fraction_us):
    moment = datetime(2026, 3, 1, 12, 0, 0, fraction_us, tzinfo=UTC)
    talk = dialogue("user:a", "assistant:b", "user:a", "assistant:b")
    times = [
        trace.created_at
        for line in (7, 8)
        for trace in imported(talk, line=line, created_at=moment)
    ]
    assert all(abs((time - moment).total_seconds()) < 1 for time in times)
    assert times[0] < times[1]
    if not fraction_us:  # whole seconds: rows of the same second keep the file's order
        assert times[0] < times[2]
    own = datetime(2026, 3, 2, tzinfo=UTC)
    dated = Dialogue((says("user", "a"), says("assistant", "b", created_at=own)))
    assert imported(dated, created_at=moment)[0].created_at == own


def test_turns_last_takes_one_answer_a_row():
    talk = dialogue("user:a", "assistant:b", "user:a", "assistant:c")
    rules = replace(RULES, turns="last")
    (trace,) = imported(talk, rules=rules)
    assert trace == imported(talk)[-1]
    assert TranscriptImporter(FakeTokenizer(), rules).num_answers(entry(talk)) == 1


def test_the_table_of_arrays_is_the_table_of_traces():
    importer = TranscriptImporter(FakeTokenizer(), RULES)
    arrays = [
        trace
        for line, talk in enumerate(TALKS, start=1)
        for trace in importer.traces(entry(talk, line=line), SOURCE)
    ]
    assert any(trace.prompt_ids.base is trace.output_ids.base for trace in arrays)  # views of one
    assert traces_from_table(traces_table(arrays)) == [trace.trace() for trace in arrays]
    assert traces_from_table(traces_table([])) == []


def test_cached_segments_are_forgotten_when_there_are_too_many():
    tokenizer = FakeTokenizer()
    segments = SegmentTokenizer(tokenizer, cache_chars=100)
    texts = [f"<|s|>{'x' * 40}{k}<|e|>" for k in range(20)]
    ids = [segments.tokenize(text).token_ids for text in texts]
    assert segments._num_cached_chars <= 100
    for text, found in zip(texts, ids, strict=True):
        np.testing.assert_array_equal(tokenizer.encode([text])[0], found)
