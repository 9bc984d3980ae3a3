"""Rows of every format to entries: roles, texts, answers, facts; and bad rows named."""

import json
from datetime import UTC, datetime

import pytest

from hvd_ray.traces.transcripts_entries import (
    BadLogRowError,
    Continuation,
    ToolCall,
)
from hvd_ray.traces.transcripts_formats import (
    LOG_FORMATS,
    RowDefaults,
    entries_of,
    format_of,
    parse_json,
)

DEFAULTS = RowDefaults(id="log.jsonl:3", workload="log")
CALL = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"x":1}'}}


def entries(row, log_format):
    return entries_of(row, log_format=log_format, line=3, defaults=DEFAULTS)


def turns(entry):
    return [f"{message.role}:{message.content}" for message in entry.body.messages]


CHAT = {
    "id": "c1",
    "workload": "talk",
    "split": "test",
    "messages": [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "image_url"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "42", "tool_call_id": "1", "name": "find"},
        {"role": "assistant", "content": "ok", "reasoning_content": "hm"},
    ],
}
REQUEST = {
    "session_id": "s9",
    "request": {
        "model": "gpt-x",
        "temperature": 0.5,
        "max_tokens": 30,
        "top_k": None,
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "said before"},
            {"role": "user", "content": "b"},
        ],
    },
    "response": {
        "id": "chatcmpl-1",
        "created": 1_700_000_000,
        "choices": [
            {"message": {"role": "assistant", "content": "one"}, "finish_reason": "stop"},
            {"message": {"content": "two"}, "finish_reason": "length"},
        ],
    },
}
SHAREGPT = {
    "id": 17,
    "system": "Be kind.",
    "conversations": [
        {"from": "human", "value": "a"},
        {"from": "gpt", "value": "b"},
        {"from": "observation", "value": "c"},
        {"from": "function_call", "value": "d"},
    ],
}
TRAJ = {
    "environment": "swe_main",
    "trajectory": [{"action": "ls", "observation": "x", "response": "ls"}],
    "history": [
        {"role": "system", "content": "SETTING", "agent": "primary"},
        {"role": "user", "content": "demo?", "is_demo": True},
        {"role": "assistant", "content": "demo!", "is_demo": True},
        {"role": "user", "content": [{"type": "text", "text": "go"}]},
        {"role": "assistant", "content": "ls", "thought": "hm", "action": "ls"},
    ],
}
STEPS = {
    "instance_id": "i-1",
    "trajectory": [
        {
            "action": "ls",
            "observation": "x",
            "response": "I list.",
            "query": [{"role": "user", "content": "go"}],
            "tool_calls": [CALL],
        },
        {
            "action": "submit",
            "observation": "",
            "response": "Done.",
            "query": [
                {"role": "user", "content": "go"},
                {"role": "assistant", "content": "I list."},
                {"role": "tool", "content": "x"},
            ],
        },
    ],
}
NEBIUS = {
    "instance_id": "i-2",
    "trajectory": [
        {"role": "system", "system_prompt": "SETTING", "text": None, "mask": True},
        {"role": "user", "text": "go"},
        {"role": "ai", "text": "ls"},
    ],
}


def acts(response_id: str, *calls: dict, content: str = "") -> dict:
    message = {"role": "assistant", "content": content, "tool_calls": list(calls)}
    return {
        "source": "agent",
        "action": "run",
        "timestamp": "2026-01-01T00:00:01",
        "args": {"command": "ls", "thought": "not this"},
        "tool_call_metadata": {
            "function_name": "find",
            "model_response": {"id": response_id, "choices": [{"message": message}]},
        },
    }


EVENTS = [
    {"source": "agent", "action": "system", "args": {"content": "SETTING", "tools": [CALL]}},
    {"source": "user", "action": "message", "args": {"content": "go"}},
    {"source": "environment", "observation": "recall", "content": "unseen"},
    acts("r1", CALL, CALL, content="I look."),
    {"observation": "run", "content": "x"},
    acts("r1", CALL, CALL, content="I look."),
    {"observation": "run", "content": "y"},
    {"source": "agent", "action": "read", "args": {"path": "a", "thought": "Hm."}},
    {"observation": "agent_state_changed", "content": "unseen"},
    {"source": "agent", "action": "message", "args": {"content": "done"}},
]
OPENHANDS = {"instance_id": "i-3", "history": EVENTS}
COMPLETION = {"prompt": "Once ", "completion": "upon"}

ROWS = {
    "chat": [CHAT],
    "requests": [REQUEST, {"messages": CHAT["messages"], "response": {"choices": []}}],
    "sharegpt": [SHAREGPT],
    "swe-agent": [TRAJ, STEPS, NEBIUS],
    "openhands": [OPENHANDS, EVENTS, {"history": [[EVENTS[1], EVENTS[4]]]}],
    "completions": [COMPLETION],
}


@pytest.mark.parametrize("log_format", LOG_FORMATS)
def test_the_format_is_told_by_the_keys(log_format):
    assert [format_of(row) for row in ROWS[log_format]] == [log_format] * len(ROWS[log_format])


@pytest.mark.parametrize("row", [{"text": "a"}, {"history": []}, [], ["a"], [{"role": "user"}], 1])
def test_an_unknown_row_tells_no_format(row):
    assert format_of(row) is None


def test_chat():
    (entry,) = entries(CHAT, "chat")
    assert turns(entry) == [
        "system:Be kind.",
        "user:a [image_url]",
        "assistant:",
        "tool:42",
        "assistant:<think>\nhm\n</think>\n\nok",
    ]
    assert entry.body.messages[2].tool_calls == (ToolCall("find", '{"x":1}'),)
    assert entry.body.answers == [2, 4]
    assert (entry.id, entry.session_id, entry.line) == ("c1", "c1", 3)
    assert (entry.workload, entry.family, entry.split) == ("talk", "other", "test")
    assert (entry.created_at, entry.sampling, entry.model) == (None, None, "")


def test_a_row_without_names_gets_those_of_its_place():
    (entry,) = entries({"messages": CHAT["messages"]}, "chat")
    assert (entry.id, entry.session_id, entry.workload) == ("log.jsonl:3", "log.jsonl:3", "log")


def test_the_older_form_of_calls_and_tools():
    call = {"name": "find", "arguments": {"x": "ü"}}
    row = {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "function_call": call},
        ],
        "functions": [{"name": "find"}],
    }
    (entry,) = entries(row, "chat")
    assert entry.body.messages[1].tool_calls == (ToolCall("find", '{"x": "ü"}'),)
    assert entry.body.tools == ({"type": "function", "function": {"name": "find"}},)


@pytest.mark.parametrize("wrap", [lambda x: x, json.dumps, lambda x: {"status": 200, "body": x}])
def test_requests(wrap):
    row = REQUEST | {key: wrap(REQUEST[key]) for key in ("request", "response")}
    one, two = entries(row, "requests")
    assert turns(one) == ["user:a", "assistant:said before", "user:b", "assistant:one"]
    assert turns(two)[-1] == "assistant:two"
    assert (one.body.answers, two.body.answers) == ([3], [3])  # what was said before is no answer
    assert [e.body.messages[-1].end for e in (one, two)] == ["stop", "length"]
    assert (one.part, two.part) == (0, 1)
    assert (one.id, one.session_id, one.model) == ("chatcmpl-1", "s9", "gpt-x")
    assert one.created_at == datetime.fromtimestamp(1_700_000_000, UTC)
    assert (one.sampling.temperature, one.sampling.max_tokens) == (0.5, 30)


def test_requests_of_one_conversation_share_a_session_by_how_it_began():
    def row(*texts: str) -> dict:
        roles = ("system", "user", "assistant", "user")
        past = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
        answer = {"message": {"content": "yes"}}
        return {"request": {"messages": past}, "response": {"choices": [answer]}}

    sessions = [
        entries(row(*texts), "requests")[0].session_id
        for texts in (("s", "a"), ("s", "a", "b", "c"), ("s", "other"), ("t", "a"))
    ]
    assert sessions[0] == sessions[1]
    assert len(set(sessions)) == 3


def test_completions_endpoint():
    row = {
        "request": {"prompt": "Once "},
        "response": {"choices": [{"text": "upon", "finish_reason": "length"}]},
    }
    (entry,) = entries(row, "requests")
    assert entry.body == Continuation("Once ", "upon", "length")


@pytest.mark.parametrize(
    ("row", "log_format"),
    [
        (REQUEST | {"response": {"error": {"message": "overloaded"}}}, "requests"),
        ({"messages": [{"role": "user", "content": "a"}]}, "chat"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "chat"),
        ({"prompt": "a", "completion": ""}, "completions"),
    ],
)
def test_a_row_without_an_answer_holds_nothing(row, log_format):
    assert entries(row, log_format) == []


def test_sharegpt():
    (entry,) = entries(SHAREGPT, "sharegpt")
    assert turns(entry) == ["system:Be kind.", "user:a", "assistant:b", "tool:c", "assistant:d"]
    assert (entry.id, entry.body.answers) == ("17", [2, 4])


def test_a_trajectory_with_its_history():
    (entry,) = entries(TRAJ, "swe-agent")
    assert turns(entry)[2:] == ["assistant:demo!", "user:go", "assistant:ls"]
    assert entry.body.answers == [4]  # a demonstration was not written by the model


def test_a_trajectory_of_steps_alone():
    first, second = entries(STEPS, "swe-agent")
    assert turns(first) == ["user:go", "assistant:I list."]
    assert first.body.messages[-1].tool_calls == (ToolCall("find", '{"x":1}'),)
    assert turns(second) == ["user:go", "assistant:I list.", "tool:x", "assistant:Done."]
    assert second.body.answers == [3]
    assert (first.session_id, second.session_id) == ("i-1", "i-1")


def test_a_trajectory_of_messages():
    (entry,) = entries(NEBIUS, "swe-agent")
    assert turns(entry) == ["system:SETTING", "user:go", "assistant:ls"]


@pytest.mark.parametrize(
    "row", [OPENHANDS, EVENTS, OPENHANDS | {"history": [EVENTS[:4], EVENTS[4:]]}]
)
def test_openhands(row):
    (entry,) = entries(row, "openhands")
    assert turns(entry) == [
        "system:SETTING",
        "user:go",
        "assistant:I look.",
        "tool:x",
        "tool:y",
        "assistant:Hm.",
        "assistant:done",
    ]
    assert entry.body.answers == [2, 5, 6]
    asked, unkept = entry.body.messages[2], entry.body.messages[5]
    assert asked.tool_calls == (ToolCall("find", '{"x":1}'),) * 2
    assert asked.created_at == datetime(2026, 1, 1, 0, 0, 1, tzinfo=UTC)
    assert unkept.tool_calls == (ToolCall("read", '{"path": "a"}'),)
    assert entry.body.tools == (CALL,)


def test_a_completion():
    (entry,) = entries(COMPLETION, "completions")
    assert entry.body == Continuation("Once ", "upon")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("2026-03-01T12:00:00Z", datetime(2026, 3, 1, 12, tzinfo=UTC)),
        ("2026-03-01 12:00", datetime(2026, 3, 1, 12, tzinfo=UTC)),
        ("2026-03-01T13:00:00+01:00", datetime(2026, 3, 1, 12, tzinfo=UTC)),
        (1_772_366_400, datetime(2026, 3, 1, 12, tzinfo=UTC)),
        (1_772_366_400_000, datetime(2026, 3, 1, 12, tzinfo=UTC)),
        (1_772_366_400.5, datetime(2026, 3, 1, 12, microsecond=500_000, tzinfo=UTC)),
    ],
)
@pytest.mark.parametrize("key", ["created_at", "timestamp", "created"])
def test_times(key, value, expected):
    (entry,) = entries(CHAT | {key: value}, "chat")
    assert entry.created_at == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("train", "train"),
        ("Test", "test"),
        ("dev", "test"),
        ("validation", "test"),
        ("train_sft", ""),
        (5, ""),
        (None, ""),
    ],
)
def test_a_side_goes_by_many_names_and_an_unknown_one_is_left_to_the_session(said, expected):
    (entry,) = entries(CHAT | {"split": said}, "chat")
    assert entry.split == expected


@pytest.mark.parametrize(
    ("seed", "kept"), [(2**63 - 1, 2**63 - 1), (-(2**63), -(2**63)), (2**63, None), (10**30, None)]
)
def test_a_seed_that_no_trace_can_hold_is_left_out(seed, kept):
    row = REQUEST | {"request": REQUEST["request"] | {"seed": seed}}
    assert entries(row, "requests")[0].sampling.seed == kept


GOOD = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("row", "log_format", "reason"),
    [
        ("text", "chat", "expected a JSON object, got 'text'"),
        ([1], "chat", "expected a JSON object, got a list"),
        ({}, "chat", "messages must be a list of messages, got null"),
        ({"messages": []}, "chat", "got an empty list"),
        ({"messages": ["a"]}, "chat", r"messages\[0\] must be a message, got 'a'"),
        ({"messages": [{"role": "boss"}]}, "chat", r"messages\[0\].role must be one of .* 'boss'"),
        ({"messages": [{"role": "user", "content": 5}]}, "chat", r"content must be .* a number"),
        (
            {"messages": [{"role": "user", "content": [5]}]},
            "chat",
            r"content\[0\] must be a content",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "chat", "half a surrogate pair"),
        ({"messages": [{"role": "user", "content": [{"type": "\ud800"}]}]}, "chat", r"\[0\].type"),
        ({"messages": GOOD, "tools": [{"name": "\ud800"}]}, "chat", "tools holds half a surrogate"),
        (
            {"messages": GOOD, "tools": '[{"name": "a", "description": "\\udfff"}]'},
            "chat",
            "tools holds half a surrogate",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]},
            "chat",
            r"tool_calls\[0\] must be an object with a function's name",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": 3}]},
            "chat",
            "must be a list, got a num",
        ),
        ({"messages": GOOD, "tools": "x"}, "chat", "tools is text, but no JSON"),
        ({"messages": GOOD, "tools": [1]}, "chat", "tools must be a list of objects"),
        ({"messages": GOOD, "id": "a\nb"}, "chat", "id must be printable text"),
        ({"messages": GOOD, "id": "a" * 500}, "chat", "id must be at most 400 characters"),
        ({"messages": GOOD, "created_at": "soon"}, "chat", "created_at must be an ISO 8601 time"),
        ({"messages": GOOD, "created": 1e40}, "chat", "created must be an ISO 8601 time"),
        ({"messages": GOOD, "created_at": "0001-01-01T00:00:00+14:00"}, "chat", "created_at must"),
        ({"messages": GOOD, "created_at": "9999-12-31T23:59:59.999999"}, "chat", "year 9999"),
        ({"messages": GOOD, "created_at": "9999-12-31T23:59:59-14:00"}, "chat", "created_at must"),
        ({"response": {}}, "requests", "request must be an object, got null"),
        (REQUEST | {"response": "oops"}, "requests", "response is text, but no JSON"),
        (REQUEST | {"response": {"choices": 5}}, "requests", "choices must be a list of objects"),
        (
            REQUEST | {"request": REQUEST["request"] | {"temperature": -1}},
            "requests",
            "request: sampling: temperature must be 0 or >= 1e-05",
        ),
        ({"conversations": [{"from": "x", "value": ""}]}, "sharegpt", "conversations.0..role must"),
        ({"trajectory": 3}, "swe-agent", "trajectory must be a list of steps"),
        ({"trajectory": [{"action": "a"}]}, "swe-agent", r"trajectory\[0\].query must be"),
        (
            REQUEST | {"request": REQUEST["request"] | {"temperature": 10**400}},
            "requests",
            "temperature must be 0 or >= 1e-05",
        ),
        ({"history": [5]}, "openhands", "history must be a list of events"),
        (
            [*EVENTS, {"action": "run", "args": 7}],
            "openhands",
            r"history\[10\].args must be an obj",
        ),
        ([*EVENTS, {"action": "system", "args": [1]}], "openhands", "args must be an object"),
        (
            [*EVENTS, EVENTS[3] | {"tool_call_metadata": "x"}],
            "openhands",
            "metadata must be an obj",
        ),
        (
            [*EVENTS, EVENTS[3] | {"tool_call_metadata": {"model_response": 1}}],
            "openhands",
            "model_response must be an object",
        ),
        (
            [*EVENTS, EVENTS[3] | {"tool_call_metadata": {"model_response": {"choices": [5]}}}],
            "openhands",
            "choices must be a list of objects",
        ),
        (
            [*EVENTS, {"source": "agent", "action": "run", "args": {"a": "\ud800"}}],
            "openhands",
            r"history\[10\].args holds half",
        ),
        ({"prompt": 5, "completion": ""}, "completions", "prompt must be text, got a number"),
        ({"prompt": "a"}, "completions", "completion must be text, got null"),
    ],
)
def test_a_bad_row_is_named_by_its_key(row, log_format, reason):
    with pytest.raises(BadLogRowError, match=reason) as caught:
        entries(row, log_format)
    assert "\n" not in str(caught.value)


def test_reasons_do_not_quote_what_people_wrote():
    secret = "my name is Mia Li and I live in Austin"
    for row in (secret, [secret], {"messages": secret}, {"messages": [{"role": secret}]}):
        with pytest.raises(BadLogRowError) as caught:
            entries(row, "chat")
        assert "Mia" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"a": 1', "is no JSON: .* at column 8"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b"1" * 5000, "too many digits"),
    ],
)
def test_broken_json_is_a_bad_row(text, reason):
    with pytest.raises(BadLogRowError, match=reason):
        parse_json(text)
