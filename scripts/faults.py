"""What fails when something breaks, and how long until all is whole again: `make faults`.

Starts `hvd serve` with two replicas and a registered predictor, breaks one thing after the other
while somebody asks, and holds that only what must fail does: each check prints one line with the
time that recovery took; the exit code counts those that failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from conformance import CheckError, chosen_of, judge, served, took

from hvd_ray.config import read_settings

RECOVERY_S = 300
QUESTION = [{"role": "user", "content": "Count from one to twenty in words."}]
LONG = {"messages": QUESTION, "temperature": 0, "ignore_eos": True}


@dataclass
class Site:
    """A served model with what can be broken about it."""

    base: str
    settings: Path
    engine: str
    capacity: int
    leavers: int
    database: Path | None = None
    """Of the tracking store; None: nothing is registered (vLLM)."""
    expected: str = ""

    def state(self) -> Any:
        return httpx.get(f"{self.base}/ui/state", timeout=60).json()

    @property
    def server(self) -> psutil.Process:
        """The `hvd serve` that listens here, a child of ours."""
        children = psutil.Process().children()
        return next(child for child in children if "serve" in child.cmdline())

    def kill(self, word: str) -> None:
        """All processes under the server with that name."""
        victims = self.processes(word)
        if not victims:
            raise CheckError(f"there is no process {word!r}")
        for victim in victims:
            victim.kill()

    def processes(self, word: str) -> list[psutil.Process]:
        """Processes under the server whose name says what they are."""
        found = []
        for process in self.server.children(recursive=True):
            try:
                if any(word in part for part in (process.name(), *process.cmdline())):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found


async def answered(client: httpx.AsyncClient, site: Site, **extra: Any) -> str:
    """A short answer's text.

    Raises:
        CheckError: there was none.
    """
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 16, **extra}
    answer = await client.post(f"{site.base}/v1/chat/completions", json=body)
    if answer.status_code != 200:
        raise CheckError(f"{answer.status_code}: {answer.text}")
    return str(answer.json()["choices"][0]["message"]["content"])


async def whole_again(client: httpx.AsyncClient, site: Site, *, num_alive: int) -> None:
    """Until health, every replica and the right answer are back.

    Raises:
        CheckError: they were not within `RECOVERY_S`.
    """
    until = time.monotonic() + RECOVERY_S
    while time.monotonic() < until:
        try:
            health = await client.get(f"{site.base}/health")
            state = (await client.get(f"{site.base}/ui/state")).json()
            if health.status_code == 200 and state.get("num_alive") == num_alive:
                if await answered(client, site) == site.expected:
                    return
                raise CheckError("the answer is another one")
        except (httpx.TransportError, CheckError) as error:
            if "another" in str(error):
                raise
        await asyncio.sleep(0.25)
    raise CheckError(f"not whole after {RECOVERY_S} s: {site.state()}")


@dataclass
class Asking:
    """Somebody who asks all the while, by statuses; a stream's end counts as its own."""

    statuses: Counter[str] = field(default_factory=Counter)
    is_over: bool = False

    async def go_on(self, client: httpx.AsyncClient, site: Site, number: int) -> None:
        while not self.is_over:
            body = {"messages": QUESTION, "temperature": 0, "max_tokens": 16}
            headers = {"x-session-id": f"asker-{number}"}
            url = f"{site.base}/v1/chat/completions"
            try:
                answer = await client.post(url, json=body, headers=headers)
            except httpx.TransportError as error:
                self.statuses[type(error).__name__] += 1
                continue
            told = str(answer.status_code)
            if answer.status_code == 200:
                text = answer.json()["choices"][0]["message"]["content"]
                told = "right" if text == site.expected else "wrong"
            self.statuses[told] += 1
            if answer.status_code != 200:
                await asyncio.sleep(0.5)


async def while_asked(
    site: Site, breaks: Callable[[httpx.AsyncClient], Awaitable[str]], *, num_askers: int = 2
) -> tuple[str, Counter[str]]:
    """Break something while some go on asking; what was told and what they met."""
    asking = Asking()
    async with httpx.AsyncClient(timeout=600) as client:
        tasks = [
            asyncio.create_task(asking.go_on(client, site, number)) for number in range(num_askers)
        ]
        await asyncio.sleep(1)
        try:
            told = await breaks(client)
        finally:
            asking.is_over = True
            await asyncio.gather(*tasks, return_exceptions=True)
    if asking.statuses["wrong"]:
        raise CheckError(f"wrong answers: {dict(asking.statuses)}")
    return told, asking.statuses


async def killed_mid_stream(client: httpx.AsyncClient, site: Site, word: str) -> str:
    """End a process while it answers; its streams must end with an error, and be said to.

    Several streams with vLLM, which a carrier brings together; the torch engine has no more than
    it runs at once, and a call that waits is sent to the next replica.
    """
    alive = site.state()["num_alive"]
    streams = [OpenStream() for _ in range(6 if site.engine == "vllm" else 1)]
    reading = [asyncio.create_task(stream.read(client, site)) for stream in streams]
    for stream in streams:
        await asyncio.wait_for(stream.has_begun.wait(), 300)
    site.kill(word)
    began = time.monotonic()
    await asyncio.gather(*reading)
    for stream in streams:
        if stream.lines[-1] != "data: [DONE]" or "server_error" not in stream.lines[-2]:
            raise CheckError(f"a stream ended with {stream.lines[-2:]}")
    ended = took(began)
    await whole_again(client, site, num_alive=alive)
    return f"its streams ended with an error after {ended}, whole again after {took(began)}"


@dataclass
class OpenStream:
    """A long answer, by its lines."""

    lines: list[str] = field(default_factory=list)
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, client: httpx.AsyncClient, site: Site) -> None:
        body = {**LONG, "max_tokens": 2000, "stream": True}
        url = f"{site.base}/v1/chat/completions"
        async with client.stream("POST", url, json=body) as answer:
            async for line in answer.aiter_lines():
                if line:
                    self.lines.append(line)
                if len(self.lines) == 4:
                    self.has_begun.set()


def front_killed(site: Site) -> str:
    """Whoever it was answering loses the connection; who connects meanwhile waits for the next."""

    async def breaks(client: httpx.AsyncClient) -> str:
        stream = OpenStream()
        reading = asyncio.create_task(stream.read(client, site))
        await asyncio.wait_for(stream.has_begun.wait(), 300)
        site.kill("ray::ServeReplica:hvd:Front")
        began = time.monotonic()
        try:
            await reading
        except httpx.TransportError as error:
            ended = f"its stream broke after {took(began)} ({type(error).__name__})"
        else:
            raise CheckError(f"the stream ended with {stream.lines[-2:]}")
        async with httpx.AsyncClient(timeout=RECOVERY_S) as other:
            await other.get(f"{site.base}/health")
        waited = took(began)
        await whole_again(client, site, num_alive=site.state()["num_alive"])
        return f"{ended}, who connected then waited {waited}"

    told, met = asyncio.run(while_asked(site, breaks))
    if met["ConnectError"] or not met["right"]:
        raise CheckError(f"{told}; askers met {dict(met)}")
    return f"{told}; askers met {dict(met)}"


def replica_killed(site: Site) -> str:
    """All replicas at once: whoever asks meanwhile waits or is told 503, nobody hangs."""

    async def breaks(client: httpx.AsyncClient) -> str:
        return await killed_mid_stream(client, site, "ray::ServeReplica:hvd:Replica")

    told, met = asyncio.run(while_asked(site, breaks))
    return f"{told}; askers met {dict(met)}"


def engine_killed(site: Site) -> str:
    """vLLM's own process, which the replica does not end with."""
    if site.engine != "vllm":
        return "skipped: the torch engine is a thread of its replica"

    async def breaks(client: httpx.AsyncClient) -> str:
        return await killed_mid_stream(client, site, "VLLM::EngineCore")

    told, met = asyncio.run(while_asked(site, breaks))
    return f"{told}; askers met {dict(met)}"


def one_replica_killed(site: Site) -> str:
    """One of two: requests that had no word yet go to the other."""
    if site.state()["num_alive"] < 2:
        return "skipped: one replica"

    async def breaks(client: httpx.AsyncClient) -> str:
        site.processes("ray::ServeReplica:hvd:Replica")[0].kill()
        began = time.monotonic()
        await whole_again(client, site, num_alive=2)
        return f"both again after {took(began)}"

    told, met = asyncio.run(while_asked(site, breaks, num_askers=4))
    if set(met) - {"right", "503"}:
        raise CheckError(f"{told}; askers met {dict(met)}")
    return f"{told}; askers met {dict(met)}"


def queue_full(site: Site) -> str:
    """Three times as many as there is room for: 429 with Retry-After, then all is as before."""

    async def run() -> str:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=600, limits=limits) as client:
            body = {**LONG, "max_tokens": 64}
            url = f"{site.base}/v1/chat/completions"
            count = 3 * site.capacity * site.state()["num_alive"]
            answers = await asyncio.gather(*(client.post(url, json=body) for _ in range(count)))
            began = time.monotonic()
            statuses = Counter(answer.status_code for answer in answers)
            if set(statuses) != {200, 429}:
                raise CheckError(str(dict(statuses)))
            if not all(a.headers.get("retry-after") for a in answers if a.status_code == 429):
                raise CheckError("a 429 without Retry-After")
            await whole_again(client, site, num_alive=site.state()["num_alive"])
            return f"{count} at once: {dict(statuses)}, then whole after {took(began)}"

    return asyncio.run(run())


def slow_client(site: Site) -> str:
    """One who reads a line a second slows nobody, and gets everything."""

    async def run() -> str:
        async with httpx.AsyncClient(timeout=600) as client:
            alone = await timed(client, site)
            body = {**LONG, "max_tokens": 200, "stream": True}
            url = f"{site.base}/v1/chat/completions"
            async with client.stream("POST", url, json=body) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                while (await client.get(f"{site.base}/ui/state")).json()["num_running"]:
                    await asyncio.sleep(0.2)  # all is decoded though nobody reads
                beside = await timed(client, site)
                last = ""
                async for line in lines:
                    last = line or last
            if last != "data: [DONE]":
                raise CheckError(f"the slow one's stream ended with {last!r}")
            if beside > 3 * alone + 1:
                raise CheckError(f"{beside:.2f} s beside a slow client, {alone:.2f} s alone")
            return f"an answer beside it took {beside:.2f} s, alone {alone:.2f} s"

    return asyncio.run(run())


async def timed(client: httpx.AsyncClient, site: Site) -> float:
    began = time.monotonic()
    if await answered(client, site) != site.expected:
        raise CheckError("another answer")
    return time.monotonic() - began


def disconnects(site: Site) -> str:
    """Thousands who leave at once or in the middle; somebody who stays is served all the while."""
    host, port = site.base.removeprefix("http://").split(":")
    body = json.dumps({**LONG, "max_tokens": 400, "stream": True}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )

    async def leave(number: int) -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + body)
        await writer.drain()
        if number % 4 == 0:  # one in four waits for the first words
            await asyncio.wait_for(reader.read(256), 60)
        writer.close()

    async def breaks(client: httpx.AsyncClient) -> str:
        began = time.monotonic()
        for start in range(0, site.leavers, 16):
            wave = range(start, min(start + 16, site.leavers))
            await asyncio.gather(*map(leave, wave), return_exceptions=True)
        left = took(began)
        began = time.monotonic()
        await whole_again(client, site, num_alive=site.state()["num_alive"])
        return f"{site.leavers} left within {left}, whole after {took(began)}"

    told, met = asyncio.run(while_asked(site, breaks, num_askers=1))
    if set(met) - {"right", "429"}:
        raise CheckError(f"{told}; the one who stayed met {dict(met)}")
    until = time.monotonic() + 30
    while (state := site.state())["num_running"] + state["num_waiting"]:
        if time.monotonic() > until:
            raise CheckError(f"slots are held: {state}")
        time.sleep(0.1)
    return f"{told}; the one who stayed met {dict(met)}"


def rolling_update(site: Site) -> str:
    """New settings that restart the replicas, one after the other: nobody loses a request."""
    tree = read_settings(site.settings)
    site.settings.write_text(yaml.safe_dump({**tree, "seed": tree.get("seed", 42) + 1}))

    async def breaks(client: httpx.AsyncClient) -> str:
        before = {p.pid for p in site.processes("ray::ServeReplica:hvd:Replica")}
        site.server.send_signal(signal.SIGHUP)
        began = time.monotonic()
        until = began + RECOVERY_S
        while before & {p.pid for p in site.processes("ray::ServeReplica:hvd:Replica")}:
            if time.monotonic() > until:
                raise CheckError("the old replicas are still there")
            await asyncio.sleep(0.5)
        await whole_again(client, site, num_alive=len(before))
        return f"{len(before)} replicas replaced within {took(began)}"

    told, met = asyncio.run(while_asked(site, breaks, num_askers=4))
    if set(met) != {"right"}:
        raise CheckError(f"{told}; askers met {dict(met)}")
    return f"{told}, {met['right']} requests meanwhile, none lost"


def registry_gone(site: Site) -> str:
    """The tracking store vanishes while it is polled: what serves stays."""
    if site.database is None:
        return "skipped: vLLM's plugin reads its predictor once"
    before = site.state()
    away = site.database.with_suffix(".away")
    site.database.rename(away)
    began = time.monotonic()
    try:
        until_state(site, lambda state: state["refused"] is not None)
        if site.state()["predictor"] != before["predictor"]:
            raise CheckError(f"{site.state()} instead of {before}")
    finally:
        away.rename(site.database)
    noticed = took(began)
    began = time.monotonic()
    until_state(site, lambda state: state["refused"] is None)
    return f"noticed after {noticed}, {before['predictor']} served on; forgiven after {took(began)}"


def corrupt_alias(site: Site) -> str:
    """The champion's alias moves to a version whose weights are damaged, then back."""
    if site.database is None:
        return "skipped: vLLM's plugin reads its predictor once"
    before = site.state()["predictor"]
    register(site.database, is_damaged=True)
    began = time.monotonic()
    until_state(site, lambda state: "damaged" in (state["refused"] or ""))
    noticed = took(began)
    if site.state()["predictor"] != before:
        raise CheckError(str(site.state()))
    register(site.database, is_damaged=False)
    began = time.monotonic()
    until_state(site, lambda s: s["refused"] is None and s["predictor"] != before)
    return f"refused after {noticed}, {before} served on; the next good one after {took(began)}"


def until_state(site: Site, holds: Callable[[Any], bool]) -> None:
    until = time.monotonic() + 60
    while not holds(state := site.state()):
        if time.monotonic() > until:
            raise CheckError(str(state))
        time.sleep(0.2)


def register(database: Path, *, is_damaged: bool) -> None:
    """The shipped predictor as a new champion in a store of this run's own."""
    from hvd_ray.config import load_config
    from hvd_ray.shipped import shipped_folder
    from hvd_ray.tracking import register_predictor, tracked

    config = load_config(None, [f"tracking.uri=sqlite:///{database}"])
    shipped = shipped_folder(config.model, "payoff")
    assert shipped is not None
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(shipped, Path(folder) / "predictor"))
        if is_damaged:
            weights = copy / "weights.safetensors"
            weights.write_bytes(weights.read_bytes()[:-64])
        with tracked(config, run_name="fault") as tracker:
            register_predictor(tracker, copy, config=config, alias="champion")


@contextmanager
def site_of(given: argparse.Namespace) -> Iterator[Site]:
    """`hvd serve` with a file of settings, and a registry of its own where it reads one."""
    with tempfile.TemporaryDirectory() as folder:
        settings, database = Path(folder) / "serve.yaml", Path(folder) / "tracking.db"
        serving = {
            "engine": given.engine,
            "replicas": given.replicas,
            "cpus_per_replica": 0.5,
            "poll_s": 1.0,
            "limits": {"max_requests": given.capacity},
        }
        tree: dict[str, Any] = {"dtype": "float32", "serving": serving}
        is_registered = given.engine == "torch"
        if is_registered:
            serving["limits"] |= {"max_running": 2}
            register(database, is_damaged=False)
            tree |= {
                "tracking": {"uri": f"sqlite:///{database}"},
                "policy": {"name": "hvd_tau"},
            }
        settings.write_text(yaml.safe_dump(tree))
        with served(["--config", str(settings)]) as base:
            site = Site(base, settings, given.engine, given.capacity, given.leavers)
            site.database = database if is_registered else None
            with httpx.Client(timeout=300) as client:
                body = {"messages": QUESTION, "temperature": 0, "max_tokens": 16, "hvd": "off"}
                answer = client.post(f"{base}/v1/chat/completions", json=body).json()
            site.expected = answer["choices"][0]["message"]["content"]
            yield site


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("torch", "vllm"), default="torch")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--capacity", type=int, default=16)
    parser.add_argument("--leavers", type=int, default=10_000)
    parser.add_argument("--only", default="", help="names of checks, by comma")
    given = parser.parse_args()
    faults: dict[str, Callable[[Site], str]] = {
        "corrupt alias": corrupt_alias,
        "registry gone": registry_gone,
        "queue full": queue_full,
        "slow client": slow_client,
        "front killed": front_killed,
        "one of two killed": one_replica_killed,
        "replicas killed": replica_killed,
        "engine killed": engine_killed,
        "rolling update": rolling_update,
        "disconnects": disconnects,
    }
    chosen = chosen_of(parser, given.only, faults)
    with site_of(given) as site:
        checks = {name: (lambda _base, fault=faults[name]: fault(site)) for name in chosen}
        return judge(site.base, checks, chosen)


if __name__ == "__main__":
    sys.exit(main())
