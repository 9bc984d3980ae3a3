"""The default model on Ray Serve, spoken to by the openai SDK as people speak to it."""

import asyncio
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from hvd_ray.serving.settings import ServeConfig, serve_config

pytestmark = [pytest.mark.model, pytest.mark.ray]

MESSAGES: Any = [{"role": "user", "content": "Write three words in Greek, then an emoji. 你好 🙂"}]
SAMPLING: Any = {"max_tokens": 32, "temperature": 0, "extra_body": {"ignore_eos": True}}
KEY = "e2e-key-0123456789abcdef"


def _config(model: Path, **policy: Any) -> ServeConfig:
    limits = {"max_requests": 4, "max_running": 2}
    return serve_config(
        {
            "model": str(model),
            "dtype": "float32",
            "num_threads": 1,
            "policy": policy,
            "serving": {"limits": limits, "cpus_per_replica": 0.5},
        }
    )


@pytest.fixture(scope="module")
def base(ray_session: Any, default_model_path: Path) -> Iterator[str]:  # noqa: ARG001
    """A served model on a free port of loopback."""
    from ray import serve

    from hvd_ray.serving.run import deploy

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    try:
        deploy(_config(default_model_path, name="suffix"))
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()


@pytest.fixture(scope="module")
def sdk(base: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base}/v1", api_key=KEY, max_retries=0, timeout=120)


def state(base: str) -> Any:
    return httpx.get(f"{base}/ui/state", timeout=30).json()


def test_chat_streamed_whole_and_without_drafts_agree(sdk: openai.OpenAI) -> None:
    model = sdk.models.list().data[0].id
    ask: Any = sdk.chat.completions.create
    without = {**SAMPLING, "extra_body": {"ignore_eos": True, "hvd": "off"}}
    plain = ask(model=model, messages=MESSAGES, **without)
    text = plain.choices[0].message.content
    whole = ask(model=model, messages=MESSAGES, **SAMPLING, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.content == text
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens == 32
    options = {"include_usage": True}
    chunks = list(
        ask(model=model, messages=MESSAGES, **SAMPLING, stream=True, stream_options=options)
    )
    deltas = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(deltas) == text
    assert chunks[-1].usage == whole.usage
    assert len([delta for delta in deltas if delta]) < 32  # drafts of the cache were accepted


def test_completions_with_stops_and_scored_prompts(sdk: openai.OpenAI) -> None:
    prompt = "One, two, three, four, five, one, two, three,"
    ask: Any = sdk.completions.create
    whole = ask(model="smollm2-135m", prompt=prompt, **SAMPLING)
    stop = whole.choices[0].text[5:8]
    cut = ask(model="smollm2-135m", prompt=prompt, **SAMPLING, stop=stop)
    assert cut.choices[0].text == whole.choices[0].text[: whole.choices[0].text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    scored = ask(model="smollm2-135m", prompt=[prompt, "Hi"], max_tokens=1, echo=True, logprobs=1)
    first = scored.choices[0].logprobs
    assert first.token_logprobs[0] is None
    assert all(value < 0 for value in first.token_logprobs[1:])
    assert "".join(first.tokens) == scored.choices[0].text
    assert scored.choices[0].text.startswith(prompt)


def test_the_sdk_reads_our_errors(sdk: openai.OpenAI) -> None:
    ask: Any = sdk.completions.create
    with pytest.raises(openai.BadRequestError) as caught:
        ask(model="smollm2-135m", prompt="Hi", extra_body={"best_of": 3})
    assert caught.value.param == "best_of"
    with pytest.raises(openai.NotFoundError):
        ask(model="other", prompt="Hi")
    with pytest.raises(openai.BadRequestError, match="leave room"):
        ask(model="smollm2-135m", prompt="Hi", max_tokens=9000)


def test_full_says_429_and_who_leaves_frees_the_place(base: str) -> None:
    body = {"messages": MESSAGES, "max_tokens": 2000, "temperature": 0, "ignore_eos": True}

    async def run() -> list[int]:
        url = f"{base}/v1/chat/completions"
        async with httpx.AsyncClient(timeout=60) as client:
            hanging = [asyncio.create_task(client.post(url, json=body)) for _ in range(4)]
            await asyncio.sleep(2)
            answers = [await client.post(url, json=body) for _ in range(2)]
            assert all(answer.headers["retry-after"] for answer in answers)
            assert answers[0].json()["error"]["type"] == "rate_limit_error"
            for task in hanging:
                task.cancel()
            await asyncio.gather(*hanging, return_exceptions=True)
            return [answer.status_code for answer in answers]

    assert asyncio.run(run()) == [429, 429]
    deadline = time.monotonic() + 5
    while (found := state(base))["num_running"] + found["num_waiting"]:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def test_the_policy_changes_without_a_restart(base: str, default_model_path: Path) -> None:
    """A bad one is refused, the old one stays, and the cache is still warm."""
    from hvd_ray.serving.run import deploy

    cached = state(base)["num_cached_tokens"]
    assert cached > 0
    deploy(_config(default_model_path, name="rule_match", min_match=3))
    found = state(base)
    assert (found["policy"], found["num_cached_tokens"]) == ("rule_match", cached)
    deploy(_config(default_model_path, name="hvd_tau", predictor="/nowhere"))
    found = state(base)
    assert found["policy"] == "rule_match"
    assert "/nowhere" in found["refused"]
    text = httpx.get(f"{base}/metrics", timeout=30).text
    assert 'hvd_settings_refused{engine="0",model_name="smollm2-135m"} 1.0' in text


def test_rays_own_endpoint_shows_the_figures(base: str, ray_session: Any) -> None:
    """Case M05: without a scrape of the front, beside Ray's and Serve's own."""
    node = ray_session.nodes()[0]
    endpoint = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    wanted = {
        line.partition(" ")[0].partition("{")[0]
        for line in httpx.get(f"{base}/metrics", timeout=30).text.splitlines()
        if line.startswith(("hvd_", "vllm:")) and "_bucket" not in line and "_created" not in line
    }
    assert len(wanted) > 15
    deadline = time.monotonic() + 60
    lacking = wanted
    while lacking:
        assert time.monotonic() < deadline, lacking
        text = httpx.get(endpoint, timeout=30).text
        lacking = {name for name in wanted if f"ray_{name.replace(':', '_')}{{" not in text}
        time.sleep(0.5)


def test_a_killed_replica_ends_its_stream_alone_and_comes_back(base: str, ray_session: Any) -> None:
    actors = ray_session.util.list_named_actors(all_namespaces=True)
    name = next(actor["name"] for actor in actors if "hvd#Replica" in actor["name"])
    body = {
        "messages": MESSAGES,
        "max_tokens": 2000,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    lines: list[str] = []
    with httpx.stream("POST", f"{base}/v1/chat/completions", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            lines.append(line)
            if len(lines) == 8:
                ray_session.kill(ray_session.get_actor(name, namespace="serve"))
    said = [line for line in lines if line]
    assert said[-1] == "data: [DONE]"
    assert '"type":"server_error"' in said[-2]
    deadline = time.monotonic() + 240
    while httpx.get(f"{base}/health", timeout=60).status_code != 200:
        assert time.monotonic() < deadline, "the replica did not come back"
        time.sleep(0.5)
    again = httpx.post(
        f"{base}/v1/chat/completions", json={**body, "max_tokens": 4, "stream": False}, timeout=240
    )
    assert again.json()["usage"]["completion_tokens"] == 4
