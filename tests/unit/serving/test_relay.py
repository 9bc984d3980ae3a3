"""The front over endpoints of somebody else: passed through, scoped, limited, in OpenAI's shape."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.types import Message

from hvd_ray.serving.auth import ApiKeys
from hvd_ray.serving.calls import Failure, ReplicaFacts, ReplicaState
from hvd_ray.serving.relay import RelayCall, RelayEvent, RelayHead, _scope, body_of, relayed
from hvd_ray.serving.relay_front import RelayFront, _with_our_error, scope_salt
from hvd_ray.serving.settings import Limits

FACTS = ReplicaFacts("m", "/m", "vllm", "bfloat16", 512, ("auto", "off"))
KNOWN = frozenset({"model", "prompt", "stream", "cache_salt", "vllm_xargs", "user", "tools"})
CALL = RelayCall(
    "POST", "/v1/completions", {"content-type": "application/json"}, b'{"stream": true}'
)
HOST = (b"host", b"127.0.0.1")
TEXT = {"type": "text", "text": "hello"}
KEYS = ApiKeys(((b"k" * 32, "alice"), (b"o" * 32, "bob")))


class Upstream:
    """Endpoints that say what they were asked."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        if body.get("prompt") == "bad":
            error = {"message": "no", "type": "BadRequestError", "param": "prompt", "code": 400}
            return JSONResponse({"error": error}, 400)
        if body.get("prompt") == "broken":
            error = {"message": "dead", "type": "InternalServerError", "param": None, "code": 500}
            told = json.dumps({"error": error})
            events = f"data: {told}\n\ndata: [DONE]\n\n"
            if body.get("stream"):
                return PlainTextResponse(events, media_type="text/event-stream")
            return PlainTextResponse(told, 500, media_type="application/json")
        if body.get("prompt") == "refused":
            error = {"message": "user must be nice, got 7.", "type": "BadRequestError", "code": 400}
            return PlainTextResponse(
                f"data: {json.dumps({'error': error})}\n\ndata: [DONE]\n\n",
                media_type="text/event-stream",
            )
        if body.get("prompt") == "dies":
            return StreamingResponse(self._dies(), media_type="text/event-stream")
        if body.get("prompt") == "slow":
            await asyncio.sleep(60)
        if body.get("prompt") == "late":
            await asyncio.sleep(0.3)
            return StreamingResponse(self._chunks(pause_s=0.04), media_type="text/event-stream")
        if body.get("stream"):
            return StreamingResponse(self._chunks(), media_type="text/event-stream")
        return JSONResponse(body)

    async def _chunks(self, pause_s: float = 0.0) -> AsyncIterator[str]:
        try:
            for number in range(10**6):
                yield f"data: {number}\n\n"
                await asyncio.sleep(pause_s)
        finally:
            self.left.set()

    async def _dies(self) -> AsyncIterator[str]:
        yield "data: 0\n\n"
        await asyncio.sleep(0.01)
        error = {"message": "dead", "type": "InternalServerError", "param": None, "code": 500}
        yield f"data: {json.dumps({'error': error})}\n\ndata: [DONE]\n\n"

    async def metrics(self, request: Request) -> Response:  # noqa: ARG002
        kind = "# TYPE hvd_steps_total counter\n"
        steps = kind + 'hvd_steps_total{model_name="m",source="suffix"} 7.0\n'
        return PlainTextResponse("vllm:spec_decode_num_drafts_total 3.0\n" + steps)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.completions, methods=["POST"]),
                Route("/metrics", self.metrics),
            ]
        )


class Backend:
    def __init__(self, upstream: Upstream) -> None:
        self._app = upstream.app()
        self.is_full = False
        self.sessions: list[str | None] = []

    async def relay(self, call: RelayCall) -> AsyncIterator[RelayEvent | Failure]:
        self.sessions.append(call.session)
        if self.is_full:
            yield Failure("busy", "full")
            return
        async with aclosing(relayed(self._app, call)) as events:
            async for event in events:
                yield event

    async def state(self) -> ReplicaState:
        return ReplicaState(FACTS, is_alive=True)

    async def expositions(self) -> dict[str, str]:
        call = RelayCall("GET", "/metrics", {})
        events = [event async for event in relayed(self._app, call)]
        text = body_of(events).decode()
        return {"one": text, "two": text.replace("7.0", "5.0")}


@pytest.fixture
def backend() -> Backend:
    return Backend(Upstream())


@pytest.fixture
def client(backend: Backend) -> Iterator[TestClient]:
    front = RelayFront(
        backend,  # type: ignore[arg-type]
        FACTS,
        limits=Limits(request_timeout_s=0.5),
        fields={"/v1/completions": KNOWN, "/v1/chat/completions": frozenset({"messages"})},
        has_plugin=True,
    )
    with TestClient(
        front.app(), base_url="http://127.0.0.1", client=("127.0.0.1", 1),
        raise_server_exceptions=False,
    ) as made:  # fmt: skip
        yield made


def ask(client: TestClient, **body: Any) -> Any:
    return client.post("/v1/completions", json={"prompt": "a", **body})


def test_a_body_passes_with_scope_and_mode_put_in(client: TestClient) -> None:
    seen = ask(client, hvd="off", user="u", return_metrics=True).json()
    assert seen == {
        "model": "m",
        "prompt": "a",
        "user": "u",
        "cache_salt": scope_salt("local", None),
        "vllm_xargs": {"hvd": "off"},
    }


def test_the_scope_is_the_tenants_whatever_the_caller_says(backend: Backend) -> None:
    front = RelayFront(backend, FACTS, keys=KEYS, fields={"/v1/completions": KNOWN})  # type: ignore[arg-type]
    salts = {}
    with TestClient(front.app(), base_url="http://127.0.0.1") as client:
        for name, key in (("alice", "k" * 32), ("bob", "o" * 32)):
            for salt in (None, "x", scope_salt("alice", None)):
                headers = {"Authorization": f"Bearer {key}"}
                body = {"prompt": "a", "cache_salt": salt}
                answer = client.post("/v1/completions", json=body, headers=headers)
                salts[name, salt] = answer.json()["cache_salt"]
    assert len(set(salts.values())) == 6


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"foo": 1}, "foo"),
        ({"hvd": "sometimes"}, "hvd"),
        ({"hvd": "cache"}, "hvd"),
        ({"verification": "tiered"}, "verification"),
        ({"hvd": "off", "vllm_xargs": "abc"}, "vllm_xargs"),
        ({"hvd": "off", "vllm_xargs": [1]}, "vllm_xargs"),
        ({"hvd": "off", "vllm_xargs": 7}, "vllm_xargs"),
        ({"hvd": "off", "vllm_xargs": ""}, "vllm_xargs"),
        ({"hvd": ["off"]}, "hvd"),
        ({"cache_salt": 7}, "cache_salt"),
        ({"cache_salt": {"a": 1}}, "cache_salt"),
    ],
)
def test_what_vllm_would_ignore_is_named(client: TestClient, body: Any, param: str) -> None:
    answer = ask(client, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "text", ['{"prompt": "a", "temperature": 1e400}', '{"prompt": "a", "tools": [-1e999]}']
)
def test_what_is_no_json_any_more_is_not_passed_on(client: TestClient, text: str) -> None:
    """Python reads a number beyond all floats as infinity and would write `Infinity`."""
    headers = {"Content-Type": "application/json"}
    answer = client.post("/v1/completions", content=text, headers=headers)
    assert answer.status_code == 400
    assert "too large" in answer.json()["error"]["message"]


@pytest.mark.parametrize("depth", [*range(900, 1000, 9), 5_000])
def test_a_body_nested_deeply_is_passed_on_or_refused(client: TestClient, depth: int) -> None:
    text = '{"prompt": "a", "tools": ' + "[" * depth + "]" * depth + "}"
    headers = {"Content-Type": "application/json"}
    answer = client.post("/v1/completions", content=text, headers=headers)
    assert answer.status_code in (200, 400)


def test_vllms_errors_take_openais_shape(client: TestClient) -> None:
    answer = ask(client, prompt="bad")
    assert answer.status_code == 400
    expected = {
        "message": "no",
        "type": "invalid_request_error",
        "param": "prompt",
        "code": None,
    }
    assert answer.json() == {"error": expected}
    answer = ask(client, prompt="broken")
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    lines = [line for line in ask(client, prompt="dies", stream=True).text.split("\n") if line]
    assert lines[0] == "data: 0"
    assert json.loads(lines[1].removeprefix("data: "))["error"]["type"] == "server_error"
    assert lines[2:] == ["data: [DONE]"]


@pytest.mark.parametrize(
    ("prompt", "status", "param"), [("refused", 400, "user"), ("broken", 500, None)]
)
def test_a_stream_that_never_begins_has_its_errors_status(
    client: TestClient, prompt: str, status: int, param: str | None
) -> None:
    """vLLM opens the stream before its engine reads the request: 200, and one event."""
    answer = ask(client, prompt=prompt, stream=True)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param
    counted = f'hvd_rejected_requests_total{{engine="0",model_name="m",status="{status}"}} 1.0'
    assert counted in client.get("/metrics").text


def test_full_is_429_and_slow_is_408(client: TestClient, backend: Backend) -> None:
    answer = ask(client, prompt="slow")
    assert answer.status_code == 408
    assert answer.json()["error"]["code"] == "timeout"
    backend.is_full = True
    answer = ask(client)
    assert answer.status_code == 429
    assert answer.headers["retry-after"]


def counted(client: TestClient, name: str) -> float:
    found = re.findall(
        rf"^hvd_{name}_total{{.*}} (\S+)$", client.get("/metrics").text, re.MULTILINE
    )
    return sum(map(float, found))


def test_the_time_limit_is_one_for_the_wait_and_the_answer(client: TestClient) -> None:
    answer = ask(client, prompt="late", stream=True)
    *events, last, _ = answer.text.strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
    assert 1 <= len(events) <= 6, "0.2 of 0.5 s were left when the answer began"
    assert counted(client, "rejected_requests") == 1


def test_who_leaves_a_stream_is_counted(backend: Backend) -> None:
    front = RelayFront(backend, FACTS, fields={"/v1/completions": KNOWN})  # type: ignore[arg-type]

    async def run() -> None:
        messages = iter([{"type": "http.request", "body": CALL.body}])
        has_begun = asyncio.Event()

        async def receive() -> Message:
            for message in messages:
                return message
            await has_begun.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message.get("body"):
                has_begun.set()

        scope = {**_scope(CALL), "headers": [(b"content-type", b"application/json"), HOST]}
        await front.app()(scope, receive, send)

    asyncio.run(run())
    with TestClient(front.app(), base_url="http://127.0.0.1", client=("127.0.0.1", 1)) as client:
        assert counted(client, "client_disconnects") == 1
        ask(client)
        assert counted(client, "client_disconnects") == 1


def test_a_conversation_stays_with_its_replica(client: TestClient, backend: Backend) -> None:
    """By its beginning, where nothing names it: the caches of the others do not know it."""
    turns = [{"role": "system", "content": "be kind"}, {"role": "user", "content": [TEXT]}]
    later = [*turns, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "and?"}]
    for messages in (turns, later, [{"role": "user", "content": "goodbye"}]):
        client.post("/v1/chat/completions", json={"messages": messages})
    first, second, other = backend.sessions
    assert first == second != other
    for body in ({"prompt": "abc"}, {"prompt": ["abc"]}, {"prompt": [1, 2]}, {"prompt": [[1, 2]]},
                 {"prompt": [1, 2, 3]}, {"prompt": "x" * 600}, {"prompt": "x" * 700},
                 {"prompt": 7}, {"prompt": []}, {"user": "abc"}):  # fmt: skip
        ask(client, **body)
    text, texts, ids, list_of_ids, more_ids, long, longer, *_, named = backend.sessions[3:]
    assert text == texts != ids == list_of_ids != more_ids
    assert long == longer
    assert named not in (text, other)
    assert all(backend.sessions)


def test_many_messages_are_refused_before_vllm_renders_them(backend: Backend) -> None:
    fields = {"/v1/chat/completions": frozenset({"messages"})}
    front = RelayFront(backend, FACTS, fields=fields)  # type: ignore[arg-type]
    with TestClient(
        front.app(), base_url="http://127.0.0.1", client=("127.0.0.1", 1)
    ) as client:  # fmt: skip
        for messages in (
            [{"role": "user", "content": ""}] * 5_000,
            [{"role": "user", "content": [{"type": "text", "text": ""}] * 5_000}],
        ):
            answer = client.post("/v1/chat/completions", json={"messages": messages})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "messages"


def test_metrics_are_vllms_and_ours(client: TestClient) -> None:
    ask(client, foo=1)
    text = client.get("/metrics").text
    for replica in ("one", "two"):
        assert f'vllm:spec_decode_num_drafts_total{{replica="{replica}"}} 3.0' in text
    assert text.count("# TYPE hvd_steps_total counter") == 1
    assert "hvd_rejected_requests_total" in text
    assert client.get("/ui/state").json()["passes"] == {"suffix": 12}


def test_leaving_a_stream_reaches_the_application() -> None:
    async def run() -> None:
        upstream = Upstream()
        headers = {"content-type": "application/json"}
        body = json.dumps({"stream": True}).encode()
        call = RelayCall("POST", "/v1/completions", headers, body)
        seen: list[RelayEvent] = []
        async with aclosing(relayed(upstream.app(), call)) as events:
            async for event in events:
                seen.append(event)
                if len(seen) == 3:
                    break
        head = seen[0]
        assert isinstance(head, RelayHead)
        assert (head.status, head.content_type) == (200, "text/event-stream; charset=utf-8")
        assert body_of(seen).startswith(b"data: 0\n\ndata: 1\n\ndata: 2\n\n")
        async with asyncio.timeout(5):
            await upstream.left.wait()

    asyncio.run(run())


def test_leaving_an_answer_that_is_not_streamed_ends_the_task_that_makes_it() -> None:
    """vLLM's endpoints wait for that task and for the disconnect, and cancel whichever is later."""

    async def run() -> None:
        has_begun, has_ended = asyncio.Event(), asyncio.Event()

        async def make() -> None:
            has_begun.set()
            try:
                await asyncio.sleep(60)
            finally:
                has_ended.set()

        async def gone(request: Request) -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        async def endpoint(request: Request) -> Response:
            await request.body()
            tasks = [asyncio.create_task(make()), asyncio.create_task(gone(request))]
            _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
            return Response(status_code=499)

        app = Starlette(routes=[Route("/", endpoint, methods=["POST"])])

        async def read() -> None:
            async with aclosing(relayed(app, RelayCall("POST", "/", {}, b"{}"))) as events:
                async for _ in events:
                    pass

        reading = asyncio.create_task(read())
        await has_begun.wait()
        reading.cancel()
        async with asyncio.timeout(2):
            await has_ended.wait()

    asyncio.run(run())


def test_a_death_between_head_and_body_leaves_no_head() -> None:
    """vLLM sends the head of a stream before its engine has looked at the request: as long as
    that is all, another replica may answer."""

    async def app(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError

    async def run() -> list[RelayEvent]:
        return [event async for event in relayed(app, RelayCall("POST", "/", {}))]

    with pytest.raises(RuntimeError):
        asyncio.run(run())


def test_an_answer_without_a_body_is_a_head() -> None:
    async def endpoint(request: Request) -> Response:  # noqa: ARG001
        return Response(status_code=204)

    async def run() -> list[RelayEvent]:
        app = Starlette(routes=[Route("/", endpoint, methods=["POST"])])
        return [event async for event in relayed(app, RelayCall("POST", "/", {}))]

    assert asyncio.run(run()) == [RelayHead(204, "application/json")]


def streamed(*, num_parts: int, pause_s: float, gap_s: float) -> list[RelayEvent]:
    """What comes of a stream of numbers."""

    async def numbers() -> AsyncIterator[bytes]:
        for number in range(num_parts):
            yield b"data: %d\n\n" % number
            await asyncio.sleep(pause_s)

    async def endpoint(request: Request) -> Response:  # noqa: ARG001
        return StreamingResponse(numbers(), media_type="text/event-stream")

    async def run() -> list[RelayEvent]:
        app = Starlette(routes=[Route("/", endpoint, methods=["POST"])])
        call = RelayCall("POST", "/", {})
        return [event async for event in relayed(app, call, gap_s=lambda: gap_s)]

    return asyncio.run(run())


def test_parts_that_come_within_the_gap_are_handed_on_together() -> None:
    events = streamed(num_parts=60, pause_s=0.002, gap_s=0.05)
    head = events[0]
    assert isinstance(head, RelayHead)
    assert head.body == b"data: 0\n\n"  # the first token waits for nobody
    assert body_of(events) == b"".join(b"data: %d\n\n" % number for number in range(60))
    assert len(events) <= 1 + 60 * 0.2  # a fifth of them at the very most


def test_parts_that_come_apart_are_not_held_back_for_others() -> None:
    events = streamed(num_parts=5, pause_s=0.03, gap_s=0.001)
    assert [body_of([event]) for event in events] == [b"data: %d\n\n" % n for n in range(5)]


def test_an_engines_failure_is_openai_shaped_behind_other_events_too() -> None:
    told = json.dumps({"error": {"message": "dead", "param": None, "code": 500}}).encode()
    events = b"data: 1\n\ndata: 2\n\n"
    end = b"data: [DONE]\n\n"
    found = _with_our_error(events + b"data: " + told + b"\n\n" + end)
    assert found.startswith(events)
    assert found.endswith(end)
    error = json.loads(found[len(events) :].removeprefix(b"data: ").partition(b"\n\n")[0])["error"]
    assert error["type"] == "server_error"
    assert _with_our_error(events) == events
    text = b'data: {"text": "data: {\\"error\\""}\n\n'
    assert _with_our_error(text) == text
