"""Find one pinned file in the package index that pip is set up for, whichever that is.

The index's page (PEP 503 HTML or PEP 691 JSON) is read directly, since pip can neither resume a
download nor report its progress to us. What only pip can do (find-links, keyrings, client
certificates, netrc) is left to `pip download`.
"""

import ast
import json
import os
import re
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import httpx

from hvd_ray.errors import UserError
from hvd_ray.home import ensure_dir
from hvd_ray.targets.download import accept, download
from hvd_ray.targets.pinned_file import PinnedFile
from hvd_ray.targets.progress import FetchProgress

_ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.1"
_CONNECT_TIMEOUT_S = 15.0
_READ_TIMEOUT_S = 60.0
_CA_VARIABLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")


@dataclass(frozen=True)
class PipSettings:
    """What pip would use, from its files and `PIP_*` variables."""

    index_urls: tuple[str, ...]
    """Index pages over HTTP, the main one first."""
    ca_file: str | None = None
    proxy: str | None = None


class IndexLookupError(Exception):
    """An index could not be read, or does not hold the file; the message says which."""


def read_pip_settings() -> PipSettings:
    """Ask pip for its settings (about 0.3 s a call); without pip or a usable index: no index."""
    listed = _pip_config()
    if listed.get("no-index", "").lower() in {"1", "true", "yes", "on"}:
        return PipSettings(index_urls=())
    main = listed.get("index-url") or _pip_default_index()
    urls = [main, *listed.get("extra-index-url", "").split()]
    return PipSettings(
        index_urls=tuple(url for url in urls if url and url.startswith(("http://", "https://"))),
        ca_file=listed.get("cert") or _ca_file(os.environ),
        proxy=_with_scheme(listed.get("proxy")),
    )


def http_client(settings: PipSettings) -> httpx.Client:
    """A client that trusts what pip trusts; proxies come from pip or the environment."""
    return httpx.Client(
        verify=_trust(settings.ca_file),
        proxy=settings.proxy,
        follow_redirects=True,
        timeout=httpx.Timeout(_READ_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S),
    )


def fetch_pinned(pinned: PinnedFile, *, to: Path, progress: FetchProgress) -> None:
    """Read the indexes that pip is set up for, one after another; at last leave it to pip.

    Raises:
        UserError: nobody has it, the network is broken, the content is another, no room.
    """
    progress.stage("looking it up in the package index")
    settings = read_pip_settings()
    reasons = []
    with http_client(settings) as client:
        for index_url in settings.index_urls:
            try:
                url = find_url(pinned, index_url=index_url, client=client)
                _download(pinned, url=url, to=to, client=client, progress=progress)
                return
            except IndexLookupError as error:
                reasons.append(str(error))
    progress.stage("asking pip to download it")
    try:
        pip_download(pinned, to=ensure_dir(to.parent) / to.name)
    except IndexLookupError as error:
        raise UserError(
            f"cannot fetch {pinned.requirement}: {'; '.join([*reasons, str(error)])}. Check the "
            "network and pip's index settings (pip config list), then run the command again"
        ) from None


def _download(
    pinned: PinnedFile, *, url: httpx.URL, to: Path, client: httpx.Client, progress: FetchProgress
) -> None:
    progress.stage("downloading", total=pinned.num_bytes)
    try:
        download(
            url,
            to=to,
            num_bytes=pinned.num_bytes,
            sha256=pinned.sha256,
            client=client,
            on_bytes=progress.advance,
        )
    except httpx.HTTPStatusError as error:
        raise IndexLookupError(f"{url.host} answered {error.response.status_code}") from None


def find_url(pinned: PinnedFile, *, index_url: str, client: httpx.Client) -> httpx.URL:
    """The address of `pinned` on one index.

    Raises:
        IndexLookupError: the page cannot be read or does not list the file.
    """
    page_url = f"{index_url.rstrip('/')}/{pinned.project}/"
    try:
        response = client.get(page_url, headers={"Accept": _ACCEPT})
        response.raise_for_status()
    except httpx.HTTPStatusError as error:
        raise IndexLookupError(f"{_host(page_url)} answered {error.response.status_code}") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise IndexLookupError(f"{_host(page_url)} did not answer ({error})") from None
    href = _links(response).get(pinned.filename)
    if href is None:
        raise IndexLookupError(f"{_host(page_url)} does not list {pinned.filename}")
    return _with_credentials(httpx.URL(urljoin(str(response.url), href)), response.url)


def pip_download(pinned: PinnedFile, *, to: Path) -> None:
    """Let pip fetch `pinned` as the file `to`: no progress, no resuming, but all pip's ways.

    Raises:
        IndexLookupError: pip does not find or cannot fetch it.
        UserError: what it fetched is another file.
    """
    with tempfile.TemporaryDirectory(
        dir=to.parent, prefix=f".{to.stem}.", suffix=f".tmp{to.suffix}"
    ) as scratch:
        done = _run_pip(
            "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--retries=1",
            "--quiet", "--dest", scratch, pinned.requirement,
        )  # fmt: skip
        fetched = Path(scratch) / pinned.filename
        if done.returncode != 0 or not fetched.is_file():
            raise IndexLookupError(f"pip: {_last_error(done.stderr)}")
        accept(fetched, to=to, sha256=pinned.sha256)


def _pip_config() -> dict[str, str]:
    """Settings of `pip download`; as in pip, the environment wins over the command's section."""
    listed = {}
    for line in _run_pip("config", "list").stdout.splitlines():
        name, _, value = line.partition("=")
        listed[name] = str(ast.literal_eval(value)) if value[:1] in {"'", '"'} else value
    sections = ("global", "download", ":env:")
    return {
        name.removeprefix(f"{section}."): value
        for section in sections
        for name, value in listed.items()
        if name.startswith(f"{section}.")
    }


def _pip_default_index() -> str | None:
    """pip's own default, as its help states it."""
    text = " ".join(_run_pip("help", "download").stdout.split())
    found = re.search(r"--index-url <url> .*?\(default (https?://[^)\s]+)\)", text)
    return found.group(1) if found else None


def _run_pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "COLUMNS": "200"},
    )


def _last_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["no message"])[-1]


def _with_scheme(proxy: str | None) -> str | None:
    """pip takes `host:port`, httpx wants an address."""
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy


def _ca_file(environment: Mapping[str, str]) -> str | None:
    return next((environment[name] for name in _CA_VARIABLES if environment.get(name)), None)


def _trust(ca_file: str | None) -> ssl.SSLContext:
    """The named bundle alone, else the system's authorities and those that come with httpx."""
    if ca_file is None:
        context = ssl.create_default_context()
        import certifi

        context.load_verify_locations(certifi.where())
        return context
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise UserError(
            f"the certificate bundle {ca_file} cannot be read ({error}); "
            "correct pip's `cert` setting or REQUESTS_CA_BUNDLE"
        ) from None


def _links(response: httpx.Response) -> dict[str, str]:
    """File name to address, from either form of the page."""
    if "json" in response.headers.get("content-type", ""):
        try:
            return {file["filename"]: file["url"] for file in response.json()["files"]}
        except (json.JSONDecodeError, KeyError, TypeError):
            raise IndexLookupError(f"{response.url.host} sent a page that is no index") from None
    reader = _LinkReader()
    reader.feed(response.text)
    return reader.links


class _LinkReader(HTMLParser):
    """PEP 503: one anchor a file, its text the file's name."""

    def __init__(self) -> None:
        super().__init__()
        self.links: dict[str, str] = {}
        self._href: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self._href = dict(attrs).get("href")

    def handle_data(self, data: str) -> None:
        if self._href and data.strip():
            self.links[data.strip()] = self._href

    def handle_endtag(self, tag: str) -> None:
        if tag == "a":
            self._href = None


def _with_credentials(url: httpx.URL, page: httpx.URL) -> httpx.URL:
    """A private index expects on its files the user and password of its page."""
    if url.host == page.host and page.userinfo and not url.userinfo:
        return url.copy_with(userinfo=page.userinfo)
    return url


def _host(url: str) -> str:
    """Enough to recognise an index by, without a password that its address may hold."""
    return urlsplit(url).hostname or "the index"
