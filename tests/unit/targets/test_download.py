"""Downloads that break, lie or resume: the file is whole and right, or it is not there."""

import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_ray.errors import UserError
from hvd_ray.targets import download as module
from hvd_ray.targets.download import download

CONTENT = bytes(range(256)) * 40
SHA256 = hashlib.sha256(CONTENT).hexdigest()
URL = "http://index.test/file.whl"


class Server:
    """Serves `content`; the n-th answer breaks after `breaks[n]` bytes of its body."""

    def __init__(
        self, content: bytes = CONTENT, *, breaks: tuple[int, ...] = (), has_ranges: bool = True
    ) -> None:
        self.content = content
        self.breaks = list(breaks)
        self.has_ranges = has_ranges
        self.ranges: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.ranges.append(request.headers["range"])
        start = int(request.headers["range"].removeprefix("bytes=").removesuffix("-"))
        start = start if self.has_ranges else 0
        body = self.content[start:]
        end = self.breaks.pop(0) if self.breaks else None
        return httpx.Response(
            206 if self.has_ranges else 200,
            headers={"content-length": str(len(body))},
            stream=_Body(body, end),
        )


class _Body(httpx.SyncByteStream):
    def __init__(self, body: bytes, end: int | None) -> None:
        self._body = body
        self._end = end

    def __iter__(self) -> Iterator[bytes]:
        sent = self._body if self._end is None else self._body[: self._end]
        for start in range(0, len(sent), 100):
            yield sent[start : start + 100]
        if self._end is not None:
            raise httpx.ReadError("the peer went away")


def fetch(server: Server, to: Path, seen: list[int] | None = None) -> None:
    client = httpx.Client(transport=httpx.MockTransport(server))
    on_bytes = [].append if seen is None else seen.append
    download(URL, to=to, num_bytes=len(CONTENT), sha256=SHA256, client=client, on_bytes=on_bytes)


@pytest.fixture(autouse=True, scope="module")
def no_pauses() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_FIRST_PAUSE_S", 0.0)
        yield


def test_progress_counts_up_to_the_whole(tmp_path: Path) -> None:
    seen: list[int] = []
    fetch(Server(), tmp_path / "f.whl", seen)
    assert seen == sorted(seen)
    assert seen[-1] == len(CONTENT)
    assert [file.name for file in tmp_path.iterdir()] == ["f.whl"]


def test_an_earlier_part_is_continued(tmp_path: Path) -> None:
    (tmp_path / "f.whl.part").write_bytes(CONTENT[:5000])
    server = Server()
    fetch(server, tmp_path / "f.whl")
    assert server.ranges == ["bytes=5000-"]
    assert (tmp_path / "f.whl").read_bytes() == CONTENT


@pytest.mark.parametrize("stale", [b"another file", b"x" * len(CONTENT), b"x" * 20_000])
def test_a_part_of_another_file_is_thrown_away(tmp_path: Path, stale: bytes) -> None:
    (tmp_path / "f.whl.part").write_bytes(stale)
    fetch(Server(), tmp_path / "f.whl")
    assert (tmp_path / "f.whl").read_bytes() == CONTENT


@given(
    st.lists(st.integers(0, len(CONTENT)), max_size=8).map(tuple),
    st.booleans(),
    st.integers(0, len(CONTENT)),
)
def test_whatever_breaks_the_file_is_right_or_absent(
    tmp_path_factory: pytest.TempPathFactory,
    breaks: tuple[int, ...],
    has_ranges: bool,
    num_there: int,
) -> None:
    target = tmp_path_factory.mktemp("d") / "f.whl"
    part = target.with_name("f.whl.part")
    part.write_bytes(CONTENT[:num_there])
    refusal = ""
    try:
        fetch(Server(breaks=breaks, has_ranges=has_ranges), target)
    except UserError as error:
        refusal = str(error)
    if refusal:
        assert len(breaks) > module._MAX_BREAKS
        assert "run the command again, it resumes" in refusal
        assert not target.exists()
        assert CONTENT.startswith(part.read_bytes())
    else:
        assert target.read_bytes() == CONTENT
        assert not part.exists()


def test_wrong_content_is_refused_and_not_kept(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"sha256 .* expected {SHA256}"):
        fetch(Server(b"x" * len(CONTENT)), tmp_path / "f.whl")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"<html>please sign in</html>", CONTENT + b"more"])
def test_a_wrong_size_is_refused_before_it_is_written(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(UserError, match=r"offers .* bytes .* expected 10,240"):
        fetch(Server(content), tmp_path / "f.whl")
    assert list(tmp_path.iterdir()) == []


def test_a_refusing_server_is_told_apart(tmp_path: Path) -> None:
    client = httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(403)))
    with pytest.raises(httpx.HTTPStatusError):
        download(URL, to=tmp_path / "f", num_bytes=9, sha256=SHA256, client=client, on_bytes=print)


def test_a_full_disk_keeps_the_part(tmp_path: Path) -> None:
    def disk_fills(done: int) -> None:
        if done > 4000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    client = httpx.Client(transport=httpx.MockTransport(Server(breaks=(6000,))))
    target = tmp_path / "f.whl"
    with pytest.raises(UserError, match="no room left"):
        download(
            URL,
            to=target,
            num_bytes=len(CONTENT),
            sha256=SHA256,
            client=client,
            on_bytes=disk_fills,
        )
    assert not target.exists()
    fetch(Server(), target)
    assert target.read_bytes() == CONTENT
