"""The page at /ui in a real browser, over a toy: colours, cycles, speed, errors, keys."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from hvd_ray.serving.auth import ApiKeys
from hvd_ray.serving.front import Front
from tests.browser import BROWSER, Page, opened
from tests.unit.serving.conftest import make_replica

KEY = "page-key-0123456789abcdef"

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt install chromium")


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
