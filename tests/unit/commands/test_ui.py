"""`hvd ui`: mistakes are one line; serving itself is tested end to end."""

import socket
from collections.abc import Iterator

import pytest

from hvd_ray.commands.ui import ui
from hvd_ray.errors import UserError


@pytest.fixture(autouse=True)
def no_server(hvd_home: object, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr("hvd_ray.commands.ui._serve", _never)


def _never(*_arguments: object, **_more: object) -> None:
    raise AssertionError("a server was started")


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_busy_port(busy_port: int) -> None:
    with pytest.raises(UserError, match=f"127.0.0.1:{busy_port}: Address already in use; choose"):
        ui(port=busy_port)


@pytest.mark.parametrize("port", [0, -5, 65536])
def test_a_port_that_is_none(port: int) -> None:
    with pytest.raises(UserError, match=f"--port {port}: expected 1 to 65535"):
        ui(port=port)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "203.0.113.7", "no such host", ""])
def test_a_host_that_others_reach(host: str) -> None:
    with pytest.raises(UserError, match=f"--host {host} can be reached by others"):
        ui(host=host, port=5999)


def test_tracking_off_has_nothing_to_show() -> None:
    with pytest.raises(UserError, match="nothing to show"):
        ui(["tracking.uri=none"])


def test_a_server_has_pages_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    ui(["tracking.uri=https://me:hunter2@mlflow.example"])
    said = capsys.readouterr().out
    assert "open https://me:***@mlflow.example" in said
