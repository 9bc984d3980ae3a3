"""Mixed traffic for a while against a served model, and what must hold of it: `make soak`.

    make soak                                    # 20 minutes
    python scripts/soak.py --seconds 600 --report out/soak.md

Starts `hvd serve` on loopback with three tenants and a small cache; clients ask chats and
completions, whole and streamed, long and short, with parameters of every kind, some wrong, some
without a valid key, and some leave in the middle. Memory, open files and threads must stay flat, no
request may be left running, least of all one whose client has gone, the cache stays under its cap,
greedy answers stay what they were, and the counters add up. Exit code 1 where something does not
hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil

from hvd_ray.bench.stored_report import report_place
from hvd_ray.commands.traces_progress import shown_progress
from hvd_ray.home import atomic_path
from hvd_ray.provenance import provenance

BIN = Path(sys.executable).parent
REPORT = Path(__file__).parents[1] / "docs" / "reports" / "soak.md"
TENANTS = ("ann", "bob", "eve")
FULL_SECONDS = 1200.0
"""A run that is shorter needs a report of its own."""
CACHE_TOKENS = 4000
MAX_TOKENS = 24
MAX_RUNNING = 4
LEAVER_ASKS = 4000
"""Tokens that a client asks for that will leave: minutes of work, if nobody noticed."""
LEAVER_TOKENS, SPARE_TOKENS = 8, 200
"""What one may cost in the mean, read or not: the cycles until it is noticed, of few tokens each;
and beside that, for the few whose first draft was a long one."""
LEAVING_S = 10.0
"""How long the last slot of clients that left may stay taken: a cycle, on a crowded machine."""
SAMPLE_S = 5.0
GROWTH_MIB = 48.0
"""What a process may grow by from the middle of the run to its end; and by the same share."""
GROWTH_SHARE = 0.05
TOPICS = ("planets", "rivers", "metals", "cities", "trees", "birds", "colours", "rocks")
PARAMETERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "seed": 3},
    {"temperature": 0.7, "min_p": 0.1, "presence_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.4},
    {"temperature": 0.0, "logit_bias": {"42": -100, "300": 2}, "min_tokens": 8},
    {"temperature": 0.0, "stop": ["\n", "."], "logprobs": 3},
    {"temperature": 0.6, "n": 2, "hvd": "cache"},
    {"temperature": 0.0, "hvd": "off", "echo": True},
)
WRONG: tuple[dict[str, Any], ...] = (
    {"temperature": -1},
    {"nonsense": 1},
    {"max_tokens": 10**7},
    {"prompt": []},
    {"logit_bias": {"x": 1}},
)


@dataclass(frozen=True)
class Place:
    """Where it is served, and by whose processes."""

    base: str
    keys: dict[str, str]
    process: int

    def header(self, tenant: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[tenant]}"}


@dataclass(frozen=True)
class Sample:
    """The server at one moment."""

    at_s: float
    num_cached: int
    num_active: int
    rss_mib: dict[str, float]
    num_files: dict[str, int]
    num_threads: dict[str, int]


@dataclass
class Seen:
    """What the clients got."""

    answers: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    left: int = 0
    faults: list[str] = field(default_factory=list)
    right: dict[str, str] = field(default_factory=dict)
    """Greedy answers as they were given first, without drafts."""


@contextmanager
def served(words: Sequence[str]) -> Iterator[Place]:
    """An `hvd serve` that ends with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    keys = {name: f"{name}-{random.randbytes(12).hex()}" for name in TENANTS}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys"
        file.write_text("".join(f"{name} {key}\n" for name, key in keys.items()))
        limits = (f"serving.limits.max_running={MAX_RUNNING}", "serving.limits.max_requests=12")
        cap = f"drafting.suffix.max_cached_tokens={CACHE_TOKENS}"
        flags = ("--port", str(port), "--api-keys", str(file), "--json", "dtype=float32", cap)
        command = [str(BIN / "hvd"), "serve", *flags, *limits, *words]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            place = json.loads(server.stdout.readline())
            print(f"served after {place['seconds']} s", flush=True)
            yield Place(place["api"].removesuffix("/v1"), keys, server.pid)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(120)


# -- the clients ---------------------------------------------------------------------------------


async def client(place: Place, number: int, until: float, seen: Seen) -> None:
    """One client of one tenant; asks until the time is over."""
    rng, tenant = random.Random(number), TENANTS[number % len(TENANTS)]
    async with httpx.AsyncClient(timeout=300, headers=place.header(tenant)) as http:
        kinds = (greedy, greedy, streamed, mixed, mixed, long, leave, wrong)
        while time.monotonic() < until:
            kind = rng.choice(kinds)
            try:
                await kind(http, place, rng, seen)
            except (httpx.HTTPError, AssertionError, KeyError, ValueError) as fault:
                seen.faults.append(f"{kind.__name__}: {type(fault).__name__}: {fault}"[:300])


async def greedy(http: httpx.AsyncClient, place: Place, rng: random.Random, seen: Seen) -> None:
    """An answer that must be what it was the first time."""
    topic = rng.choice(TOPICS)
    body = chat(topic)
    answer = await http.post(f"{place.base}/v1/chat/completions", json=body)
    if counted(answer, "greedy", seen):
        same(topic, answer.json()["choices"][0]["message"]["content"], seen)


async def streamed(http: httpx.AsyncClient, place: Place, rng: random.Random, seen: Seen) -> None:
    topic = rng.choice(TOPICS)
    body = {**chat(topic), "stream": True, "stream_options": {"include_usage": True}}
    answer = await http.post(f"{place.base}/v1/chat/completions", json=body)
    seen.answers[f"streamed {answer.status_code}"] += 1
    if answer.status_code != 200:
        return
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]", lines[-1]
    chunks = [json.loads(line) for line in lines[:-1]]
    texts = [c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]]
    seen.tokens += chunks[-1]["usage"]["completion_tokens"]
    same(topic, "".join(texts), seen)


async def mixed(http: httpx.AsyncClient, place: Place, rng: random.Random, seen: Seen) -> None:
    prompt = f"Number {rng.randrange(50)}: {rng.choice(TOPICS)}, {rng.choice(TOPICS)} and"
    body = {"prompt": prompt, "max_tokens": rng.randint(9, MAX_TOKENS), **rng.choice(PARAMETERS)}
    counted(await http.post(f"{place.base}/v1/completions", json=body), "mixed", seen)


async def long(http: httpx.AsyncClient, place: Place, rng: random.Random, seen: Seen) -> None:
    """Rarely: a long prompt takes seconds to read."""
    if rng.random() < 0.8:
        return
    words = " ".join(f"{rng.choice(TOPICS)} {i}" for i in range(rng.randint(100, 350)))
    body = {"prompt": words, "max_tokens": 4, "temperature": 0}
    counted(await http.post(f"{place.base}/v1/completions", json=body), "long", seen)


async def leave(http: httpx.AsyncClient, place: Place, rng: random.Random, seen: Seen) -> None:
    """Before the first byte or after it."""
    seen.left += 1
    await leave_after(rng.choice([0.05, 0.5, 30]), http, place, rng.choice(TOPICS), seen)


async def leave_after(
    patience: float, http: httpx.AsyncClient, place: Place, topic: str, seen: Seen
) -> None:
    """Ask for a very long answer, and leave at its first byte or after so many seconds."""
    body = {**chat(topic), "max_tokens": LEAVER_ASKS, "ignore_eos": True, "stream": True}
    try:
        async with asyncio.timeout(patience):
            url = f"{place.base}/v1/chat/completions"
            async with http.stream("POST", url, json=body) as answer:
                seen.answers[f"left {answer.status_code}"] += 1
                async for _ in answer.aiter_bytes():
                    return
    except TimeoutError:
        return


async def wrong(http: httpx.AsyncClient, place: Place, rng: random.Random, seen: Seen) -> None:
    """Refused, in OpenAI's shape."""
    has_key = rng.random() < 0.7
    headers = {} if has_key else {"authorization": "Bearer wrong-key-0123456789"}
    body = {"prompt": "a", "max_tokens": 2, **rng.choice(WRONG)}
    answer = await http.post(f"{place.base}/v1/completions", json=body, headers=headers)
    seen.answers[f"wrong {answer.status_code}"] += 1
    assert answer.status_code in ((400, 429) if has_key else (401,)), answer.text[:200]
    assert answer.json()["error"]["message"]


def chat(topic: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"List five {topic} as JSON."}]
    return {"messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0}


def counted(answer: httpx.Response, kind: str, seen: Seen) -> bool:
    """Note an answer's status and tokens; whether it is one."""
    seen.answers[f"{kind} {answer.status_code}"] += 1
    assert answer.status_code in (200, 429), answer.text[:200]
    if answer.status_code == 200:
        seen.tokens += answer.json()["usage"]["completion_tokens"]
    return answer.status_code == 200


def same(topic: str, text: str, seen: Seen) -> None:
    assert text == seen.right[topic], f"{topic}: {text!r} instead of {seen.right[topic]!r}"


# -- the server ----------------------------------------------------------------------------------


def take_sample(place: Place, started: float) -> Sample:
    state = state_of(place)
    rss: dict[str, float] = {}
    files: dict[str, int] = {}
    threads: dict[str, int] = {}
    for name, process in parts_of(place.process):
        try:
            rss[name] = process.memory_info().rss / 2**20
            files[name], threads[name] = process.num_fds(), process.num_threads()
        except psutil.Error:
            continue
    active = state["num_running"] + state["num_waiting"]
    at_s = time.monotonic() - started
    return Sample(at_s, state["num_cached_tokens"], active, rss, files, threads)


def state_of(place: Place) -> Any:
    headers = place.header(TENANTS[0])
    return httpx.get(f"{place.base}/ui/state", headers=headers, timeout=120).json()


def parts_of(pid: int) -> list[tuple[str, psutil.Process]]:
    """The processes that serve: the replica, the front, the proxy."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:
            continue
        match = re.match(r"ray::(ServeReplica:\w+:\w+|ProxyActor)", title)
        if match:
            found.append((match.group(1).rpartition(":")[2], process))
    return found


def counters(place: Place) -> Counter[str]:
    """Prometheus counters by name, summed over labels; by source where they have one."""
    text = httpx.get(f"{place.base}/metrics", timeout=120).text
    found: Counter[str] = Counter()
    for name, labels, value in re.findall(r"^([\w:]+)(\{.*\})? ([\d.e+]+)$", text, re.M):
        source = re.search(r'source="(\w+)"', labels)
        found[name] += float(value)  # type: ignore[assignment]
        if source:
            found[f"{name} {source.group(1)}"] += float(value)  # type: ignore[assignment]
    return found


async def watch(place: Place, until: float, samples: list[Sample], report: Any) -> None:
    started = time.monotonic()
    report.expect(round(until - started))
    while time.monotonic() < until:
        samples.append(await asyncio.to_thread(take_sample, place, started))
        last = samples[-1]
        rss = sum(last.rss_mib.values())
        report.advance(round(last.at_s), f"{rss:.0f} MiB, {last.num_cached} tokens cached")
        await asyncio.sleep(SAMPLE_S)


def wait_idle(place: Place, timeout_s: float = 60) -> bool:
    """Whether nothing is left running after a while."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        state = state_of(place)
        if state["num_running"] + state["num_waiting"] == 0:
            return True
        time.sleep(0.2)
    return False


# -- the run -------------------------------------------------------------------------------------


async def first_answers(place: Place, seen: Seen) -> None:
    """The greedy answers without drafts, before anything is cached."""
    async with httpx.AsyncClient(timeout=300, headers=place.header(TENANTS[0])) as http:
        for topic in TOPICS:
            body = {**chat(topic), "hvd": "off"}
            answer = await http.post(f"{place.base}/v1/chat/completions", json=body)
            seen.right[topic] = answer.json()["choices"][0]["message"]["content"]
            seen.tokens += answer.json()["usage"]["completion_tokens"]


async def traffic(place: Place, args: argparse.Namespace, seen: Seen) -> list[Sample]:
    samples: list[Sample] = []
    await first_answers(place, seen)
    until = time.monotonic() + args.seconds
    with shown_progress("s") as report:
        report.stage("asking")
        clients = [client(place, number, until, seen) for number in range(args.clients)]
        await asyncio.gather(watch(place, until, samples, report), *clients)
    return samples


def closing(place: Place) -> list[str]:
    """A few answers to clients that stay: tokens returned are tokens counted, one by one."""
    before, seen, rng = counters(place), Seen(), random.Random(0)

    async def ask() -> None:
        async with httpx.AsyncClient(timeout=300, headers=place.header(TENANTS[1])) as http:
            for _ in range(12):
                await mixed(http, place, rng, seen)

    asyncio.run(ask())
    after = counters(place)
    num = after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"]
    return [] if num == seen.tokens else [f"{seen.tokens} tokens returned, {num:.0f} counted"]


def leaving(place: Place) -> list[str]:
    """Every slot is taken by a client that leaves: all must be free again at once.

    Whoever goes on decodes thousands of tokens. The replica is asked what it runs, for the front
    no longer counts what is made for nobody.
    """
    seen = Seen()

    async def come_and_go() -> None:
        async with httpx.AsyncClient(timeout=300, headers=place.header(TENANTS[2])) as http:
            topics = TOPICS[:MAX_RUNNING]
            await asyncio.gather(*(leave_after(60, http, place, topic, seen) for topic in topics))

    asyncio.run(come_and_go())
    started = seen.answers["left 200"]
    if started < MAX_RUNNING:
        return [f"{started} of {MAX_RUNNING} answers began that were to be left"]
    if wait_idle(place, timeout_s=LEAVING_S):
        return []
    return [f"{LEAVING_S:.0f} s after its client had left an answer still went on"]


def too_much_made(made: float, seen: Seen) -> list[str]:
    """Tokens beyond those returned are for clients that left: a few each."""
    most = seen.tokens + LEAVER_TOKENS * seen.left + SPARE_TOKENS
    if seen.tokens <= made <= most:
        return []
    return [
        f"{made:.0f} tokens made, {seen.tokens} returned, {seen.left} clients left that asked for "
        f"{LEAVER_ASKS} each: {seen.tokens} to {most} are right"
    ]


def verdict(samples: Sequence[Sample], seen: Seen, found: Counter[str]) -> list[str]:
    """What does not hold."""
    wrong = [f"{len(seen.faults)} faults, the first: {seen.faults[0]}"] if seen.faults else []
    most = max(sample.num_cached for sample in samples)
    if most > CACHE_TOKENS:
        wrong.append(f"the cache held {most} tokens, its cap is {CACHE_TOKENS}")
    drafted = found["vllm:spec_decode_num_draft_tokens_total"]
    accepted = found["vllm:spec_decode_num_accepted_tokens_total"]
    if not drafted >= accepted > 0:
        wrong.append(f"{drafted} drafted, {accepted} accepted")
    made = found["vllm:generation_tokens_total"]
    wrong += too_much_made(made, seen)
    emitted = sum(n for name, n in found.items() if name.startswith("hvd_emitted_tokens_total "))
    if emitted != made:
        wrong.append(f"{emitted} emitted by source, {made} in all")
    return [*wrong, *growths(samples)]


def growths(samples: Sequence[Sample]) -> list[str]:
    """Processes that grew after the warm first half."""
    wrong = []
    for name in samples[-1].rss_mib:
        before, after = (values(part, "rss_mib", name) for part in halves(samples))
        if after - before > max(GROWTH_MIB, GROWTH_SHARE * before):
            wrong.append(f"{name} grew from {before:.0f} to {after:.0f} MiB")
        for what, spare in (("num_files", 16), ("num_threads", 8)):
            before, after = (values(part, what, name) for part in halves(samples))
            if after > before + spare:
                wrong.append(f"{name}: {what} from {before:.0f} to {after:.0f}")
    return wrong


def halves(samples: Sequence[Sample]) -> tuple[Sequence[Sample], Sequence[Sample]]:
    """A stretch of the middle and the last stretch, each a fifth."""
    size = max(1, len(samples) // 5)
    return samples[2 * size : 3 * size] or samples[:1], samples[-size:]


def values(samples: Sequence[Sample], what: str, name: str) -> float:
    return median(float(getattr(sample, what).get(name, 0)) for sample in samples)


def page(
    samples: Sequence[Sample], seen: Seen, found: Counter[str], wrong: list[str], seconds: float
) -> str:
    """The stored report."""
    facts = provenance()
    drafted = found["vllm:spec_decode_num_draft_tokens_total"]
    accepted = found["vllm:spec_decode_num_accepted_tokens_total"]
    lines = [
        "# Soak",
        "",
        f"Written by `make soak` on {facts['created_at'][:10]}, commit {facts['commit'][:12]}, "
        f"{facts['cpu']}: {seconds:.0f} s of mixed traffic against `hvd serve`, the default model "
        "in float32, three tenants.",
        "",
        f"**{'Everything held.' if not wrong else 'Not held: ' + '; '.join(wrong)}**",
        "",
        f"- Answers by kind and status: {dict(sorted(seen.answers.items()))}; "
        f"{seen.left} clients left early, each of an answer of {LEAVER_ASKS} tokens.",
        f"- {found['vllm:generation_tokens_total']:.0f} tokens made, {seen.tokens} returned to "
        f"those who stayed; those who left may cost {LEAVER_TOKENS} each in the mean; "
        f"{drafted:.0f} drafted, {accepted:.0f} accepted.",
        f"- The cache held {max(s.num_cached for s in samples)} tokens at the most; its cap is "
        f"{CACHE_TOKENS}.",
        "",
        "| process | MiB in the middle | MiB at the end | files | threads |",
        "| :-- | --: | --: | --: | --: |",
    ]
    for name in samples[-1].rss_mib:
        middle, end = (values(part, "rss_mib", name) for part in halves(samples))
        files, threads = (values(samples[-3:], what, name) for what in ("num_files", "num_threads"))
        lines.append(f"| {name} | {middle:.0f} | {end:.0f} | {files:.0f} | {threads:.0f} |")
    return "\n".join([*lines, ""])


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=FULL_SECONDS)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--report", type=Path, help="needed for less than the full length")
    parser.add_argument("words", nargs="*", help="settings of `hvd serve`, e.g. policy.name=suffix")
    args = parser.parse_args(words)
    length, full = {"--seconds": args.seconds}, {"--seconds": FULL_SECONDS}
    report = report_place(parser, args.report, stored=REPORT, asked=length, full=full)
    seen = Seen()
    with served(args.words) as place:
        samples = asyncio.run(traffic(place, args, seen))
        wrong = [] if wait_idle(place) else ["requests are left running"]
        found = counters(place)
        wrong += [*verdict(samples, seen, found), *leaving(place), *closing(place)]
    report.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(report) as path:
        path.write_text(page(samples, seen, found, wrong, args.seconds), encoding="utf-8")
    print("\n".join(wrong) if wrong else "everything held")
    print(f"written: {report}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
