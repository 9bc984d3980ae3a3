"""vLLM engines in processes of their own, talked to by lines of JSON.

vLLM itself is imported over there alone (`vllm_plugin/bench_engine.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from hvd_ray.errors import UserError
from hvd_ray.types import Request, Source, Step

MODULE = "hvd_ray.vllm_plugin.bench_engine"
_LOG_TAIL = 2000
_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # engines that wait for their turn must not spin
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine said to one request."""

    token_ids: tuple[int, ...]
    emitted: tuple[int, ...]
    """Tokens of each target pass."""
    drafts: tuple[tuple[int, int], ...]
    """Drafted and accepted tokens of each pass that verified a draft."""
    finish_reason: str
    steps: tuple[Step, ...] | None = None
    """The cycles, where the plugin drafted and can tell; None where vLLM did."""


@dataclass(slots=True)
class EngineProcess:
    """One engine; `start` it, ask it waves of requests, and `close` it."""

    arguments: dict[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Goes before all else that its environment says."""
    extra_args: Mapping[str, str] = field(default_factory=dict)
    """What every request asks for beside its sampling, e.g. `{"hvd": "off"}`."""
    _process: subprocess.Popen[str] | None = field(default=None, init=False)
    _log: IO[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        """Begin to load; `wait_ready` waits until it is done."""
        cores = sorted(os.sched_getaffinity(0))
        bind = {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}"}
        environment = bind | _preloaded() | _SETTINGS | os.environ | dict(self.environment)
        self._log = TemporaryFile()  # noqa: SIM115 (closed by close)
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            cwd=Path.home(),
        )
        self._write(self.arguments)

    def wait_ready(self) -> None:
        """Wait until the engine answers.

        Raises:
            UserError: it could not be started; the end of its log says why.
        """
        self._read()

    def serve(self, requests: Sequence[Request]) -> tuple[float, list[Answer]]:
        """Seconds that a wave of requests took, and the answers in their order.

        Raises:
            UserError: the engine ended.
        """
        extra = {"extra_args": dict(self.extra_args)} if self.extra_args else {}
        asked = [_plain(request) for request in requests]
        for plain in asked:
            plain["sampling"] |= extra
        self._write({"requests": asked})
        said = self._read()
        answers = [_answer(said["answers"][request.request_id]) for request in requests]
        return float(said["seconds"]), answers

    def reset(self) -> None:
        """Have it forget earlier outputs."""
        self._write({"reset": True})
        self._read()

    def close(self) -> None:
        """End it; safe twice, and before it was started."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def _write(self, call: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(call) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def _read(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        said: dict[str, Any] = json.loads(line)
        return said

    def _ended(self) -> UserError:
        assert self._log is not None
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _LOG_TAIL))
        tail = " | ".join(self._log.read().decode(errors="replace").split("\n")[-8:])
        return UserError(f"a vLLM engine ended unasked; the end of its log: {tail}")


def _preloaded() -> dict[str, str]:
    """Intel's OpenMP before any other: without it speculation on a CPU loses much, says vLLM."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    return {"LD_PRELOAD": str(library)} if library.exists() else {}


def _plain(request: Request) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "id": request.request_id,
        "prompt_token_ids": list(request.prompt_token_ids),
        "sampling": {
            "temperature": sampling.temperature,
            "top_k": max(0, sampling.top_k),
            "top_p": sampling.top_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "max_tokens": sampling.max_tokens,
            "min_tokens": sampling.min_tokens,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": sampling.ignore_eos,
        },
    }


def _answer(said: dict[str, Any]) -> Answer:
    return Answer(
        tuple(said["token_ids"]),
        tuple(said["emitted"]),
        tuple((drafted, accepted) for drafted, accepted in said["drafts"]),
        said["finish_reason"],
        None if said["steps"] is None else tuple(map(_step, said["steps"])),
    )


def _step(said: dict[str, Any]) -> Step:
    return Step(**{**said, "source": Source(said["source"])})
