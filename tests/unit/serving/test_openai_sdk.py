"""The openai SDK against the endpoints: it parses every answer, and obeys our errors."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from hvd_ray.serving.calls import Failure
from hvd_ray.serving.front import Front
from tests.unit.serving.conftest import make_replica

MESSAGES: Any = [{"role": "system", "content": "b"}, {"role": "user", "content": "adge"}]
GREEDY: Any = {"model": "toy", "max_tokens": 24, "temperature": 0}
Use = Callable[[Any], Awaitable[None]]


class Flaky:
    """A replica that is full for its first calls."""

    def __init__(self, replica: Any, num_refused: int) -> None:
        self._replica, self.num_refused = replica, num_refused

    async def serve(self, call: Any) -> Any:
        if self.num_refused > 0:
            self.num_refused -= 1
            yield (Failure("busy", "full", retry_after_s=0.01),)
            return
        async for batch in self._replica.serve(call):
            yield batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replica, name)


@pytest.fixture
def with_sdk() -> Iterator[Callable[..., None]]:
    replica = make_replica()

    def use(visit: Use, *, num_refused: int = 0, max_retries: int = 0) -> None:
        front = Front(Flaky(replica, num_refused), replica.facts)  # type: ignore[arg-type]

        async def run() -> None:
            transport = httpx.ASGITransport(app=front.app())
            async with (
                httpx.AsyncClient(transport=transport) as client,
                openai.AsyncOpenAI(
                    base_url="http://127.0.0.1/v1",
                    api_key="none",
                    http_client=client,
                    max_retries=max_retries,
                ) as sdk,
            ):
                await visit(sdk)

        asyncio.run(run())

    yield use
    replica.end()


def test_chat(with_sdk: Callable[..., None]) -> None:
    async def visit(sdk: Any) -> None:
        whole = await sdk.chat.completions.create(
            messages=MESSAGES, **GREEDY, logprobs=True, top_logprobs=2
        )
        choice = whole.choices[0]
        assert choice.message.content == "vkcjaerlfeetiglhpfnkdahm"
        assert len(choice.logprobs.content) == whole.usage.completion_tokens == 24
        assert choice.logprobs.content[0].top_logprobs[0].token == "v"
        stream = await sdk.chat.completions.create(
            messages=MESSAGES, **GREEDY, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        deltas = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
        assert "".join(deltas) == choice.message.content
        assert chunks[-1].usage == whole.usage
        assert chunks[-2].choices[0].finish_reason == "length"

    with_sdk(visit)


def test_completions_and_extra_fields(with_sdk: Callable[..., None]) -> None:
    async def visit(sdk: Any) -> None:
        extra = {"hvd": "cache", "return_metrics": True, "top_k": 5, "ignore_eos": True}
        whole = await sdk.completions.create(
            prompt=["badge", "dodge"], n=2, **GREEDY, seed=1, extra_body=extra
        )
        assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
        assert whole.metrics["speculative_decoding"]["num_draft_tokens"] > 0
        scored = await sdk.completions.create(
            prompt=[[2, 1, 4]], model="toy", max_tokens=0, echo=True, logprobs=1
        )
        assert scored.choices[0].text == "bad"
        assert scored.choices[0].logprobs.token_logprobs[0] is None

    with_sdk(visit)


def test_models(with_sdk: Callable[..., None]) -> None:
    async def visit(sdk: Any) -> None:
        assert [model.id async for model in sdk.models.list()] == ["toy"]
        assert (await sdk.models.retrieve("toy")).owned_by == "hvd_ray"

    with_sdk(visit)


def test_errors_have_their_classes(with_sdk: Callable[..., None]) -> None:
    async def visit(sdk: Any) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await sdk.completions.create(prompt="badge", **GREEDY, top_p=3)
        assert (caught.value.param, caught.value.type) == ("top_p", "invalid_request_error")
        with pytest.raises(openai.NotFoundError) as missing:
            await sdk.completions.create(prompt="badge", model="other")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            await sdk.embeddings.create(input="badge", model="toy")

    with_sdk(visit)


def test_the_sdk_waits_and_comes_back_when_we_are_full(with_sdk: Callable[..., None]) -> None:
    async def refused(sdk: Any) -> None:
        with pytest.raises(openai.RateLimitError) as caught:
            await sdk.completions.create(prompt="badge", **GREEDY)
        assert caught.value.response.headers["retry-after"] == "1"

    async def patient(sdk: Any) -> None:
        answer = await sdk.completions.create(prompt="badge", **GREEDY)
        assert answer.usage.completion_tokens == 24

    with_sdk(refused, num_refused=1)
    with_sdk(patient, num_refused=1, max_retries=1)
