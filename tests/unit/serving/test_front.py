"""The endpoints over a toy: shapes, streams, logprobs, usage, errors."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from hvd_ray.engines.toy import ToyCodec, ToyEngine
from hvd_ray.serving.api_error import ApiError
from hvd_ray.serving.calls import Call, Event, Failure, Piece, ReplicaState
from hvd_ray.serving.front import Front
from hvd_ray.serving.replica import Replica
from hvd_ray.serving.settings import Limits
from tests.unit.serving.conftest import make_replica

GREEDY = {"temperature": 0, "max_tokens": 24}


def complete(client: TestClient, **body: Any) -> Any:
    answer = client.post("/v1/completions", json={"prompt": "badge", **GREEDY, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def chat(client: TestClient, **body: Any) -> Any:
    messages = [{"role": "user", "content": "badge"}]
    answer = client.post("/v1/chat/completions", json={"messages": messages, **GREEDY, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(client: TestClient, path: str, **body: Any) -> list[Any]:
    """The chunks of a stream; it must end as OpenAI's do."""
    asked = {"prompt": "badge"} if path == "/v1/completions" else None
    asked = asked or {"messages": [{"role": "user", "content": "badge"}]}
    answer = client.post(path, json={**asked, **GREEDY, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def joined(chunks: list[Any], index: int = 0) -> str:
    texts = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                texts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
    return "".join(texts)


def test_the_answer_is_plain_decodings(client: TestClient) -> None:
    texts = {mode: complete(client, hvd=mode)["choices"][0]["text"] for mode in ("off", "cache")}
    again = complete(client)["choices"][0]["text"]
    assert len(texts["off"]) == 24
    assert texts["off"] == texts["cache"] == again


def test_a_completion_has_openais_shape(client: TestClient) -> None:
    answer = complete(client)
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 24, "total_tokens": 29}
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["logprobs"] is None


def test_a_chat_has_openais_shape(client: TestClient) -> None:
    answer = chat(client)
    assert answer["object"] == "chat.completion"
    message = answer["choices"][0]["message"]
    assert message["role"] == "assistant"
    assert message["content"] == complete(client)["choices"][0]["text"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("extra", [{}, {"stop": ["tig", "zz"]}, {"temperature": 1.0, "seed": 7}])
def test_a_stream_joined_is_the_whole(client: TestClient, path: str, extra: Any) -> None:
    whole = complete(client, **extra) if path == "/v1/completions" else chat(client, **extra)
    chunks = stream(client, path, stream_options={"include_usage": True}, **extra)
    choice = whole["choices"][0]
    assert joined(chunks) == (choice.get("text") or choice["message"]["content"])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    reasons = [c["choices"][0]["finish_reason"] for c in chunks[:-1]]
    assert reasons[-1] == choice["finish_reason"]
    assert not any(reasons[:-1])


def test_chat_streams_open_with_the_role(client: TestClient) -> None:
    first = stream(client, "/v1/chat/completions")[0]["choices"][0]
    assert first["delta"] == {"role": "assistant", "content": ""}


def test_running_usage_ends_at_the_whole(client: TestClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(client, "/v1/completions", stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 24
    assert all(chunk["usage"]["prompt_tokens"] == 5 for chunk in chunks)


def test_a_stop_string_is_left_out_or_kept(client: TestClient) -> None:
    text = complete(client)["choices"][0]["text"]
    stop = text[7:10]
    cut = complete(client, stop=stop)["choices"][0]
    kept = complete(client, stop=stop, include_stop_str_in_output=True)["choices"][0]
    assert cut["text"] == text[: text.index(stop)]
    assert kept["text"] == cut["text"] + stop
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)


def test_choices_of_several_prompts_are_in_order(client: TestClient) -> None:
    answer = complete(client, prompt=["abc", "abd"], n=2, temperature=1.0, seed=3, ignore_eos=True)
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert answer["usage"]["prompt_tokens"] == 6
    assert answer["usage"]["completion_tokens"] == 96
    alone = complete(client, prompt="abd", temperature=1.0, seed=3, ignore_eos=True)["choices"][0][
        "text"
    ]
    assert texts[2] == alone


def test_requests_without_a_seed_have_streams_of_their_own(client: TestClient) -> None:
    """Case S11: also one after the other, and the choices of one request."""
    drawn = {"temperature": 1.5, "ignore_eos": True, "max_tokens": 40}
    texts = [complete(client, **drawn)["choices"][0]["text"] for _ in range(4)]
    texts += [choice["text"] for choice in complete(client, n=4, **drawn)["choices"]]
    texts += [chat(client, **drawn)["choices"][0]["message"]["content"] for _ in range(2)]
    assert len(set(texts)) == 10
    seeded = {complete(client, seed=0, **drawn)["choices"][0]["text"] for _ in range(2)}
    assert len(seeded) == 1


def test_streams_of_several_choices_keep_them_apart(client: TestClient) -> None:
    extra = {"n": 3, "temperature": 1.0, "seed": 11}
    whole = complete(client, **extra)
    chunks = stream(client, "/v1/completions", **extra)
    assert [joined(chunks, index) for index in range(3)] == [
        choice["text"] for choice in whole["choices"]
    ]


def test_echo_with_logprobs_scores_the_prompt(client: TestClient) -> None:
    body = {"prompt": [[1, 2, 3, 1, 2], [4, 5, 6]], "echo": True, "logprobs": 1}
    answer = complete(client, **body, max_tokens=1)
    first, second = (choice["logprobs"] for choice in answer["choices"])
    assert first["tokens"][:5] == ["a", "b", "c", "a", "b"]
    assert len(first["token_logprobs"]) == 6
    assert len(second["token_logprobs"]) == 4
    assert first["token_logprobs"][0] is None
    assert first["top_logprobs"][0] is None
    assert first["text_offset"] == [0, 1, 2, 3, 4, 5]
    engine = ToyEngine()
    expected = engine.logits_after([1, 2]).log_softmax(-1)
    assert first["token_logprobs"][2] == pytest.approx(float(expected[3]), abs=1e-5)
    best = max(first["top_logprobs"][2].values())
    assert best == pytest.approx(float(expected.max()), abs=1e-5)
    assert first["token_logprobs"][5] == pytest.approx(max(first["top_logprobs"][5].values()))


def test_nothing_is_generated_for_max_tokens_0(client: TestClient) -> None:
    answer = complete(client, prompt="abc", echo=True, logprobs=0, max_tokens=0)
    choice = answer["choices"][0]
    assert choice["text"] == "abc"
    assert len(choice["logprobs"]["token_logprobs"]) == 3
    assert answer["usage"]["completion_tokens"] == 0
    chunks = stream(client, "/v1/completions", prompt="abc", echo=True, logprobs=0, max_tokens=0)
    assert joined(chunks) == "abc"


def test_chat_logprobs(client: TestClient) -> None:
    content = chat(client, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert len(content) == 24
    assert len(content[0]["top_logprobs"]) == 2
    assert content[0]["bytes"] == list(content[0]["token"].encode())
    chunks = stream(client, "/v1/chat/completions", logprobs=True, top_logprobs=2)
    streamed = [
        entry
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert streamed == content


def test_metrics_of_a_request_have_vllms_fields(client: TestClient) -> None:
    complete(client)
    metrics = complete(client, return_metrics=True)["metrics"]
    found = metrics["speculative_decoding"]
    assert found["num_accepted_draft_tokens"] > 0
    assert sum(found["acceptance_histogram"]) == found["num_spec_steps"]
    expected = 1 + found["num_accepted_draft_tokens"] / found["num_spec_steps"]
    assert found["mean_acceptance_length"] == pytest.approx(expected)
    assert sum(found["source_share"].values()) == pytest.approx(1)
    assert found["emitted_per_pass"] > 1
    assert metrics["time_to_first_token_ms"] > 0
    plain = complete(client, return_metrics=True, hvd="off")["metrics"]["speculative_decoding"]
    assert plain["source_share"] == {"none": 1.0}
    assert plain["num_draft_tokens"] == 0


def test_steps_and_spans_on_request(client: TestClient) -> None:
    complete(client)
    choice = complete(client, return_steps=True)["choices"][0]
    assert "".join(span["text"] for span in choice["hvd"]["spans"]) == choice["text"]
    assert {span["source"] for span in choice["hvd"]["spans"]} == {"suffix", "none"}
    assert sum(step["emitted"] for step in choice["hvd"]["steps"]) == 24


def test_token_ids_on_request(client: TestClient) -> None:
    choice = complete(client, return_token_ids=True)["choices"][0]
    assert choice["prompt_token_ids"] == [2, 1, 4, 7, 5]
    assert len(choice["token_ids"]) == 24


def test_prometheus_counts_tokens_by_source(client: TestClient) -> None:
    complete(client)
    complete(client)
    text = client.get("/metrics").text
    figures = {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if not line.startswith("#")
    }
    labels = 'engine="0",model_name="toy"'
    assert figures[f"vllm:generation_tokens_total{{{labels}}}"] == 48
    assert figures[f"vllm:prompt_tokens_total{{{labels}}}"] == 10
    drafted = figures[f"vllm:spec_decode_num_draft_tokens_total{{{labels}}}"]
    assert drafted == figures[f'hvd_draft_tokens_total{{{labels},source="suffix"}}']
    accepted = figures[f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}}"]
    by_place = [v for k, v in figures.items() if "accepted_tokens_per_pos_total" in k]
    assert sum(by_place) == accepted
    assert figures[f"vllm:time_to_first_token_seconds_count{{{labels}}}"] == 2
    assert figures[f"hvd_cache_tokens{{{labels}}}"] == 48


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"foo": 1}, "foo"),
        ({"best_of": 2}, "best_of"),
        ({"logits_processors": ["mine.Processor"]}, "logits_processors"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"verification": "tiered"}, "verification"),
        ({"hvd": "sometimes"}, "hvd"),
        ({"hvd": "eagle3"}, "hvd"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"99": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1000}}, "logit_bias"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"prompt": ["a"] * 9, "n": 128}, "prompt"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop_token_ids": [99]}, "stop_token_ids"),
        ({"seed": 1.5}, "seed"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 508}, "max_tokens"),
        ({"min_tokens": 25}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"echo": "yes"}, "echo"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"more": True}}, "stream_options"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, 99]}, "prompt"),
        ({"prompt": {"text": "abc"}}, "prompt"),
        ({"prompt": "a" * 512}, "prompt"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"request_id": "white space"}, "request_id"),
        ({"request_id": "naïve"}, "request_id"),
    ],
)
def test_what_cannot_be_served_is_named(client: TestClient, body: Any, param: str) -> None:
    for is_stream in (False, True):
        asked = {"prompt": "badge", **GREEDY, "stream": is_stream, **body}
        if is_stream and "stream_options" in body:
            continue
        answer = client.post("/v1/completions", json=asked)
        error = answer.json()["error"]
        assert answer.status_code == 400, answer.text
        assert error["param"] == param
        assert param in error["message"]
        assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "body",
    [
        {"best_of": 1},
        {"suffix": None},
        {"tools": [], "tool_choice": "auto"},
        {"response_format": {"type": "text"}},
        {"verification": "full"},
        {"unheard_of": None},
        {"stop": None, "ignore_eos": True},
        {"user": "me", "service_tier": "auto"},
    ],
)
def test_values_that_ask_for_nothing_pass(client: TestClient, body: Any) -> None:
    answer = client.post("/v1/completions", json={"prompt": "badge", **GREEDY, **body})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        ([], "messages"),
        ([{"role": "wizard", "content": "a"}], "role"),
        ([{"content": "a"}], "role"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "type"),
        ([{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}], "tool_calls"),
        (["a"], "messages"),
    ],
)
def test_messages_of_another_form(client: TestClient, messages: Any, word: str) -> None:
    answer = client.post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"
    assert word in answer.json()["error"]["message"]


def test_text_parts_are_joined(client: TestClient) -> None:
    parts = [{"type": "text", "text": "ba"}, {"type": "text", "text": "dge"}]
    messages = [{"role": "user", "content": parts}]
    assert chat(client, messages=messages)["choices"][0] == chat(client)["choices"][0]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
        ("GET", "/v1/models/other", 404),
    ],
)
def test_other_errors_are_openais_too(
    client: TestClient, method: str, path: str, status: int
) -> None:
    answer = client.request(method, path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    "content", ["{", "[]", '"a"', "", "{" * 100_000, '{"prompt": NaN}', "\xff"]
)
def test_bodies_that_are_no_objects(client: TestClient, content: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = client.post("/v1/completions", content=content.encode("latin-1"), headers=headers)
    assert answer.status_code == 400
    assert "body" in answer.json()["error"]["message"]


def test_bodies_have_a_limit_and_a_type(open_client: Callable[..., TestClient]) -> None:
    client = open_client(limits=Limits(max_body_bytes=1000))
    answer = client.post("/v1/completions", json={"prompt": "a" * 2000})
    assert answer.status_code == 413
    answer = client.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"})
    assert answer.status_code == 415


def test_a_model_that_is_not_served(client: TestClient) -> None:
    answer = client.post("/v1/completions", json={"model": "gpt-5", "prompt": "a"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


def test_models_version_health(client: TestClient) -> None:
    card = client.get("/v1/models").json()["data"][0]
    assert card["id"] == "toy"
    assert card["root"] == "/toys/toy"
    assert client.get("/v1/models/toy").json() == card
    assert client.get("/version").json()["version"]
    assert client.get("/health").json() == {"status": "ok"}


def test_tokens_there_and_back(client: TestClient) -> None:
    found = client.post("/tokenize", json={"prompt": "abc", "return_token_strs": True}).json()
    assert found == {
        "count": 3,
        "max_model_len": 512,
        "tokens": [1, 2, 3],
        "token_strs": ["a", "b", "c"],
    }
    messages = [{"role": "user", "content": "ab"}]
    assert client.post("/tokenize", json={"messages": messages}).json()["tokens"] == [1, 2]
    assert client.post("/detokenize", json={"tokens": [1, 2]}).json() == {"prompt": "ab"}
    assert client.post("/detokenize", json={"tokens": [99]}).status_code == 400
    assert client.post("/tokenize", json={}).status_code == 400


def test_the_page_is_whole_and_fetches_nothing_elsewhere(client: TestClient) -> None:
    answer = client.get("/ui")
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "sha256-" in policy
    assert "http://" not in answer.text.replace("http://www.w3.org", "")
    assert "https://" not in answer.text
    state = client.get("/ui/state").json()
    assert state["policy"] == "suffix"
    assert state["notes"][0].startswith("hvd_cost left out: nothing is at hand")
    assert state["policy"] == "suffix"
    assert state["modes"] == ["off", "cache", "auto"]


def test_replicas_end_of_their_own(open_client: Callable[..., TestClient]) -> None:
    """A dead decoding thread: 503 from health, from metrics a zero, from requests 503."""
    replica = make_replica()
    client = open_client(replica)
    replica.end()
    assert client.get("/health").status_code == 503
    assert 'hvd_replicas_alive{engine="0",model_name="toy"} 0.0' in client.get("/metrics").text
    answer = client.post("/v1/completions", json={"prompt": "abc"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"]


def test_logs_name_requests_and_hold_no_text(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "badgebadgebadge"
    with caplog.at_level("DEBUG", logger="hvd_ray"):
        headers = {"X-Request-Id": "mine-1"}
        body = {"prompt": secret, **GREEDY}
        answer = client.post("/v1/completions", json=body, headers=headers)
        client.post("/v1/completions", json={**body, "top_p": 7})
        client.post("/v1/completions", json={**body, "stream": True})
    assert answer.headers["x-request-id"] == "mine-1"
    assert "mine-1" in caplog.text
    assert "prompt_tokens=15 output_tokens=24" in caplog.text
    assert secret not in caplog.text
    assert answer.json()["choices"][0]["text"] not in caplog.text


@pytest.mark.parametrize("is_slow", [False, True])
def test_metrics_are_there_when_no_replica_is(
    is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the front refuses meanwhile is what one wants to see; so is the zero."""
    monkeypatch.setattr("hvd_ray.serving.front.STATE_WAIT_S", 0.01)
    replica = make_replica()

    class Gone:
        async def state(self) -> ReplicaState:
            if is_slow:
                await asyncio.sleep(3600)
            raise ApiError(503, "no replica answers", code="no_replica", retry_after_s=5)

    front = Front(Gone(), replica.facts)  # type: ignore[arg-type]
    with TestClient(front.app(), base_url="http://127.0.0.1", client=("127.0.0.1", 1)) as client:
        client.post("/v1/completions", json={"foo": 1})
        text = client.get("/metrics").text
    replica.end()
    assert 'hvd_replicas_alive{engine="0",model_name="toy"} 0.0' in text
    assert 'hvd_rejected_requests_total{engine="0",model_name="toy",status="400"} 1.0' in text


def test_a_server_that_ends_finishes_what_it_has_and_refuses_the_rest() -> None:
    async def run() -> None:
        replica = make_replica()
        front = Front(replica, replica.facts)
        transport = httpx.ASGITransport(front.app(), client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            asking = asyncio.create_task(
                client.post("/v1/completions", json={"prompt": "badge", "max_tokens": 200})
            )
            while not front.gate.num_inside:
                await asyncio.sleep(0)
            closing = asyncio.create_task(front.gate.close())
            await asyncio.sleep(0)
            refused = await client.post("/v1/completions", json={"prompt": "badge"})
            for answer in (refused, await client.get("/health")):
                assert answer.status_code == 503
                assert answer.headers["retry-after"] == "5"
                assert answer.json()["error"]["code"] == "shutting_down"
            assert (await client.get("/metrics")).status_code == 200
            assert not closing.done()
            assert (await asking).status_code == 200
            await asyncio.wait_for(closing, 5)
        replica.end()

    asyncio.run(run())


class Silent:
    """Replicas that are not there: nothing ever comes."""

    async def serve(self, _call: Any) -> Any:
        await asyncio.sleep(3600)
        yield ()


class Dying:
    """Replicas of which the first dies in the middle of an answer."""

    def __init__(self, alive: Replica) -> None:
        self.alive = alive
        self.asked: list[str] = []

    async def serve(self, call: Call) -> AsyncIterator[tuple[Event, ...]]:
        self.asked.append(call.request_id)
        is_first = len(self.asked) == 1
        async for batch in self.alive.serve(call):
            yield batch
            if is_first and any(isinstance(event, Piece) for event in batch):
                yield (Failure("dead", "the replica died; the request may be sent again"),)
                return


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_of_which_nothing_was_seen_survives_its_replica(
    client: TestClient, is_stream: bool
) -> None:
    expected = complete(client, return_token_ids=True)
    backend = Dying(make_replica())
    front = Front(backend, backend.alive.facts)  # type: ignore[arg-type]
    with TestClient(front.app(), base_url="http://127.0.0.1", client=("127.0.0.1", 1)) as dying:
        body = {"prompt": "badge", **GREEDY, "return_token_ids": True, "stream": is_stream}
        answer = dying.post("/v1/completions", json=body)
    backend.alive.end()
    if is_stream:  # what was seen cannot be taken back
        assert '"type":"server_error"' in answer.text
        assert len(backend.asked) == 1
        return
    assert answer.json()["choices"] == expected["choices"]
    assert answer.json()["usage"] == expected["usage"]
    assert len(set(backend.asked)) == 2


@pytest.mark.parametrize("is_stream", [False, True])
def test_without_a_replica_the_time_limit_still_holds(
    monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    monkeypatch.setattr("hvd_ray.serving.exchange.GRACE_S", 0.0)
    replica = make_replica()
    front = Front(Silent(), replica.facts, limits=Limits(request_timeout_s=0.05))  # type: ignore[arg-type]
    with TestClient(front.app(), base_url="http://127.0.0.1", client=("127.0.0.1", 1)) as client:
        answer = client.post("/v1/completions", json={"prompt": "a", "stream": is_stream})
    replica.end()
    assert answer.status_code == 408
    assert answer.json()["error"]["code"] == "timeout"


def test_a_budget_that_nobody_named_is_no_fault(open_client: Callable[..., TestClient]) -> None:
    client = open_client(make_replica({"limits": {"max_output_tokens": 8}}))
    answer = client.post("/v1/completions", json={"prompt": "badge", "temperature": 0})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] <= 8
    refused = client.post("/v1/completions", json={"prompt": "badge", "max_tokens": 16})
    assert refused.status_code == 400


@pytest.mark.parametrize("prompt", [[], [1, "a"], [1.5], [True], [[]], {"text": "a"}])
def test_a_prompt_of_no_form_is_told_the_forms(
    open_client: Callable[..., TestClient], prompt: Any
) -> None:
    answer = open_client().post("/v1/completions", json={"prompt": prompt})
    assert answer.status_code == 400
    assert "prompt: expected a text, token ids" in answer.json()["error"]["message"]


def counting_codec(read: list[int]) -> ToyCodec:
    """Notes how much it is given to read, its copies too."""

    class Counting(ToyCodec):
        def encode(self, text: str) -> list[int]:
            read.append(len(text))
            return super().encode(text)

    return Counting()


def test_an_endless_prompt_is_refused_by_its_beginning(
    open_client: Callable[..., TestClient],
) -> None:
    read: list[int] = []
    client = open_client(make_replica(codec=counting_codec(read)))
    for path, body in (
        ("/v1/completions", {"prompt": "abc" * 300_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc" * 300_000}]}),
    ):
        answer = client.post(path, json=body)
        assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert 0 < max(read) < 100_000


def test_many_small_messages_are_as_much_as_one_that_is_endless(
    open_client: Callable[..., TestClient],
) -> None:
    """Each is within the limit; together they are refused by their beginning or number."""
    read: list[int] = []
    replica = make_replica({"limits": {"max_prompt_tokens": 10}}, codec=counting_codec(read))
    client = open_client(replica)
    for path in ("/v1/chat/completions", "/tokenize"):
        for content, number in (("a" * 300, 4_000), ("", 4_097), ("", 100_000)):
            messages = [{"role": "user", "content": content}] * number
            answer = client.post(path, json={"messages": messages})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "messages"
    assert max(read) <= 100
    parts = [{"type": "text", "text": ""}] * 5_000
    answer = client.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}]}
    )
    assert answer.status_code == 400


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_body_that_does_not_come_is_given_up(path: str) -> None:
    """Header and one byte, then nothing: the time of the request runs all the while."""
    replica = make_replica()
    front = Front(replica, replica.facts, limits=Limits(request_timeout_s=0.2))
    sent: list[Any] = []
    pieces = [{"type": "http.request", "body": b"{", "more_body": True}]

    async def receive() -> Any:
        if not pieces:
            await asyncio.sleep(60)
        return pieces.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")]
    scope = {
        **{"type": "http", "method": "POST", "path": path, "headers": headers},
        **{"query_string": b"", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)},
    }

    async def run() -> None:
        async with asyncio.timeout(10):
            await front.app()(scope, receive, send)

    try:
        asyncio.run(run())
    finally:
        replica.end()
    assert sent[0]["status"] == 408
    assert json.loads(sent[1]["body"])["error"]["code"] == "timeout"


def test_the_bodys_time_is_taken_from_the_requests() -> None:
    """A body that took most of the limit leaves the answer the rest."""
    limits: list[float] = []

    class Backend:
        async def serve(self, call: Call) -> AsyncIterator[tuple[Event, ...]]:
            limits.append(call.limit_s)
            yield (Failure("busy", "full"),)

    replica = make_replica()
    front = Front(Backend(), replica.facts, limits=Limits(request_timeout_s=5.0))  # type: ignore[arg-type]
    body = json.dumps({"prompt": "a"}).encode()
    pieces = [body[:1], body[1:]]

    async def receive() -> Any:
        if not pieces:
            await asyncio.sleep(60)
        if len(pieces) == 1:
            await asyncio.sleep(0.5)
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def send(message: Any) -> None: ...

    headers = [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")]
    scope = {
        **{"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers},
        **{"query_string": b"", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)},
    }
    try:
        asyncio.run(front.app()(scope, receive, send))
    finally:
        replica.end()
    assert limits
    assert 0 < limits[0] <= 4.5


@pytest.mark.parametrize(
    "body",
    ['{"prompt": "a", "temperature": 1e400}', '{"prompt": "a", "logit_bias": {"1": -1e999}}'],
)
def test_a_number_that_no_float_holds_is_refused(client: TestClient, body: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = client.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == 400
    assert "too large" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "path", ["/health", "/metrics", "/version", "/openapi.json", "/ui", "/ui/state", "/v1/models"]
)
@pytest.mark.parametrize(
    ("peer", "host", "status"),
    [
        ("127.0.0.1", "127.0.0.1:8000", 200),
        ("127.0.0.1", "localhost", 200),
        ("127.0.0.1", "evil.example", 401),
        ("203.0.113.9", "127.0.0.1", 401),
    ],
)
def test_without_keys_nothing_is_shown_to_a_foreign_name(
    open_client: Callable[..., TestClient], path: str, peer: str, host: str, status: int
) -> None:
    """A page whose name was made to point here sends its own name along."""
    client = open_client(peer=peer)
    assert client.get(path, headers={"Host": host}).status_code == status
