"""A replica around vLLM: what it answers when the engine behind the endpoints is gone."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvd_ray.serving.api_error import from_failure
from hvd_ray.serving.calls import Failure
from hvd_ray.serving.relay import RelayCall
from hvd_ray.serving.settings import HotSettings, serve_config
from hvd_ray.serving.vllm_engine import VllmReplica, use_one_process


@pytest.fixture
def replica(tiny_llama_path: Path, hvd_home: Path) -> VllmReplica:  # noqa: ARG001
    client = SimpleNamespace(errored=True, model_config=SimpleNamespace(max_model_len=64))
    server = SimpleNamespace(engine=SimpleNamespace(_engine_client=client))
    config = serve_config({"serving": {"engine": "vllm"}, "model": str(tiny_llama_path)})
    return VllmReplica(config, HotSettings(), server, app=None)


def test_without_its_engine_it_says_when_to_come_again(replica: VllmReplica) -> None:
    async def answers() -> list[object]:
        call = RelayCall("POST", "/v1/completions", {}, b"{}")
        return [event async for event in replica.relay(call)]

    assert not asyncio.run(replica.state()).is_alive
    (failure,) = asyncio.run(answers())
    assert isinstance(failure, Failure)
    error = from_failure(failure)
    assert (error.status, error.code) == (503, "engine_dead")
    assert error.headers() == {"Retry-After": "30"}


@pytest.mark.parametrize(("workers", "expected"), [(1, "uni"), (2, "mp")])
def test_one_worker_shares_the_schedulers_process(workers: int, expected: str) -> None:
    """With GPUs too: in another process the plugin's figures of a request would be lost."""
    parallel = SimpleNamespace(world_size=workers, distributed_executor_backend="mp")
    use_one_process(parallel)
    assert parallel.distributed_executor_backend == expected
