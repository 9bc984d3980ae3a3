import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_ray.bench.prompt_rows import MAX_LINE_BYTES, BadRowError, Message, Prompt, parse_row
from hvd_ray.errors import UserError
from hvd_ray.types import SamplingParams

USER = {"role": "user", "content": "Which trains run on Sunday?"}


def parse(line: bytes | str) -> Prompt:
    raw = line.encode() if isinstance(line, str) else line
    return parse_row(raw, origin="rail.jsonl:3", default_id="rail:3", default_workload="rail")


def parse_object(**row: object) -> Prompt:
    return parse(json.dumps(row))


def test_a_full_row_keeps_every_field() -> None:
    prompt = parse_object(
        id="rail-1#2",
        workload="trains",
        family="chat",
        session_id="rail-1",
        split="train",
        messages=[{"role": "system", "content": ""}, USER],
        sampling={"temperature": 0.7, "seed": 11, "stop": ["\n\n", "###"]},
    )
    assert prompt == Prompt(
        id="rail-1#2",
        workload="trains",
        family="chat",
        session_id="rail-1",
        split="train",
        messages=(Message("system", ""), Message("user", "Which trains run on Sunday?")),
        prompt=None,
        prompt_token_ids=None,
        sampling=(("seed", 11), ("stop", ("\n\n", "###")), ("temperature", 0.7)),
        origin="rail.jsonl:3",
    )
    hash(prompt)


def test_only_the_prompt_is_required() -> None:
    prompt = parse_object(prompt="Once upon a time")
    assert (prompt.id, prompt.workload, prompt.family) == ("rail:3", "rail", "other")
    assert (prompt.session_id, prompt.split, prompt.sampling) == (None, None, ())
    assert (prompt.messages, prompt.prompt) == ((), "Once upon a time")


def test_token_ids_are_taken_as_they_are() -> None:
    assert parse_object(prompt_token_ids=[0, 49151]).prompt_token_ids == (0, 49151)


def test_null_means_absent() -> None:
    prompt = parse_object(prompt="a", messages=None, id=None, split=None, sampling=None)
    assert prompt.prompt == "a"


def test_other_keys_of_a_log_are_ignored() -> None:
    assert parse_object(prompt="a", created=17, user="u1", request_ms=3.5).prompt == "a"
    message = USER | {"name": "clerk", "tool_calls": None}
    assert parse_object(messages=[message]).messages[0].content == USER["content"]


def test_the_prompts_own_sampling_stands_over_the_runs() -> None:
    prompt = parse_object(prompt="a", sampling={"temperature": 0.7, "stop": "END"})
    params = prompt.sampling_params(SamplingParams(max_tokens=32, top_p=0.9))
    expected = SamplingParams(max_tokens=32, top_p=0.9, temperature=0.7, stop=("END",))
    assert params == expected
    with pytest.raises(UserError, match="min_tokens"):
        parse_object(prompt="a", sampling={"max_tokens": 4}).sampling_params(
            SamplingParams(min_tokens=8)
        )


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "exactly one of messages, prompt, prompt_token_ids, got none"),
        ({"prompt": "a", "messages": [USER]}, "got messages and prompt"),
        ({"prompt": ""}, "empty prompt"),
        ({"prompt": " \n\t"}, "empty prompt"),
        ({"prompt": 5}, "prompt must be text, got 5"),
        ({"messages": []}, "empty prompt"),
        ({"messages": "hello"}, "messages must be a list"),
        ({"messages": {"role": "user"}}, "messages must be a list"),
        ({"messages": ["hello"]}, r"messages\[0\] must be an object"),
        ({"messages": [{"content": "hi"}]}, r"messages\[0\].role must be one of"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "got 'robot'"),
        ({"messages": [{"role": ["user"], "content": "hi"}]}, r"role must be one of"),
        ({"messages": [USER, {"role": "user", "content": None}]}, r"\[1\].content must be text"),
        ({"messages": [{"role": "user"}]}, r"\[0\].content must be text, got null"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "must be text"),
        ({"messages": [{"role": "user", "content": "  "}]}, "empty prompt: the last message"),
        ({"messages": [USER, {"role": "assistant", "content": "Two."}]}, "not assistant"),
        ({"messages": [{"role": "system", "content": "Be kind."}]}, "not system"),
        ({"messages": [USER | {"tool_calls": [{"id": "1"}]}]}, "tool_calls is not read"),
        ({"prompt_token_ids": []}, "empty prompt"),
        ({"prompt_token_ids": "1 2"}, "must be a list of token ids"),
        ({"prompt_token_ids": [1, -1]}, r"prompt_token_ids\[1\] must be a token id, got -1"),
        ({"prompt_token_ids": [True]}, "must be a token id, got True"),
        ({"prompt_token_ids": [1.0]}, "must be a token id"),
        ({"prompt_token_ids": [2**31]}, "must be a token id"),
        ({"prompt": "a", "id": 7}, "id must be text, got 7"),
        ({"prompt": "a", "id": ""}, "id must be 1 to 200 printable"),
        ({"prompt": "a", "workload": "a\x1b[2J"}, "workload must be 1 to 200 printable"),
        ({"prompt": "a", "session_id": "x" * 201}, "session_id must be"),
        ({"prompt": "a", "split": "dev"}, "split must be train or test, got 'dev'"),
        ({"prompt": "a", "split": ["test"]}, "split must be train or test"),
        ({"prompt": "a", "Split": "test"}, "unknown key 'Split': is \"split\" meant"),
        ({"prompt": "a", "session-id": "s"}, 'is "session_id" meant'),
        ({"prompt": "a", "workloads": "w"}, 'is "workload" meant'),
        ({"message": [USER]}, 'is "messages" meant'),
        ({"prompt": "a", "temperature": 0.5}, '"temperature" belongs into "sampling"'),
        ({"messages": [USER], "tools": []}, "describe the tools in the system message"),
        ({"prompt": "a", "sampling": [0.7]}, "sampling must be an object"),
        ({"prompt": "a", "sampling": {"temprature": 1}}, "unknown setting 'temprature'"),
        ({"prompt": "a", "sampling": {"temperature": "hot"}}, "must be a number, got 'hot'"),
        ({"prompt": "a", "sampling": {"temperature": True}}, "must be a number, got True"),
        ({"prompt": "a", "sampling": {"temperature": None}}, "must be a number, got null"),
        (
            {"prompt": "a", "sampling": {"temperature": -1}},
            "temperature must be 0 or >= 1e-05, got -1",
        ),
        ({"prompt": "a", "sampling": {"temperature": 10**400}}, "must be a number"),
        ({"prompt": "a", "sampling": {"top_p": 0}}, "top_p must be in"),
        ({"prompt": "a", "sampling": {"seed": 1.5}}, "seed must be an integer"),
        ({"prompt": "a", "sampling": {"stop": [""]}}, "stop must be"),
        ({"prompt": "a", "sampling": {"stop": 3}}, "sampling.stop must be text"),
    ],
)
def test_a_bad_row_says_what_is_wrong(row: dict[str, object], reason: str) -> None:
    with pytest.raises(BadRowError, match=reason) as caught:
        parse_object(**row)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[]", "expected a JSON object"),
        ("null", "expected a JSON object, got null"),
        ('"just text"', "expected a JSON object"),
        ('{"prompt": "a"', "not one JSON object a line"),
        ('{"prompt": "a"} {"prompt": "b"}', "Extra data at column 17"),
        ("{'prompt': 'a'}", "not one JSON object a line"),
        ('{"prompt": "a", "sampling": {"temperature": NaN}}', "NaN is not JSON"),
        ('{"prompt": "a", "x": -Infinity}', "-Infinity is not JSON"),
        ('{"prompt": "a", "sampling": {"temperature": 1e999}}', "must be a number, got inf"),
        ('{"prompt": "a", "prompt": "b"}', "key 'prompt' stands twice"),
        ('{"prompt": "\\ud800"}', "half a surrogate pair"),
        ('{"prompt": "a", "x": ' + "9" * 5000 + "}", "not JSON that can be read"),
        ('{"x": ' + "[" * 200_000 + "}", "nested too deeply"),
        (b'{"prompt": "caf\xe9"}', "not UTF-8 \\(byte 16"),
        ('{"prompt": "a"}'.encode("utf-16"), "not UTF-8"),
        (b" " * (MAX_LINE_BYTES + 1), "longer than 16 MiB"),
    ],
)
def test_a_line_that_is_no_json_object(line: bytes | str, reason: str) -> None:
    with pytest.raises(BadRowError, match=reason):
        parse(line)


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
KNOWN_KEYS = st.sampled_from(
    ["id", "workload", "session_id", "split", "messages", "prompt", "prompt_token_ids", "sampling"]
)


@given(st.dictionaries(KNOWN_KEYS, ANY_JSON, max_size=4))
def test_any_values_give_a_prompt_or_a_named_reason(row: dict[str, object]) -> None:
    try:
        prompt = parse_object(**row)
    except BadRowError:
        return
    given_forms = (bool(prompt.messages), prompt.prompt is not None, bool(prompt.prompt_token_ids))
    assert sum(given_forms) == 1


@given(st.binary(max_size=40))
def test_any_bytes_give_a_prompt_or_a_named_reason(line: bytes) -> None:
    with pytest.raises(BadRowError):
        parse(line)
