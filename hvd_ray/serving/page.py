"""The page at `/ui`: one file, no build step, nothing fetched from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


@cache
def _page() -> tuple[str, dict[str, str]]:
    html = (files("hvd_ray") / "assets" / "ui" / "index.html").read_text(encoding="utf-8")
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in _SCRIPT.findall(html)
    )
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return html, headers


async def page_response(request: Request) -> Response:  # noqa: ARG001
    html, headers = _page()
    return HTMLResponse(html, headers=headers)
