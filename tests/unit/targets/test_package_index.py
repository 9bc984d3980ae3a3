"""Reading whichever index pip is set up for."""

from pathlib import Path

import httpx
import pytest

from hvd_ray.errors import UserError
from hvd_ray.targets import package_index
from hvd_ray.targets.package_index import (
    IndexLookupError,
    PipSettings,
    find_url,
    http_client,
    read_pip_settings,
)
from hvd_ray.targets.pinned_file import PinnedFile

WHEEL = PinnedFile("a-model", "1.0", "a_model-1.0-py3-none-any.whl", sha256="0" * 64, num_bytes=10)
HTML = """<!DOCTYPE html><html><head><title>Links</title></head><body>
<a href="../../files/a_model-0.9-py3-none-any.whl#sha256=11">a_model-0.9-py3-none-any.whl</a><br/>
<a href="../../files/a_model-1.0-py3-none-any.whl#sha256=00" data-requires-python="&gt;=3.9">
  a_model-1.0-py3-none-any.whl
</a></body></html>"""
JSON = {
    "files": [
        {"filename": WHEEL.filename, "url": "https://files.test/x/a_model-1.0-py3-none-any.whl"}
    ]
}


def found(answer: httpx.Response, index_url: str = "https://index.test/simple") -> str:
    client = httpx.Client(transport=httpx.MockTransport(lambda _: answer))
    return str(find_url(WHEEL, index_url=index_url, client=client))


@pytest.mark.parametrize("index_url", ["https://index.test/simple", "https://index.test/simple/"])
def test_html_page_with_relative_links(index_url: str) -> None:
    url = found(httpx.Response(200, html=HTML), index_url)
    assert url == "https://index.test/files/a_model-1.0-py3-none-any.whl#sha256=00"


def test_json_page() -> None:
    assert found(httpx.Response(200, json=JSON)) == JSON["files"][0]["url"]


def test_credentials_of_a_private_index_go_to_its_own_files_only() -> None:
    private = "https://me:secret@index.test/simple"
    assert "me:secret@" in found(httpx.Response(200, html=HTML), private)
    assert "secret" not in found(httpx.Response(200, json=JSON), private)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (httpx.Response(404), "answered 404"),
        (httpx.Response(200, html="<a href='x'>other.whl</a>"), "does not list"),
        (httpx.Response(200, json={"message": "hello"}), "no index"),
        (httpx.Response(200, json=[1]), "no index"),
        (httpx.Response(200, headers={"content-type": "application/json"}, text="{"), "no index"),
    ],
)
def test_a_page_without_the_file_says_why(answer: httpx.Response, reason: str) -> None:
    with pytest.raises(IndexLookupError, match=reason) as caught:
        found(answer, "https://me:secret@index.test/simple")
    assert "secret" not in str(caught.value)


def test_an_unreachable_index_is_named() -> None:
    with httpx.Client() as client, pytest.raises(IndexLookupError, match=r"127\.0\.0\.1 did not"):
        find_url(WHEEL, index_url="http://127.0.0.1:9/simple", client=client)


def test_settings_come_from_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = https://from-file.test/simple\nproxy = proxy.test:3128\n"
        "extra-index-url =\n    https://more.test/simple\n    file:///on/disk\n"
        "[download]\ncert = /from/section.pem\n"
    )
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CERT", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    settings = read_pip_settings()
    assert settings.index_urls == ("https://from-file.test/simple", "https://more.test/simple")
    assert settings.ca_file == "/from/section.pem"
    assert settings.proxy == "http://proxy.test:3128"
    monkeypatch.setenv("PIP_INDEX_URL", "https://from-environment.test/simple")
    assert read_pip_settings().index_urls[0] == "https://from-environment.test/simple"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert read_pip_settings().index_urls == ()


def test_without_a_setting_pip_names_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    default = package_index._pip_default_index()
    assert default is not None
    assert default.startswith("https://")
    assert read_pip_settings().index_urls[0] == default


def test_an_unreadable_certificate_bundle_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"certificate bundle .*none\.pem cannot be read"):
        http_client(PipSettings(index_urls=(), ca_file=str(tmp_path / "none.pem")))
