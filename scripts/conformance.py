"""Clients that people use, against a served model: `make conformance`.

Starts `hvd serve` (or takes --base), then runs `vllm bench serve`, guidellm and lm-eval where they
are installed, a load of many clients whose every answer is checked, and clients that leave. Each
check prints one line; the exit code counts those that failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

BIN = Path(sys.executable).parent
STARTING_S = 300
TOPICS = ("planets", "rivers", "metals", "cities", "trees", "birds", "colours", "rocks")


# The `vllm` command itself needs the metadata of the GPU package.
BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


class CheckError(Exception):
    """A check did not hold."""


@contextmanager
def served(words: list[str], *, environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """The address of an `hvd serve` that ends with the block; its environment, None: ours."""
    command = [str(BIN / "hvd"), "serve", "--port", str(free_port()), "--json", *words]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stdout is not None
        place = json.loads(server.stdout.readline())
        print(f"served after {place['seconds']} s: {place['api']}")
        yield place["api"].removesuffix("/v1")
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(120)


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def facts(base: str) -> Any:
    return httpx.get(f"{base}/v1/models", timeout=60).json()["data"][0]


def sdk(base: str) -> str:
    """The openai SDK: chat, a stream, what was drafted; with vLLM a tool and a schema."""
    import openai

    client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", timeout=300)
    ask: Any = client.chat.completions.create
    name = facts(base)["id"]
    messages = [{"role": "user", "content": "What is 2 plus 3? Add the numbers."}]
    common = {"model": name, "messages": messages, "temperature": 0, "max_tokens": 48}
    whole = ask(**common).choices[0].message.content
    stream = ask(**common, stream=True)
    joined = "".join(c.delta.content or "" for chunk in stream for c in chunk.choices)
    if joined != whole:
        raise CheckError(f"streamed {joined!r}, whole {whole!r}")
    shares = metrics(base, common)["source_share"]
    told = f"a chat, streamed and whole, its passes {shares}"
    numbers = {"a": {"type": "integer"}, "b": {"type": "integer"}}
    schema = {"type": "object", "properties": numbers, "required": ["a", "b"]}
    function = {"name": "add", "parameters": schema, "strict": True}
    tool = {"type": "function", "function": function}
    choice = {"type": "function", "function": {"name": "add"}}
    if httpx.get(f"{base}/ui/state", timeout=60).json()["engine"] != "vllm":
        try:
            ask(**common, tools=[tool])
        except openai.BadRequestError as error:
            return f"{told}; tools refused: {error.param}"
        raise CheckError("tools were not refused")
    shaped = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
    answer = ask(**common, response_format=shaped).choices[0].message.content
    if set(json.loads(answer)) != {"a", "b"}:
        raise CheckError(answer)
    message = ask(**common, tools=[tool], tool_choice=choice).choices[0].message
    arguments = message.tool_calls[0].function.arguments
    if set(json.loads(arguments)) != {"a", "b"}:
        raise CheckError(arguments)
    chosen = ask(**common, tools=[tool]).choices[0].message
    own = [call.function.name for call in chosen.tool_calls or []] or "none of its own accord"
    return f"{told}; a schema: {answer}; a tool: {arguments}; called: {own}"


def metrics(base: str, common: dict[str, Any]) -> Any:
    """What a response tells of its own speculation."""
    body = {**common, "return_metrics": True}
    answer = httpx.post(f"{base}/v1/chat/completions", json=body, timeout=300).json()
    return answer["metrics"]["speculative_decoding"]


def verification(base: str) -> str:
    """Who checks is the request's choice; without loss the answer is the same."""
    allowed = httpx.get(f"{base}/ui/state", timeout=60).json()["verifications"]
    messages = [{"role": "user", "content": "List five rivers as JSON."}]
    told, answers = [], {}
    for name in (*allowed, "cascade_chow"):
        body = {"messages": messages, "temperature": 0, "max_tokens": 48}
        body |= {"verification": name, "return_metrics": True}
        answer = httpx.post(f"{base}/v1/chat/completions", json=body, timeout=300)
        if name not in allowed:
            if answer.status_code != 400 or answer.json()["error"]["param"] != "verification":
                raise CheckError(answer.text)
            continue
        choice = answer.json()["choices"][0]
        figures = answer.json()["metrics"]["speculative_decoding"]
        answers[name] = choice["message"]["content"]
        made_by, passes = choice.get("verification", "full"), figures["num_target_passes"]
        told.append(f"{name} (made by {made_by}): {passes} target passes")
    if answers.get("nested", answers["full"]) != answers["full"]:
        raise CheckError(str(answers))
    return "; ".join(told)


def bench_serve(base: str) -> str:
    """`vllm bench serve` reads our models, streams, usage and acceptance."""
    if find_spec("vllm") is None:
        return "skipped: vllm is not installed"
    model = facts(base)
    command = [
        *(sys.executable, "-c", BENCH_SERVE),
        *("--base-url", base, "--model", model["id"], "--tokenizer", model["root"]),
        *("--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "24"),
        *("--num-prompts", "12", "--max-concurrency", "4", "--backend", "openai"),
    ]
    output = run(command)
    successful = int(found(r"Successful requests:\s+(\d+)", output))
    if successful != 12:
        raise CheckError(f"{successful} of 12 requests\n{output[-2000:]}")
    accepted = found(r"Acceptance length:\s+([\d.]+)", output)
    return f"12 of 12 requests, acceptance length {accepted}"


def guidellm(base: str) -> str:
    """guidellm finds us healthy and counts our tokens."""
    if find_spec("guidellm") is None:
        return "skipped: guidellm is not installed"
    model = facts(base)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        words = {
            "backend": f"kind=openai_http,target={base},model={model['id']}",
            "profile": "kind=concurrent,streams=2",
            "constraint": "kind=max_requests,count=6",
            "tokenizer": f"kind=hf_auto,model={model['root']}",
            "data": "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
            "output": f"kind=json,path={report}",
        }
        options = [word for name, value in words.items() for word in (f"--{name}", value)]
        command = [sys.executable, "-m", "guidellm", "run", "--disable-console", *options]
        run(command)
        text = report.read_text()
    totals = json.loads(text)["benchmarks"][0]["metrics"]["request_totals"]
    if totals["errored"] or totals["successful"] < 6:
        raise CheckError(str(totals))
    return f"{totals['successful']} requests, none failed"


def lm_eval(base: str) -> str:
    """lm-eval scores prompts, and generates the same with and without drafts."""
    if find_spec("lm_eval") is None:
        return "skipped: lm-eval is not installed"
    with tempfile.TemporaryDirectory() as folder:
        write_tasks(Path(folder))
        drafted, plain = (evaluated(base, Path(folder), mode) for mode in ("auto", "off"))
    if drafted != plain:
        raise CheckError(f"with drafts {drafted}, without {plain}")
    return f"same with and without drafts: {drafted}"


def write_tasks(folder: Path) -> None:
    """A multiple choice that is scored and a question that is answered, without a download."""
    rows = [
        {"q": f"{a} plus {b} is", "good": str(a + b), "choices": [str(a + b), str(a + b + 3)]}
        for a in range(1, 5)
        for b in range(1, 4)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    data = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{q}}",
    }
    choose = {
        "task": "hvd_choose",
        **data,
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    }
    answer = {
        "task": "hvd_answer",
        **data,
        "output_type": "generate_until",
        "doc_to_target": "{{good}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    }
    for task in (choose, answer):
        (folder / f"{task['task']}.yaml").write_text(json.dumps(task))


def evaluated(base: str, folder: Path, mode: str) -> dict[str, float]:
    model = facts(base)
    arguments = f"model={model['id']},tokenizer={model['root']},base_url={base}/v1/completions"
    out = folder / mode
    command = [
        *(sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"),
        *("--model_args", f"{arguments},num_concurrent=2,tokenized_requests=True"),
        *("--tasks", "hvd_choose,hvd_answer", "--include_path", str(folder)),
        *("--gen_kwargs", f"hvd={mode}", "--output_path", str(out), "--log_samples"),
    ]
    run(command, HF_HUB_OFFLINE="1", HF_HOME=str(folder / "hf"))
    results = json.loads(next(out.rglob("results_*.json")).read_text())["results"]
    return {
        f"{task}/{name}": value
        for task, figures in results.items()
        for name, value in figures.items()
        if name.startswith(("acc,", "exact_match,"))
    }


def load(base: str, *, clients: int, seconds: float) -> str:
    """Many clients at once for a while: no error, and no answer but the right one."""

    async def run_load() -> str:
        async with httpx.AsyncClient(timeout=seconds + 120, limits=httpx.Limits()) as client:
            right = [await asked(client, base, topic, hvd="off") for topic in TOPICS]
            until = time.monotonic() + seconds
            waits: list[float] = []
            refused = 0

            async def one(number: int) -> None:
                nonlocal refused
                while time.monotonic() < until:
                    topic = number % len(TOPICS)
                    began = time.monotonic()
                    text = await asked(client, base, TOPICS[topic], stream=number % 2 == 0)
                    if text is None:
                        refused += 1
                        await asyncio.sleep(1)
                        continue
                    waits.append(time.monotonic() - began)
                    if text != right[topic]:
                        raise CheckError(f"{TOPICS[topic]}: {text!r} instead of {right[topic]!r}")

            await asyncio.gather(*(one(number) for number in range(clients)))
        waits.sort()
        middle, late = waits[len(waits) // 2], waits[int(len(waits) * 0.99)]
        return (
            f"{len(waits)} answers to {clients} clients in {seconds:.0f} s, all right; p50 "
            f"{middle:.1f} s, p99 {late:.1f} s; {refused} times 429"
        )

    return asyncio.run(run_load())


async def asked(
    client: httpx.AsyncClient, base: str, topic: str, *, stream: bool = False, **extra: Any
) -> str | None:
    """An answer's text; None: the server was full."""
    body = {
        "messages": [{"role": "user", "content": f"List five {topic} as JSON."}],
        "max_tokens": 32,
        "temperature": 0,
        "stream": stream,
        **extra,
    }
    answer = await client.post(f"{base}/v1/chat/completions", json=body)
    if answer.status_code == 429:
        return None
    if answer.status_code != 200:
        raise CheckError(f"{answer.status_code}: {answer.text}")
    if not stream:
        return str(answer.json()["choices"][0]["message"]["content"])
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    if lines[-1] != "[DONE]":
        raise CheckError(f"a stream ended on {lines[-1]!r}")
    chunks = [json.loads(line) for line in lines[:-1]]
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])


def overhead(base: str) -> str:
    """What serving adds to a cycle: the time between chunks, less what the cycle itself took."""
    if httpx.get(f"{base}/ui/state", timeout=60).json()["engine"] == "vllm":
        return "skipped: vLLM does not tell what a cycle took; compare with --bare"
    body = {
        "messages": [{"role": "user", "content": "Tell a long story."}],
        "max_tokens": 128,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_steps": True,
        "hvd": "off",
    }
    added_ms: list[float] = []
    for _ in range(3):
        arrived: list[tuple[float, float]] = []
        url = f"{base}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=300) as answer:
            for line in answer.iter_lines():
                if '"steps"' in line:
                    step = json.loads(line.removeprefix("data: "))["choices"][0]["hvd"]["steps"][0]
                    took_ms = (step["draft_us"] + step["verify_us"]) / 1e3
                    arrived.append((time.perf_counter() * 1e3, took_ms))
        added_ms += [b - a - took for (a, _), (b, took) in pairwise(arrived)]
    return f"{len(added_ms)} cycles, {spread(added_ms)} ms added to a cycle"


def compared(base: str, bare: str) -> str:
    """The same streams on this server and on a bare one, in turns, four at a time."""

    async def timed(client: httpx.AsyncClient, place: str, number: int) -> tuple[float, float]:
        body = {
            "model": facts_of[place],
            "prompt": f"Number {number}: once upon a time",
            "max_tokens": 16,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        began, first = time.perf_counter(), None
        async with client.stream("POST", f"{place}/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if first is None and line.startswith("data: {"):
                    first = time.perf_counter()
        return (first or 0) - began, time.perf_counter() - began

    async def run_both() -> str:
        found: dict[str, list[tuple[float, float]]] = {base: [], bare: []}
        async with httpx.AsyncClient(timeout=300) as client:
            for turn in range(16):
                for place in (base, bare) if turn % 2 else (bare, base):
                    numbers = range(turn * 4, turn * 4 + 4)
                    found[place] += await asyncio.gather(
                        *(timed(client, place, number) for number in numbers)
                    )
        told = []
        for index, what in enumerate(("first token", "whole")):
            ours, theirs = ([t[index] * 1e3 for t in found[place]] for place in (base, bare))
            told.append(f"{what}: ours {spread(ours)} ms, bare {spread(theirs)} ms")
        return "; ".join(told)

    facts_of = {place: facts(place)["id"] for place in (base, bare)}
    return asyncio.run(run_both())


def spread(values: list[float]) -> str:
    ordered = sorted(values)
    return f"p50 {ordered[len(ordered) // 2]:.1f}, p99 {ordered[int(len(ordered) * 0.99)]:.1f}"


def leavers(base: str, *, number: int) -> str:
    """Clients that leave in the middle; nothing of theirs goes on."""

    async def run_leavers() -> str:
        body = {
            "messages": [{"role": "user", "content": "Tell a long story."}],
            "max_tokens": 2000,
            "stream": True,
        }

        async def leave(client: httpx.AsyncClient) -> None:
            url = f"{base}/v1/chat/completions"
            try:
                async with client.stream("POST", url, json=body) as answer:
                    async for _ in answer.aiter_bytes():
                        return
            except httpx.TimeoutException:
                return

        async with httpx.AsyncClient(timeout=5) as client:
            for _ in range(number // 8):
                await asyncio.gather(*(leave(client) for _ in range(8)))
        began = time.monotonic()
        async with httpx.AsyncClient(timeout=60) as client:
            while True:
                state = (await client.get(f"{base}/ui/state")).json()
                if state["num_running"] + state["num_waiting"] == 0:
                    return f"{number} left, the last slot was free after {took(began)}"
                if time.monotonic() - began > 30:
                    raise CheckError(str(state))
                await asyncio.sleep(0.05)

    return asyncio.run(run_leavers())


def took(began: float) -> str:
    return f"{time.monotonic() - began:.2f} s"


def run(command: list[str], **environment: str) -> str:
    done = subprocess.run(
        command,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false", **environment},
        capture_output=True,
        text=True,
        timeout=900,
    )
    output = done.stdout + done.stderr
    if done.returncode:
        raise CheckError(output[-3000:])
    return output


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise CheckError(f"{pattern!r} is not in the output:\n{text[-3000:]}")
    return match.group(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", help="an address that is served already")
    parser.add_argument("--bare", help="another server of the same model, to compare with")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--leavers", type=int, default=200)
    parser.add_argument("--only", default="", help="names of checks, by comma")
    parser.add_argument("words", nargs="*", help="settings of `hvd serve`, e.g. dtype=float32")
    given = parser.parse_args()
    checks: dict[str, Callable[[str], str]] = {
        "openai": sdk,
        "verification": verification,
        "overhead": overhead,
        "vllm bench serve": bench_serve,
        "guidellm": guidellm,
        "lm-eval": lm_eval,
        "load": lambda base: load(base, clients=given.clients, seconds=given.seconds),
        "leavers": lambda base: leavers(base, number=given.leavers),
    }
    if given.bare:
        checks["bare"] = lambda base: compared(base, given.bare)
    chosen = chosen_of(parser, given.only, checks)
    if given.base:
        return judge(given.base, checks, chosen)
    with served([*("dtype=float32", "serving.limits.max_requests=256"), *given.words]) as base:
        return judge(base, checks, chosen)


def chosen_of(
    parser: argparse.ArgumentParser, only: str, checks: Mapping[str, object]
) -> list[str]:
    """The checks that `--only` names, or all; a name that is none ends the program."""
    chosen = only.split(",") if only else list(checks)
    if unknown := set(chosen) - set(checks):
        parser.error(f"--only: {', '.join(sorted(unknown))}: expected some of {', '.join(checks)}")
    return chosen


def judge(base: str, checks: dict[str, Callable[[str], str]], chosen: list[str]) -> int:
    num_failed = 0
    for name in chosen:
        began = time.monotonic()
        try:
            told = checks[name](base)
        except Exception as error:  # noqa: BLE001 - one check must not end the others
            num_failed += 1
            told = f"FAILED: {error}"
        print(f"{name:18}{told} ({took(began)})", flush=True)
    return num_failed


if __name__ == "__main__":
    sys.exit(main())
