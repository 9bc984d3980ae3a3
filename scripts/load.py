"""Many clients at once, every answer checked, beside a bare vLLM where there is one: `make load`.

Starts `hvd serve` and, with the vllm engine, vLLM's own server with the same arguments. Clients go
to one and the other in turns, so both meet the same machine. Every greedy answer must be the one of
the float32 reference; above capacity there must be 429 with Retry-After and nothing else. What our
layer adds is the difference of the two servers' quantiles.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise

import httpx
from conformance import CheckError, free_port, served

OURS, BARE = "ours", "bare"
NUM_QUESTIONS, MAX_PROMPT_TOKENS = 32, 300
BARE_STARTING_S = 400


@dataclass(frozen=True)
class Question:
    messages: list[dict[str, str]]
    answer: str
    """The float32 reference's."""


@dataclass
class Times:
    """Milliseconds of one server's answers."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    """Between the chunks of a stream."""
    whole: list[float] = field(default_factory=list)
    trip: list[float] = field(default_factory=list)
    """A request that costs the engine nothing: all that it takes is the way there and back."""


def questions(*, max_tokens: int) -> list[Question]:
    """Prompts of the shipped workloads with what plain decoding in float32 answers."""
    from hvd_ray.bench.workloads import load_shipped
    from hvd_ray.config import Config
    from hvd_ray.systems import build_decoder, load_engine
    from hvd_ray.types import Request, SamplingParams

    config = Config(dtype="float32")
    engine, codec = load_engine(config)
    decoder = build_decoder("greedy", engine=engine, codec=codec, config=config)
    asked = []
    for prompt in load_shipped(None).prompts:
        messages = [{"role": turn.role, "content": turn.content} for turn in prompt.messages]
        token_ids = tuple(codec.encode_chat(messages)) if messages else ()
        if not 0 < len(token_ids) <= MAX_PROMPT_TOKENS:
            continue
        request = Request(prompt.id, token_ids, SamplingParams(max_tokens=max_tokens))
        asked.append(Question(messages, decoder.generate(request).text))
        if len(asked) == NUM_QUESTIONS:
            break
    return asked


@contextmanager
def bare_server(words: list[str]) -> Iterator[str]:
    """vLLM's own server with the arguments that `hvd serve` gives its engine."""
    from hvd_ray.config import read_settings
    from hvd_ray.fetch import resolve_model
    from hvd_ray.serving.settings import serve_config
    from hvd_ray.serving.vllm_arguments import engine_arguments
    from hvd_ray.serving.vllm_engine import set_environment

    config = serve_config(read_settings(None, words))
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", resolve_model(config.model).path_or_id, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", config.served_name]
    for name, value in engine_arguments(config).items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            command += [option] if value else []
        else:
            command += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
    if not config.serving.gpus_per_replica:  # as in our replicas
        command += ["--distributed-executor-backend", "uni"]
    set_environment(config)
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    server = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    base = f"http://127.0.0.1:{port}"
    began = time.monotonic()
    try:
        while not is_up(base):
            if server.poll() is not None or time.monotonic() - began > BARE_STARTING_S:
                raise CheckError(f"vLLM's own server did not start: {' '.join(command)}")
            time.sleep(0.5)
        print(f"bare vLLM after {time.monotonic() - began:.0f} s: {base}")
        yield base
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def is_up(base: str) -> bool:
    try:
        return httpx.get(f"{base}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


async def ask(
    client: httpx.AsyncClient, base: str, question: Question, times: Times, max_tokens: int
) -> int:
    """One streamed answer, timed and checked; the status.

    Raises:
        CheckError: the answer is not the reference's, or another error than 429.
    """
    body = {
        "model": "smollm2-135m",
        "messages": question.messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    began, marks, text = time.perf_counter(), [], ""
    async with client.stream("POST", f"{base}/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            return await refused(answer)
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise CheckError(line)
            piece = "".join(c["delta"].get("content") or "" for c in chunk["choices"])
            if piece:
                marks.append(time.perf_counter())
                text += piece
    if text != question.answer:
        raise CheckError(f"{text!r} instead of {question.answer!r}")
    if marks:
        times.first.append((marks[0] - began) * 1e3)
        times.between += [(b - a) * 1e3 for a, b in pairwise(marks)]
    times.whole.append((time.perf_counter() - began) * 1e3)
    return 200


async def refused(answer: httpx.Response) -> int:
    text = (await answer.aread()).decode()
    if answer.status_code != 429 or not answer.headers.get("retry-after"):
        raise CheckError(f"{answer.status_code} {dict(answer.headers)}: {text}")
    if json.loads(text)["error"]["type"] != "rate_limit_error":
        raise CheckError(text)
    return 429


async def load(given: argparse.Namespace, places: dict[str, str], asked: list[Question]) -> None:
    """All clients on one server, then all on the other, and so on."""
    times = {name: Times() for name in places}
    statuses: Counter[int] = Counter()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    until = time.monotonic() + given.seconds
    turn = 0
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        while time.monotonic() < until:
            for name, base in places.items():
                ending = time.monotonic() + given.slice
                clients = [
                    one(client, base, asked, times[name], statuses, ending, given, number + turn)
                    for number in range(given.clients)
                ]
                await asyncio.gather(*clients, trips(client, base, times[name], ending))
            turn += 1
    print(f"{statuses[200]} answers to {given.clients} clients, all the reference's; "
          f"{statuses[429]} times 429")  # fmt: skip
    tell(times)


async def one(
    client: httpx.AsyncClient,
    base: str,
    asked: list[Question],
    times: Times,
    statuses: Counter[int],
    ending: float,
    given: argparse.Namespace,
    number: int,
) -> None:
    """One client: question after question until its turn is over."""
    while time.monotonic() < ending:
        status = await ask(client, base, asked[number % len(asked)], times, given.max_tokens)
        statuses[status] += 1
        number += given.clients
        if status == 429:
            await asyncio.sleep(1)


async def trips(client: httpx.AsyncClient, base: str, times: Times, ending: float) -> None:
    """Requests that need no engine, beside those that do."""
    body = {"model": "smollm2-135m", "prompt": "How long is the way?"}
    while time.monotonic() < ending:
        began = time.perf_counter()
        answer = await client.post(f"{base}/tokenize", json=body)
        if answer.status_code != 200:
            raise CheckError(f"/tokenize: {answer.status_code} {answer.text}")
        times.trip.append((time.perf_counter() - began) * 1e3)
        await asyncio.sleep(0.05)


def tell(times: dict[str, Times]) -> None:
    """Quantiles of each server, and what ours adds to the bare one's."""
    print(f"{'ms':16}" + "".join(f"{name + ' p50':>12}{name + ' p99':>12}" for name in times)
          + (f"{'added p50':>12}{'added p99':>12}" if BARE in times else ""))  # fmt: skip
    for what in ("first", "between", "whole", "trip"):
        found = {name: quantiles(getattr(times[name], what)) for name in times}
        row = [value for pair in found.values() for value in pair]
        if BARE in found:
            row += [ours - bare for ours, bare in zip(found[OURS], found[BARE], strict=True)]
        print(f"{what:16}" + "".join(f"{value:12.1f}" for value in row))


def quantiles(values: list[float]) -> tuple[float, float]:
    if not values:
        return float("nan"), float("nan")
    ordered = sorted(values)
    return ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]


async def overfill(base: str, asked: list[Question], *, capacity: int, max_tokens: int) -> None:
    """Twice as many requests as there is room for: answers for some, 429 at once for the others."""
    times = Times()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        began = time.perf_counter()
        found = Counter(
            await asyncio.gather(
                *(
                    ask(client, base, asked[number % len(asked)], times, max_tokens)
                    for number in range(2 * capacity)
                )
            )
        )
    if set(found) != {200, 429} or found[200] < capacity:
        raise CheckError(f"{dict(found)} of {2 * capacity} with room for {capacity}")
    print(
        f"{2 * capacity} at once with room for {capacity}: {found[200]} answered, {found[429]} "
        f"times 429 with Retry-After, {time.perf_counter() - began:.1f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("torch", "vllm"), default="vllm")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--slice", type=float, default=15, help="seconds on one server at a time")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--no-bare", action="store_true", help="only `hvd serve`")
    parser.add_argument("words", nargs="*", help="further settings of `hvd serve`")
    given = parser.parse_args()
    capacity = given.clients + 1  # and the one of the short trips
    words = ["dtype=float32", f"serving.limits.max_requests={capacity}",
             f"serving.engine={given.engine}", *given.words]  # fmt: skip
    asked = questions(max_tokens=given.max_tokens)
    print(f"{len(asked)} questions answered by the reference", flush=True)
    has_bare = given.engine == "vllm" and not given.no_bare
    with served(words) as ours, bare_server(words) if has_bare else nullcontext("") as bare:
        places = {OURS: ours, **({BARE: bare} if bare else {})}
        asyncio.run(load(given, places, asked))
        asyncio.run(overfill(ours, asked, capacity=capacity, max_tokens=given.max_tokens))
    return 0


if __name__ == "__main__":
    sys.exit(main())
