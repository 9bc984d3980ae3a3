"""`hvd serve`: the OpenAI endpoints, a page and metrics, on Ray Serve."""

from __future__ import annotations

import json
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated

import typer

from hvd_ray.errors import UserError

if TYPE_CHECKING:
    from hvd_ray.serving.run import Served
    from hvd_ray.serving.settings import ServeConfig

EXAMPLE = (
    "Example: `hvd serve --port 8000 policy.name=suffix`; then "
    "`curl http://127.0.0.1:8000/v1/models`, or open http://127.0.0.1:8000/ui"
)


def register(app: typer.Typer) -> None:
    app.command("serve", epilog=EXAMPLE)(serve)


def serve(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="E.g. model=DIR policy.name=suffix serving.limits.max_running=8.",
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="1 to 65535.")] = 8000,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Others than loopback need API keys.")
    ] = "127.0.0.1",
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="An embedded model, a folder or a hub id.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="torch or vllm.")] = None,
    replicas: Annotated[int | None, typer.Option(metavar="N", help="Copies of the model.")] = None,
    api_keys: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Lines of NAME KEY. Default: HVD_API_KEYS, or none."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A YAML file of settings; `kill -HUP` reads it again.")
    ] = None,
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Start Ray's dashboard too, on loopback.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Say where everything is in one line of JSON.")
    ] = False,
) -> None:
    """Serve a model behind OpenAI's endpoints; Ctrl-C finishes what is under way and ends.

    The draft cache is scoped by API key, and every answer is that of plain decoding (in bfloat16
    up to rounding, with dtype=float32 token for token). A request may say `"hvd": "off"`,
    `"cache"`, `"eagle3"` or `"auto"`. `/ui` shows who proposed what.
    """
    flags = {
        "model": model,
        "serving.engine": engine,
        "serving.replicas": replicas,
        "serving.api_keys": api_keys,
    }
    given = [
        f"{key}={json.dumps(value, default=str)}"
        for key, value in flags.items()
        if value is not None
    ]
    words = [*(settings or ()), *given]
    loaded = _load(config, words)
    _check(loaded, host, port)
    with _claimed(port):
        _run(loaded, words, config, host=host, port=port, has_dashboard=dashboard, as_json=as_json)


def _load(file: Path | None, words: list[str]) -> ServeConfig:
    from hvd_ray.config import read_settings
    from hvd_ray.serving.settings import serve_config

    return serve_config(read_settings(file, words))


def _check(config: ServeConfig, host: str, port: int) -> None:
    """Everything that can be refused before Ray is started."""
    from hvd_ray.commands.ui import _check_free

    _check_free(host, port)
    _check_settings(config, host)


def _check_settings(config: ServeConfig, host: str) -> None:
    """What a replica would refuse, said before one is started for it, or ended."""
    from hvd_ray.fetch import fetch_model
    from hvd_ray.serving.auth import is_loopback_host, load_keys
    from hvd_ray.serving.opening import check

    keys = load_keys(config.serving.api_keys)
    if keys.is_open and not is_loopback_host(host):
        raise UserError(
            f"--host {host} can be reached by others, so API keys are needed: give --api-keys FILE "
            "with lines of NAME KEY, or set HVD_API_KEYS"
        )
    fetch_model(config.model)
    check(config)


@contextmanager
def _claimed(port: int) -> Iterator[None]:
    """Keep the port from a second `hvd serve`: proxies share theirs, so both would answer.

    By a socket in Linux' abstract namespace, which ends with the process, however that ends.

    Raises:
        UserError: another one has it.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as claim:
        try:
            claim.bind(f"\0hvd_ray.serve.{port}")
        except OSError:
            raise UserError(
                f"another `hvd serve` is starting or running on port {port}; choose another with "
                "--port"
            ) from None
        yield


def _run(
    config: ServeConfig,
    words: list[str],
    file: Path | None,
    *,
    host: str,
    port: int,
    has_dashboard: bool,
    as_json: bool,
) -> None:
    from hvd_ray.serving.run import serving

    started_s = time.monotonic()
    took = "a minute or two" if config.serving.engine == "vllm" else "half a minute to two"
    print(f"starting {config.served_name} on Ray Serve ({took})", file=sys.stderr)
    with serving(config, host=host, port=port, has_dashboard=has_dashboard) as served:
        with _signals() as told:  # Ray has set its own on its start
            _show(served, config, time.monotonic() - started_s, as_json=as_json)
            while not told.is_ended:
                time.sleep(0.2)
                if told.wants_reload:
                    told.wants_reload = False
                    config = _reload(served, config, file, words, told)
        print("finishing what is under way; Ctrl-C ends at once", file=sys.stderr)
    print("ended", file=sys.stderr)


class _Told:
    """What signals have asked for."""

    is_ended = False
    wants_reload = False


@contextmanager
def _signals() -> Iterator[_Told]:
    """Ctrl-C and a plain `kill` end it gently, `kill -HUP` has it read its settings again."""
    told = _Told()

    def end(_number: int, _frame: object) -> None:
        told.is_ended = True

    def reload(_number: int, _frame: object) -> None:
        told.wants_reload = True

    handlers = {signal.SIGINT: end, signal.SIGTERM: end, signal.SIGHUP: reload}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reload(
    served: Served, current: ServeConfig, file: Path | None, words: list[str], told: _Told
) -> ServeConfig:
    """Read the settings again; what cannot be had is said, and the old ones stay. What serves."""
    try:
        _refuse_emptied(file)
        wanted = _load(file, words)
        _check_settings(wanted, served.host)
    except UserError as error:
        print(f"refused, the old settings stay: {error}", file=sys.stderr)
        return current
    try:
        served.change(wanted, is_given_up=lambda: told.is_ended)
    except UserError as error:  # Serve has ended what served before
        print(f"refused, going back to the old settings: {error}", file=sys.stderr)
        _go_back(served, current, told)
        return current
    if not told.is_ended:
        print("settings read again", file=sys.stderr)
    return wanted


def _refuse_emptied(file: Path | None) -> None:
    """A file caught half-written would put every setting back to its default without a word.

    Raises:
        UserError: there is nothing in it, or it cannot be read.
    """
    try:
        is_empty = file is not None and file.is_file() and not file.read_bytes().strip()
    except OSError as error:  # anything else than a UserError would end the server
        raise UserError(f"{file} cannot be read ({error})") from None
    if is_empty:
        raise UserError(f"{file}: the file is empty; {{}} in it asks for the defaults")


def _go_back(served: Served, current: ServeConfig, told: _Told) -> None:
    """Deploy what served before; where even that fails, the next HUP is another try."""
    try:
        served.change(current, is_given_up=lambda: told.is_ended)
    except UserError as error:
        print(f"the old settings cannot be deployed either: {error}", file=sys.stderr)


def _show(served: Served, config: ServeConfig, seconds: float, *, as_json: bool) -> None:
    places = {
        "api": f"{served.base}/v1",
        "page": f"{served.base}/ui",
        "metrics": f"{served.base}/metrics",
        "logs": served.log_folder,
        "dashboard": served.dashboard,
    }
    if served.token_file is not None:
        places["its token"] = served.token_file
    state = served.state(config)
    policy, notes = state.get("policy"), state.get("notes", [])
    if as_json:
        facts = {"model": config.served_name, "seconds": round(seconds, 1), **places}
        print(json.dumps({**facts, "policy": policy, "policy_notes": notes}), flush=True)
        return
    print(f"{config.served_name} is served after {seconds:.0f} s")
    print(f"  {'policy:':11}{policy or 'see the page'}")
    for note in notes:
        for line in wrap(note, 67, break_long_words=False, break_on_hyphens=False):
            print(f"{'':13}{line}")
    for name, place in places.items():
        print(f"  {name + ':':11}{place or 'off (--dashboard starts it)'}")
    print(f"  {'runs:':11}`hvd ui` shows them in MLflow")
    print("Ctrl-C ends it", flush=True)
