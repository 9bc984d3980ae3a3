"""`hvd serve` without its words: start Serve where Ray is, deploy, change, drain, end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from math import ceil
from typing import Any
from urllib.request import Request, urlopen

from hvd_ray.errors import UserError
from hvd_ray.home import ensure_dir, hvd_home
from hvd_ray.serving.auth import load_keys
from hvd_ray.serving.listener import KEEP_ALIVE_S, lent
from hvd_ray.serving.listener import VARIABLE as LISTENER
from hvd_ray.serving.settings import ServeConfig, deploy_tree

APP = "hvd"
STARTING_S = 600.0
SETTLING_S = 0.5
ASKING_S = 15.0
FEW_THREADS = {
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
}
"""Settings of Serve's for a Ray of our own: our deployments do not block the loop that they run in
once they serve, and on few cores each hop to another thread waits for one."""
_log = logging.getLogger(__name__)
_CAUSE = re.compile(r"(?:UserError|NotSupportedError): (.+)")


@dataclass(frozen=True, slots=True)
class Served:
    """A running deployment."""

    host: str
    port: int
    log_folder: str | None
    dashboard: str | None
    token_file: str | None = None
    """Holds what Ray's dashboard asks for."""

    @property
    def base(self) -> str:
        host = "127.0.0.1" if self.host in ("0.0.0.0", "localhost") else self.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def state(self, config: ServeConfig) -> Mapping[str, Any]:
        """What `/ui/state` says of what serves; empty where it cannot be asked from here."""
        keys = load_keys(config.serving.api_keys).tenant_of
        bearer = {"Authorization": f"Bearer {keys[0][0].decode()}"} if keys else {}
        try:
            with urlopen(Request(f"{self.base}/ui/state", headers=bearer), timeout=ASKING_S) as got:
                found: Mapping[str, Any] = json.load(got)
        except (OSError, ValueError):  # the cluster is elsewhere, or its replicas have just died
            return {}
        return found

    def change(self, config: ServeConfig, *, is_given_up: Callable[[], bool]) -> None:
        """Take other settings on; what only changes `user_config` restarts nothing.

        Returns before they are when `is_given_up`: whoever ends need not wait for new replicas.

        Raises:
            UserError: they cannot be deployed.
        """
        deploy(config, is_given_up=is_given_up)


@contextmanager
def serving(
    config: ServeConfig, *, host: str, port: int, has_dashboard: bool = False
) -> Iterator[Served]:
    """Serve until the block is left; requests under way are finished first.

    Raises:
        UserError: Ray cannot be reached, or the deployment fails for a reason that can be mended.
    """
    from hvd_ray.pipelines.cluster import connected, is_own_next

    is_own = is_own_next()
    num_cpus = ceil(config.serving.most_replicas * config.serving.cpus_per_replica) + 1
    with ExitStack() as ending:
        if is_own:
            ending.enter_context(_own_environment(host, port))
        ray = ending.enter_context(connected(num_cpus=num_cpus, has_dashboard=has_dashboard))
        from ray import serve

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        is_hurried = False
        try:
            _start(host, port, has_proxy=not is_own)
            deploy(config)
            with _token_file() if has_dashboard else nullcontext() as token_file:
                yield Served(host, port, _log_folder(ray), _dashboard(ray), token_file)
            try:
                _finish(config.serving.drain_s)
            except KeyboardInterrupt:
                is_hurried = True
                raise
        finally:
            # Ray prints there, in colours, that a task has failed: Serve's controller, which ends.
            ending.enter_context(redirect_stdout(StringIO()))
            if not is_own:
                serve.delete(APP, _blocking=not is_hurried)
            elif not is_hurried:
                serve.shutdown()  # ends the proxy at once, so that no 404 of Serve's is seen


@contextmanager
def _own_environment(host: str, port: int) -> Iterator[None]:
    """What the processes of a Ray of our own find in theirs; the caller's settings win."""
    for name, value in FEW_THREADS.items():
        os.environ.setdefault(name, value)
    with lent(host, port) as listener:
        os.environ[LISTENER] = listener
        try:
            yield
        finally:
            del os.environ[LISTENER]


def _finish(limit_s: float) -> None:
    """Have the front refuse what comes from now on, and wait for what it has taken on.

    Deleting the application lets that end, too, but answers everybody else with Serve's own 404,
    which no client tries again.
    """
    loop = asyncio.new_event_loop()  # what handles of Serve's listen with outlives them in it
    threading.Thread(target=loop.run_forever, name="finish", daemon=True).start()
    asyncio.run_coroutine_threadsafe(_finished(limit_s), loop).result()


async def _finished(limit_s: float) -> None:
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.context import _get_global_client
    from ray.serve.exceptions import RayServeException

    try:
        async with asyncio.timeout(limit_s):
            await serve.get_app_handle(APP).finish.remote()
    except (TimeoutError, RayError, RayServeException) as error:
        _log.warning("not everything that was under way has ended: %r", error)
    finally:  # Serve would end the handle from another thread than its own
        await _get_global_client().shutdown_cached_handles_async()


def _start(host: str, port: int, *, has_proxy: bool) -> None:
    """Start Serve; one that runs already keeps its address, which must then be ours.

    Without a proxy the front answers on a socket of ours (`listener.py`).

    Raises:
        UserError: it listens elsewhere.
    """
    from ray import serve
    from ray.serve.context import _get_global_client

    serve.start(
        proxy_location="HeadOnly" if has_proxy else "Disabled",
        http_options={"host": host, "port": port, "keep_alive_timeout_s": KEEP_ALIVE_S},
        logging_config={"enable_access_log": False},
    )
    found = _get_global_client().http_config
    if (found.host, found.port) != (host, port):
        raise UserError(
            f"Serve runs on this cluster already, on {found.host}:{found.port}: give "
            f"--host {found.host} --port {found.port}"
        )


def deploy(config: ServeConfig, *, is_given_up: Callable[[], bool] = lambda: False) -> None:
    """Bring these settings to a running Serve, as `serve deploy` does with a file.

    What changes `user_config` alone restarts nothing, and other applications stay as they are.

    Raises:
        UserError: they cannot be deployed; what was served before is served on.
    """
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    client = _get_global_client()
    tree = deploy_tree(config, app=APP)
    tree["applications"] += _others(client.get_serve_details())
    client.deploy_apps(ServeDeploySchema.model_validate(tree))
    _wait_until_running(is_given_up)


def _others(details: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Applications that settings brought here before: Serve deletes those that are not named again.

    Raises:
        UserError: one of them has our route.
    """
    known = [app["deployed_app_config"] for app in details.get("applications", {}).values()]
    others = [config for config in known if config is not None and config["name"] != APP]
    for config in others:
        if config.get("route_prefix", "/") == "/":
            raise UserError(
                f"the cluster serves the application {config['name']!r} at / already; take it away "
                "first, or unset RAY_ADDRESS to serve on this machine alone"
            )
    return others


def _wait_until_running(is_given_up: Callable[[], bool]) -> None:
    from ray import serve

    time.sleep(SETTLING_S)  # the controller takes the change up in its next round
    deadline = time.monotonic() + STARTING_S
    while time.monotonic() < deadline and not is_given_up():
        app = serve.status().applications[APP]
        if app.status == "RUNNING":
            return
        told = "\n".join([app.message, *(one.message for one in app.deployments.values())])
        if app.status in ("DEPLOY_FAILED", "UNHEALTHY") or _CAUSE.search(told):
            raise UserError(f"the model cannot be served: {_cause(told)}")
        time.sleep(0.5)
    if is_given_up():
        return
    raise UserError(f"the model was not served after {STARTING_S:.0f} s; see the logs of Serve")


def _cause(message: str) -> str:
    """What a replica said; Serve wraps it into its own words and a traceback."""
    found = _CAUSE.findall(message)
    lines = message.strip().splitlines() or ["Serve does not say why"]
    return str(found[-1]) if found else lines[-1]


def _log_folder(ray: Any) -> str | None:
    node = ray._private.worker._global_node
    return None if node is None else f"{node.get_logs_dir_path()}/serve"


@contextmanager
def _token_file() -> Iterator[str | None]:
    """The private Ray's token in a file for this user's eyes, gone with the server."""
    token = os.environ.get("RAY_AUTH_TOKEN")
    if token is None:
        yield None
        return
    path = ensure_dir(hvd_home()) / f"ray-token-{os.getpid()}"
    try:
        path.touch(mode=0o600)
        path.write_text(token + "\n")
        yield str(path)
    finally:
        path.unlink(missing_ok=True)


def _dashboard(ray: Any) -> str | None:
    url = ray._private.worker._global_node.webui_url if ray._private.worker._global_node else None
    return f"http://{url}" if url else None
