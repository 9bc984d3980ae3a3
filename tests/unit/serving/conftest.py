"""A front over a replica of the toy engine, all in this process."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from hvd_ray.config import Config
from hvd_ray.engines.toy import ToyCodec, ToyEngine
from hvd_ray.errors import UserError
from hvd_ray.parts.find import Sources
from hvd_ray.serving.auth import ApiKeys
from hvd_ray.serving.checks import Check
from hvd_ray.serving.front import Front
from hvd_ray.serving.lineup import set_stage
from hvd_ray.serving.replica import Replica
from hvd_ray.serving.settings import Limits, ServeConfig, hot_settings

MODEL = "toy"


def _nothing(config: Config) -> Any:
    raise UserError(f"nothing is at hand for {config.model}")


NO_SOURCES = Sources(payoff=_nothing, costs=_nothing, head=_nothing)


def make_replica(
    hot: dict[str, Any] | None = None,
    *,
    engine: ToyEngine | None = None,
    sources: Sources = NO_SOURCES,
    resolve: Callable[[Config], Path] = _nothing,
    codec: ToyCodec | None = None,
    is_vacant: Callable[[Config], bool] = lambda _: False,
    checks: Mapping[Any, Check] | None = None,
) -> Replica:
    """A replica of a toy; end it."""
    engine = engine or ToyEngine()
    codec = codec or ToyCodec()
    stage = set_stage(ServeConfig(), engine=engine, codec=codec, sources=sources, resolve=resolve)
    stage = replace(stage, checks=checks or {}, is_vacant=is_vacant)
    return Replica(stage, name=MODEL, root="/toys/toy", hot=hot_settings(hot or {}))


@pytest.fixture
def replica() -> Iterator[Replica]:
    made = make_replica()
    yield made
    made.end()


@pytest.fixture
def open_client() -> Iterator[Callable[..., TestClient]]:
    """Makes clients of fronts over replicas, and ends them."""
    ended: list[Callable[[], Any]] = []

    def make(
        replica: Replica | None = None,
        *,
        keys: ApiKeys | None = None,
        limits: Limits | None = None,
        peer: str = "127.0.0.1",
    ) -> TestClient:
        replica = replica or make_replica()
        front = Front(replica, replica.facts, keys or ApiKeys(), limits or Limits())
        client = TestClient(
            front.app(),
            base_url="http://127.0.0.1",
            client=(peer, 50_000),
            raise_server_exceptions=False,
        )
        client.__enter__()
        ended.extend([replica.end, lambda: client.__exit__(None, None, None)])
        return client

    yield make
    for end in reversed(ended):
        end()


@pytest.fixture
def client(open_client: Callable[..., TestClient]) -> TestClient:
    return open_client()
