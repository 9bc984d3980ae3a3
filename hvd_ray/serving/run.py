"""`hvd serve` without its words: start Serve where Ray is, deploy, change, drain, end."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any

from hvd_ray.errors import UserError
from hvd_ray.serving.settings import ServeConfig

APP = "hvd"
_CAUSE = re.compile(r"(?:UserError|NotSupportedError): (.+)")


@dataclass(frozen=True, slots=True)
class Served:
    """A running deployment."""

    host: str
    port: int
    log_folder: str | None
    dashboard: str | None

    @property
    def base(self) -> str:
        host = "127.0.0.1" if self.host in ("0.0.0.0", "localhost") else self.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def change(self, config: ServeConfig) -> None:
        """Take other settings on; what only changes `user_config` restarts nothing.

        Raises:
            UserError: they cannot be deployed.
        """
        _deploy(config)


@contextmanager
def serving(
    config: ServeConfig, *, host: str, port: int, has_dashboard: bool = False
) -> Iterator[Served]:
    """Serve until the block is left; then requests under way are finished first.

    Raises:
        UserError: Ray cannot be reached, or the deployment fails for a reason that can be mended.
    """
    from hvd_ray.pipelines.cluster import connected

    num_cpus = ceil(_num_replicas(config) * config.serving.cpus_per_replica) + 1
    with connected(num_cpus=num_cpus, has_dashboard=has_dashboard) as ray:
        from ray import serve

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        try:
            serve.start(
                proxy_location="HeadOnly",
                http_options={"host": host, "port": port, "keep_alive_timeout_s": 90},
                logging_config={"enable_access_log": False},
            )
            _deploy(config)
            yield Served(host, port, _log_folder(ray), _dashboard(ray))
        finally:
            serve.shutdown()


def _num_replicas(config: ServeConfig) -> int:
    serving = config.serving
    return serving.autoscaling.max_replicas if serving.autoscaling else serving.replicas


def _deploy(config: ServeConfig) -> None:
    from ray import serve

    from hvd_ray.serving.app import application

    try:
        serve.run(application(config), name=APP, route_prefix="/")
    except RuntimeError as error:
        raise UserError(f"the model cannot be served: {_cause(str(error))}") from None


def _cause(message: str) -> str:
    """What a replica said; Serve wraps it into its own words and a traceback."""
    found = _CAUSE.findall(message)
    if not found:
        from ray import serve

        app = serve.status().applications.get(APP)
        told = [deployment.message for deployment in app.deployments.values()] if app else []
        found = _CAUSE.findall("\n".join(told))
    return str(found[-1]) if found else message.strip().splitlines()[-1]


def _log_folder(ray: Any) -> str | None:
    node = ray._private.worker._global_node
    return None if node is None else f"{node.get_logs_dir_path()}/serve"


def _dashboard(ray: Any) -> str | None:
    url = ray._private.worker._global_node.webui_url if ray._private.worker._global_node else None
    return f"http://{url}" if url else None
