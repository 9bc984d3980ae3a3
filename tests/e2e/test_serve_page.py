"""The page at /ui in a real browser, over a toy: colours, cycles, speed, errors, keys."""

import asyncio
import json
import shutil
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn

from hvd_ray.serving.auth import ApiKeys
from hvd_ray.serving.front import Front
from tests.unit.serving.conftest import make_replica

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
         "--remote-debugging-port=0", "--no-first-run", "about:blank")  # fmt: skip
KEY = "page-key-0123456789abcdef"

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt install chromium")


class Page:
    """A tab, spoken to by the browser's own protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._next = 0
        self.faults: list[str] = []

    async def send(self, method: str, **params: Any) -> Any:
        self._next += 1
        await self._socket.send_json({"id": self._next, "method": method, "params": params})
        while True:
            message = json.loads((await self._socket.receive()).data)
            if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.faults.append(json.dumps(message["params"]))
            if message.get("id") == self._next:
                return message["result"]

    async def value(self, expression: str) -> Any:
        found = await self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"].get("value")

    async def until(self, expression: str) -> Any:
        deadline = time.monotonic() + 30
        while not (found := await self.value(expression)):
            assert time.monotonic() < deadline, f"never: {expression}"
            await asyncio.sleep(0.05)
        return found


@asynccontextmanager
async def opened(url: str, profile: Path) -> AsyncIterator[Page]:
    assert BROWSER is not None
    command = [BROWSER, f"--user-data-dir={profile}", *FLAGS]
    browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port_file = profile / "DevToolsActivePort"
        for _ in range(600):
            if port_file.exists() and len(port_file.read_text().split()) == 2:
                break
            await asyncio.sleep(0.05)
        base = f"http://127.0.0.1:{port_file.read_text().split()[0]}"
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{base}/json") as answer:
                tab = next(tab for tab in await answer.json() if tab["type"] == "page")
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await page.send(f"{domain}.enable")
                await page.send("Page.navigate", url=url)
                await page.until("document.readyState === 'complete'")
                yield page
    finally:
        browser.terminate()
        browser.wait(10)


@pytest.fixture
def serve_toy() -> Iterator[Callable[[ApiKeys], str]]:
    ended: list[Callable[[], Any]] = []

    def start(keys: ApiKeys) -> str:
        replica = make_replica()
        front = Front(replica, replica.facts, keys)
        config = uvicorn.Config(front.app(), host="127.0.0.1", port=0, log_level="error")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)

        def end() -> None:
            server.should_exit = True
            thread.join(10)
            replica.end()

        ended.append(end)
        port = server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}/ui"

    yield start
    for end in ended:
        end()


def browse(url: str, profile: Path, visit: Callable[[Page], Awaitable[None]]) -> list[str]:
    async def run() -> list[str]:
        async with opened(url, profile) as page:
            await visit(page)
            return page.faults

    return asyncio.run(run())


SEND = """
  document.getElementById('prompt').value = '%s';
  document.getElementById('tokens').value = 24;
  document.getElementById('go').click();
"""
IS_IDLE = "document.getElementById('go').textContent === 'Send'"
ANSWER = "[...document.querySelectorAll('#answer .t')].map((t) => t.textContent).join('')"


def test_an_answer_is_coloured_and_explained(
    serve_toy: Callable[[ApiKeys], str], tmp_path: Path
) -> None:
    async def visit(page: Page) -> None:
        await page.until("document.getElementById('mode').options.length === 3")
        for _ in range(2):  # the second time the cache knows the answer
            await page.value(SEND % "badge")
            await page.until(f"{IS_IDLE} && document.getElementById('gain').textContent !== '–'")
        assert await page.value(ANSWER) == "vkcjaerlfeetiglhpfnkdahm"
        assert await page.value("document.querySelectorAll('#answer .cache').length") > 10
        assert "same answer" in await page.value("document.getElementById('gain').textContent")
        columns = await page.value("document.querySelectorAll('#cycles .c').length")
        assert columns == await page.value("document.querySelectorAll('#rows tr').length") < 24
        await page.value(
            "document.querySelector('#answer .cache').dispatchEvent("
            "new PointerEvent('pointerover', {bubbles: true}))"
        )
        told = await page.value("document.getElementById('detail').textContent")
        assert "suffix cache drafted" in told
        assert "Why: always the cache" in told
        assert await page.value("document.querySelectorAll('#cycles .lit').length") == 1
        phone = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
        await page.send("Emulation.setDeviceMetricsOverride", **phone)
        assert await page.value("document.documentElement.scrollWidth") == 390

    assert browse(serve_toy(ApiKeys()), tmp_path, visit) == []


def test_errors_are_shown_and_a_key_is_asked_for(
    serve_toy: Callable[[ApiKeys], str], tmp_path: Path
) -> None:
    async def visit(page: Page) -> None:
        await page.until("!document.getElementById('keybox').hidden")
        await page.value(
            f"document.getElementById('key').value = '{KEY}';"
            "document.getElementById('key').dispatchEvent(new Event('change'))"
        )
        await page.until("document.getElementById('mode').options.length === 3")
        await page.value(SEND % "")
        told = await page.until("document.getElementById('error').textContent")
        assert "messages: is empty" in told
        await page.value(SEND % "badge")
        await page.until(f"{IS_IDLE} && {ANSWER}.length === 24")
        assert await page.value("document.getElementById('error').textContent") == ""

    browse(serve_toy(ApiKeys(((KEY.encode(), "me"),))), tmp_path, visit)
