"""A tracking server that is not to be trusted: where its files may lie, how many, for how long."""

from __future__ import annotations

import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from hvd_ray.config import Config
from hvd_ray.errors import UserError
from hvd_ray.tracking import artifacts, resolve_predictor
from hvd_ray.tracking.artifacts import check_place
from hvd_ray.tracking.runs import MlflowTracker
from hvd_ray.tracking.store import Store, open_store

ROOT = "mlflow-artifacts:/1/run/artifacts"
FILES = {"predictor.json": b"{}", "weights.safetensors": b"w"}


class Server:
    """Speaks just enough of MLflow's protocol, and lies where it is told to."""

    def __init__(self) -> None:
        self.uri = ""
        self.source = "runs:/run/predictor"
        self.root = ROOT
        self.listing: Any = {"files": [{"path": n, "is_dir": False} for n in FILES]}
        self.drip_s = 0.0
        self.asked: list[str] = []

    def answer(self, path: str, query: dict[str, list[str]]) -> bytes:
        self.asked.append(path)
        if path.endswith("model-versions/get"):
            version = {"name": "x", "version": "1", "source": self.source, "run_id": "run"}
            return json.dumps({"model_version": version}).encode()
        if path.endswith("runs/get"):
            info = {"run_id": "run", "experiment_id": "1", "artifact_uri": self.root}
            return json.dumps({"run": {"info": info, "data": {}}}).encode()
        if path.endswith("mlflow-artifacts/artifacts"):
            self.asked[-1] += f"?{query.get('path')}"
            return json.dumps(self.listing).encode()
        return FILES.get(path.rsplit("/", 1)[-1], b"?")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    made = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            body = made.answer(parts.path, parse_qs(parts.query))
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            try:
                for byte in body:
                    self.wfile.write(bytes([byte]))
                    time.sleep(made.drip_s)
            except ConnectionError:
                self.close_connection = True

        do_POST = do_PUT = do_GET

        def log_message(self, format: str, *args: object) -> None: ...

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as found:
        found.daemon_threads = True
        found.block_on_close = False
        threading.Thread(target=found.serve_forever, args=(0.02,), daemon=True).start()
        made.uri = f"http://127.0.0.1:{found.server_address[1]}"
        yield made
        found.shutdown()


def resolved(server: Server, ref: str = "models:/x/1") -> Path:
    config = Config.model_validate({"model": "toy", "tracking": {"uri": server.uri}})
    return resolve_predictor(ref, config=config)


def refused(server: Server, ref: str = "models:/x/1") -> str:
    with pytest.raises(UserError) as refusal:
        resolved(server, ref)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_what_a_server_serves_itself_is_copied(server: Server, hvd_home: Path) -> None:
    folder = resolved(server)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES
    assert folder.is_relative_to(hvd_home)
    num_asked = len(server.asked)
    assert resolved(server) == folder
    assert len(server.asked) == num_asked + 1, "a version never changes"


BAD_PLACES = (
    "../../etc",
    "/etc",
    "file:///etc",
    "etc",
    "models:/x/1",
    "models:/m-1",
    "http://127.0.0.1:9/secret",
    "ftp://127.0.0.1/etc",
    "sftp://127.0.0.1/etc",
    "mlflow-artifacts:/../../etc",
    "mlflow-artifacts:/%2e%2e/etc",
    "mlflow-artifacts:/%252e%252e/etc",
    "mlflow-artifacts:/..\\etc",
    "mlflow-artifacts://127.0.0.1:9/artifacts",
    "s3://bucket/../other",
    "nonsense://x",
    "",
)


@pytest.mark.parametrize("place", BAD_PLACES)
@pytest.mark.parametrize("is_runs", [False, True], ids=["source", "run"])
@pytest.mark.usefixtures("hvd_home")
def test_a_server_cannot_name_any_place(
    server: Server, place: str, is_runs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither as a version's source nor as the place of the run that a version points at."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    server.source, server.root = ("runs:/run/predictor", place) if is_runs else (place, ROOT)
    assert "for its files" in refused(server)
    assert not list((tmp_path / "cwd").iterdir())
    assert not any("mlflow-artifacts" in path for path in server.asked)


@pytest.mark.parametrize("place", ["/etc", "file:///tmp/elsewhere", "models:/x/1"])
def test_nothing_is_written_where_a_server_points(
    server: Server, place: str, tmp_path: Path
) -> None:
    server.root = place
    (tmp_path / "made").mkdir()
    tracker = MlflowTracker(open_store(server.uri), "run")
    with pytest.raises(UserError, match="for its files"):
        tracker.log_artifacts(tmp_path / "made")


def test_this_machines_own_store_may_be_served(hvd_home: Path) -> None:
    """`hvd ui` shows the runs of the store under HVD_HOME, whose files lie there."""
    own = Store("http://127.0.0.1:1", None)
    check_place(own, (hvd_home / "tracking" / "artifacts" / "1").as_uri())
    with pytest.raises(UserError, match="folder of this machine"):
        check_place(own, (hvd_home / "models").as_uri())
    check_place(own, "file:///home/one/hvd_ray/tracking/artifacts/1")  # of another HVD_HOME
    for uri in ("http://127.0.0.1:1", "https://mlflow.example"):
        with pytest.raises(UserError, match="folder of this machine"):
            check_place(Store(uri, None), "file:///home/one/hvd_ray/models/artifacts/1")
    with pytest.raises(UserError, match="folder of this machine"):
        check_place(Store("https://mlflow.example", None), "file:///x/tracking/artifacts/1")
    check_place(Store("sqlite:////a/b.db", None), "file:///anywhere")
    check_place(own, "s3://bucket/1/run/artifacts")


def listing(*names: str, is_dir: bool = False) -> Any:
    return {"files": [{"path": name, "is_dir": is_dir} for name in names]}


@pytest.mark.parametrize(
    "said",
    [
        {"files": [{"path": 5}]},
        {"files": [{"path": 5, "is_dir": False}]},
        {"files": None},
        {"files": 3},
        {"files": [3]},
        [],
        "text",
        None,
        listing("../predictor.json"),
        listing("/etc/passwd"),
        listing("a/predictor.json"),
        listing("..\\predictor.json"),
        listing("x" * 300),
        listing(*(f"f{number}" for number in range(1000))),
        listing(),
        listing("other.json"),
    ],
    ids=str,
)
def test_a_listing_of_another_form_is_one_line(server: Server, said: Any, hvd_home: Path) -> None:
    server.listing = said
    refused(server)
    assert not list(hvd_home.rglob("*.safetensors"))


@pytest.mark.usefixtures("hvd_home")
def test_a_listing_that_holds_itself_is_read_once(server: Server) -> None:
    files = [*server.listing["files"], {"path": "sub", "is_dir": True}]
    server.listing = {"files": files}
    assert {path.name for path in resolved(server).iterdir()} == set(FILES)
    assert sum("artifacts?" in path for path in server.asked) == 1


@pytest.mark.usefixtures("hvd_home")
def test_a_server_that_drips_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "DOWNLOAD_LIMIT_S", 0.5)
    server.drip_s = 0.2
    began_s = time.monotonic()
    assert "did not answer whole within 0.5 s" in refused(server)
    assert time.monotonic() - began_s < 5


def test_endless_files_are_given_up(
    server: Server, monkeypatch: pytest.MonkeyPatch, hvd_home: Path
) -> None:
    monkeypatch.setattr(artifacts, "MAX_BYTES", 2)
    assert "more than 2 bytes" in refused(server)
    assert not list(hvd_home.rglob("*.safetensors"))


@pytest.mark.parametrize("ref", ["models:/a\0b/1", "models:/a\nb@champion", "models:/a@b\0c"])
@pytest.mark.usefixtures("hvd_home")
def test_a_name_that_no_folder_can_have_is_refused(server: Server, ref: str) -> None:
    assert "expected a folder, models:/NAME@ALIAS" in refused(server, ref)
    assert not server.asked


@pytest.mark.parametrize(
    "change",
    [
        lambda server: setattr(server, "source", 5),
        lambda server: setattr(server, "source", None),
        lambda server: setattr(server, "root", None),
        lambda server: setattr(server, "root", ["a"]),
    ],
)
@pytest.mark.usefixtures("hvd_home")
def test_a_place_of_another_type_is_one_line(
    server: Server, change: Callable[[Server], None]
) -> None:
    change(server)
    refused(server)
