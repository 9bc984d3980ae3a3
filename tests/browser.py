"""A tab of a headless Chromium, spoken to by its own protocol; nothing beyond loopback."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
         "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
         "--remote-debugging-port=0", "--no-first-run", "about:blank")  # fmt: skip
SETTLING_S = 10.0


class Page:
    """A tab; what its scripts throw and what the browser complains of is kept in `faults`."""

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

    async def until(self, expression: str, *, within_s: float = 30.0) -> Any:
        """The expression's value, once it is something."""
        deadline = time.monotonic() + within_s
        while not (found := await self.value(expression)):
            assert time.monotonic() < deadline, f"never: {expression}"
            await asyncio.sleep(0.05)
        return found

    async def go(self, url: str) -> None:
        await self.send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def show(self, *, width: int, height: int, scale: float = 1.0) -> None:
        """Lay the page out in a window of so many CSS pixels, light, and draw it by that scale."""
        window = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        await self.send("Emulation.setDeviceMetricsOverride", **window)
        await self.send("Emulation.setScrollbarsHidden", hidden=True)
        wanted = [{"name": "prefers-color-scheme", "value": "light"}]
        await self.send("Emulation.setEmulatedMedia", features=wanted)

    async def remember(self, stored: Mapping[str, str]) -> None:
        """Have pages that a server gives find this in their local storage."""
        entries = "".join(f"localStorage.setItem(...{json.dumps(e)});" for e in stored.items())
        source = f"if (location.protocol === 'http:') {{ {entries} }}"
        await self.send("Page.addScriptToEvaluateOnNewDocument", source=source)

    async def picture(self) -> bytes:
        """What the window shows, as PNG, once it stands still; after `SETTLING_S` as it is."""
        deadline, before = time.monotonic() + SETTLING_S, b""
        while True:
            answer = await self.send("Page.captureScreenshot", format="png")
            now = base64.b64decode(answer["data"])
            if now == before or time.monotonic() > deadline:
                return now
            before = now
            await asyncio.sleep(0.5)


@asynccontextmanager
async def opened(url: str, profile: Path) -> AsyncIterator[Page]:
    """A browser of one's own with this page; `profile` is an empty folder for its state."""
    assert BROWSER is not None
    command = [BROWSER, f"--user-data-dir={profile}", *FLAGS]
    browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{await _address(profile)}/json") as answer:
                tab = next(tab for tab in await answer.json() if tab["type"] == "page")
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await page.send(f"{domain}.enable")
                await page.go(url)
                yield page
    finally:
        browser.terminate()
        browser.wait(10)


async def _address(profile: Path) -> str:
    """Where the browser listens: it writes its port down once it does."""
    port_file = profile / "DevToolsActivePort"
    for _ in range(600):
        if port_file.exists() and len(port_file.read_text().split()) == 2:
            break
        await asyncio.sleep(0.05)
    return f"http://127.0.0.1:{port_file.read_text().split()[0]}"
