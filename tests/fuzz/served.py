"""A front over a tiny model in this process, and what must hold of each of its answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from jsonschema import Draft202012Validator
from starlette.testclient import TestClient

from hvd_ray.config import Config
from hvd_ray.engines.torch_engine import TorchEngine
from hvd_ray.errors import UserError
from hvd_ray.parts.find import Sources
from hvd_ray.serving.auth import ApiKeys
from hvd_ray.serving.front import Front
from hvd_ray.serving.lineup import set_stage
from hvd_ray.serving.replica import Replica
from hvd_ray.serving.settings import Limits, ServeConfig, hot_settings
from hvd_ray.text import HFTextCodec

MODEL = "tiny"
LIMITS = Limits(
    max_prompt_tokens=200, max_output_tokens=12, max_body_bytes=200_000, request_timeout_s=20
)
"""Small, so that an example takes milliseconds; whatever is beyond must be refused, not served."""


@dataclass(frozen=True)
class Served:
    """A client that may call, and the description of what it calls."""

    client: TestClient
    replica: Replica
    description: dict[str, Any]

    def ask(self, method: str, path: str, **given: Any) -> httpx.Response:
        answer: httpx.Response = self.client.request(method, path, **given)
        self.check(method, path, answer)
        return answer

    def check(self, method: str, path: str, answer: httpx.Response) -> None:
        """No fault of ours, the shape that is promised, and nothing left behind."""
        shown = f"{method} {path}: {answer.status_code} {answer.text[:300]}"
        assert answer.status_code < 500, shown
        described = self.description["paths"].get(path, {}).get(method.lower())
        kind = answer.headers.get("content-type", "").partition(";")[0]
        if described is None or answer.status_code not in map(int, described["responses"]):
            assert answer.status_code in (404, 405), shown
            self._must_be(self._error, answer.json(), shown)
            return
        contents = described["responses"][str(answer.status_code)]["content"]
        assert kind in contents, shown
        if kind == "text/event-stream":
            self._check_stream(answer.text, shown)
        else:
            self._must_be(contents[kind]["schema"], answer.json(), shown)

    def check_idle(self) -> None:
        """Whatever was asked, nothing is left running."""
        state = self.client.get("/ui/state").json()
        assert state["num_running"] == state["num_waiting"] == 0, state

    @property
    def _error(self) -> dict[str, Any]:
        return {"$ref": "#/components/schemas/Error"}

    def _check_stream(self, text: str, shown: str) -> None:
        lines = [line for line in text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]", shown
        for line in lines[:-1]:
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" in chunk or "choices" in chunk, shown

    def _must_be(self, schema: dict[str, Any], instance: Any, shown: str) -> None:
        root = {**schema, "components": self.description["components"]}
        errors = [error.message for error in Draft202012Validator(root).iter_errors(instance)]
        assert not errors, f"{errors[0]}\n{shown}"


def _nothing(config: Config) -> Any:
    raise UserError(f"nothing is at hand for {config.model}")


@contextmanager
def served(model_path: Path) -> Iterator[Served]:
    """The endpoints of a model in the torch engine, without a network in between."""
    engine = TorchEngine.load(model_path, dtype="float32", num_threads=1)
    sources = Sources(payoff=_nothing, costs=_nothing, head=_nothing)
    stage = set_stage(
        ServeConfig(),
        engine=engine,
        codec=HFTextCodec(model_path),
        sources=sources,
        resolve=_nothing,
    )
    settings = hot_settings({"limits": LIMITS.model_dump()})
    replica = Replica(stage, name=MODEL, root=str(model_path), hot=settings)
    front = Front(replica, replica.facts, ApiKeys(), LIMITS)
    client = TestClient(
        front.app(),
        base_url="http://127.0.0.1",
        client=("127.0.0.1", 50_000),
        raise_server_exceptions=False,
    )
    with client:
        yield Served(client, replica, client.get("/openapi.json").json())
    replica.end()
