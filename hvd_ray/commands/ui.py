"""`hvd ui`: the MLflow pages on the configured store."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from hvd_ray.errors import UserError

EXAMPLE = "Example: `hvd ui --port 5000`"
STARTING_S = 120.0
STOPPING_S = 10.0


def register(app: typer.Typer) -> None:
    app.command("ui", epilog=EXAMPLE)(ui)


def ui(
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="E.g. tracking.uri=sqlite:////data/runs.db."),
    ] = None,
    port: Annotated[int, typer.Option(help="1 to 65535.")] = 5000,
    host: Annotated[str, typer.Option(help="Address to listen on; this machine only.")] = (
        "127.0.0.1"
    ),
    config: Annotated[Path | None, typer.Option(help="A YAML file of settings.")] = None,
) -> None:
    """Show runs and registered predictors in the browser; Ctrl-C ends it."""
    from hvd_ray.config import load_config
    from hvd_ray.tracking import OFF, prepare_store, runs_page, tracking_uri

    loaded = load_config(config, settings or ())
    uri = tracking_uri(loaded)
    if uri == OFF:
        raise UserError("there is nothing to show: tracking is off (tracking.uri=none)")
    if uri.startswith(("http://", "https://", "databricks")):
        print(f"runs are kept by a server with pages of its own: open {_public(uri)}")
        return
    _check_loopback(host)
    _check_free(host, port)
    prepare_store(uri)
    _serve(uri, host, port, runs=runs_page(uri, loaded.tracking.experiment))


def _serve(uri: str, host: str, port: int, *, runs: str | None) -> None:
    """Run MLflow's server until it is told to end."""
    from hvd_ray.home import ensure_dir, tracking_dir

    log = ensure_dir(tracking_dir()) / "ui.log"
    with _ended_by_signals(), log.open("w") as output:
        server = subprocess.Popen(
            _command(host, port),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(uri),
            start_new_session=True,  # so that its workers end with it, and only when we say so
        )
        try:
            print(f"starting MLflow on {_public(uri)}", file=sys.stderr)
            _wait_until_up(server, host, port, log)
            url = f"http://{host}:{port}"
            print(f"MLflow is on {url} (Ctrl-C ends it)", flush=True)
            if runs is not None:
                print(f"the runs: {url}/{runs}", flush=True)
            code = server.wait()
            raise UserError(f"the MLflow server ended by itself (exit code {code}); see {log}")
        except KeyboardInterrupt:
            print("ended", file=sys.stderr)
        finally:
            _end(server)


def _command(host: str, port: int) -> list[str]:
    words = ["--host", host, "--port", str(port), "--workers", "1"]
    return [sys.executable, "-m", "mlflow", "server", *words]


def _environment(uri: str) -> dict[str, str]:
    """The store goes by variables: arguments, with a password in them, are there for all to see."""
    from hvd_ray.tracking import artifact_location

    return {
        **os.environ,
        "MLFLOW_BACKEND_STORE_URI": uri,
        "MLFLOW_DEFAULT_ARTIFACT_ROOT": artifact_location(uri) or "",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }


def _check_loopback(host: str) -> None:
    """MLflow's pages know no users: whoever reaches them may change runs and predictors."""
    from hvd_ray.serving.auth import is_loopback_host

    if not is_loopback_host(host):
        raise UserError(
            f"--host {host} can be reached by others, and these pages ask nobody who they are: "
            "leave it out and forward the port (ssh -L), or run an MLflow server with users"
        )


def _check_free(host: str, port: int) -> None:
    if not 1 <= port <= 65535:
        raise UserError(f"--port {port}: expected 1 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"cannot listen on {host}:{port}: {reason}; choose another with --port or --host"
        ) from None


def _wait_until_up(server: subprocess.Popen[bytes], host: str, port: int, log: Path) -> None:
    """Return once the server accepts connections."""
    deadline = time.monotonic() + STARTING_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise UserError(
                f"the MLflow server did not start (exit {server.returncode}); see {log}"
            )
        try:
            socket.create_connection((host, port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.2)
    raise UserError(f"the MLflow server was not up after {STARTING_S:.0f} s; see {log}")


def _end(server: subprocess.Popen[bytes]) -> None:
    """End the server and what it started."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, how)
        except ProcessLookupError:
            break
        try:
            server.wait(STOPPING_S)
        except subprocess.TimeoutExpired:
            continue


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """A plain `kill` ends it as Ctrl-C does, also where a shell had it ignore Ctrl-C."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = {
        number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _public(uri: str) -> str:
    from hvd_ray.provenance import masked

    return str(masked(uri))
