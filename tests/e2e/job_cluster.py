"""A Ray head of one test's own, with its job server, on loopback; with or without a token."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STARTING_S = 120.0
PORT_FLAGS = (
    *("--port", "--dashboard-port", "--ray-client-server-port", "--metrics-export-port"),
    *("--dashboard-agent-listen-port", "--dashboard-agent-grpc-port"),
)


@dataclass(frozen=True)
class JobCluster:
    """Where jobs are handed in."""

    url: str
    gcs_address: str
    """What RAY_ADDRESS takes."""
    token: str | None
    """None: the cluster asks for none."""

    @property
    def environment(self) -> dict[str, str]:
        """What the `ray` commands need to reach it."""
        mode = {"RAY_AUTH_MODE": "disabled"}
        if self.token is not None:
            mode = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}
        return {**os.environ, **mode, "RAY_API_SERVER_ADDRESS": self.url}

    def client(self) -> Any:
        """Ray's own client of the job server."""
        from ray.job_submission import JobSubmissionClient

        headers = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        return JobSubmissionClient(self.url, headers=headers)


@contextmanager
def job_cluster(*, has_auth: bool, num_cpus: int = 4) -> Iterator[JobCluster]:
    """Start a head, give it, and end it with all that it has started."""
    token = secrets.token_hex(32) if has_auth else None
    with tempfile.TemporaryDirectory(prefix="hvdj", ignore_cleanup_errors=True) as folder:
        ports = free_ports(len(PORT_FLAGS))
        cluster = JobCluster(f"http://127.0.0.1:{ports[1]}", f"127.0.0.1:{ports[0]}", token)
        command = [
            *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--block"),
            *("--node-ip-address", "127.0.0.1", "--dashboard-host", "127.0.0.1"),
            *("--include-dashboard", "true", "--disable-usage-stats"),
            *("--num-cpus", str(num_cpus), "--object-store-memory", "200000000"),
            *("--temp-dir", folder),
            *(
                word
                for flag, port in zip(PORT_FLAGS, ports, strict=True)
                for word in (flag, str(port))
            ),
        ]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {
            **cluster.environment,
            "PATH": path,
            "RAY_TMPDIR": folder,
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        }
        for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
            environment.pop(name, None)
        log = Path(folder) / "start.log"
        with log.open("w") as output:
            head = subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        try:
            _wait_until_up(cluster, head, log)
            yield cluster
        finally:
            _end(head)


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses now."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _wait_until_up(cluster: JobCluster, head: subprocess.Popen[bytes], log: Path) -> None:
    """Until the job server answers jobs, which takes longer than the page."""
    import httpx

    headers = {} if cluster.token is None else {"Authorization": f"Bearer {cluster.token}"}
    deadline = time.monotonic() + STARTING_S
    while time.monotonic() < deadline:
        assert head.poll() is None, log.read_text()
        try:
            if httpx.get(f"{cluster.url}/api/jobs/", headers=headers, timeout=5).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.3)
    raise AssertionError(f"no job server after {STARTING_S} s: {log.read_text()}")


def _end(head: subprocess.Popen[bytes]) -> None:
    """`ray start --block` ends what it has started; what stays behind is in its session."""
    head.send_signal(signal.SIGTERM)
    try:
        head.wait(20)
    except subprocess.TimeoutExpired:
        head.kill()
        head.wait()
    try:
        os.killpg(head.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
