"""The seam to vLLM, on stand-ins: versions, the configuration that is refused, the hooks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hvd_ray.errors import UserError
from hvd_ray.vllm_plugin import compat
from hvd_ray.vllm_plugin.options import HvdOptions


def engine(**changed: Any) -> Any:
    parallel = {
        name: changed.pop(name, 1)
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        use_v2_model_runner=changed.pop("use_v2", False),
        scheduler_config=SimpleNamespace(async_scheduling=changed.pop("is_async", False)),
        speculative_config=SimpleNamespace(
            method="eagle3",
            draft_sample_method=changed.pop("drafts", "greedy"),
            disable_padded_drafter_batch=changed.pop("unpadded", True),
        ),
    )


def test_the_supported_version_is_the_installed_one() -> None:
    pytest.importorskip("vllm")
    compat.check_version()


@pytest.mark.parametrize("found", ["0.31.1", "0.32.1", None])
def test_another_version_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, found: str | None
) -> None:
    monkeypatch.setattr(compat, "installed_version", lambda: found)
    with pytest.raises(UserError, match=r"vllm==0\.32\.0.*leave the section out"):
        compat.check_version()


@pytest.mark.parametrize(
    ("changed", "culprit"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({"data_parallel_size": 4}, "data_parallel_size=4"),
        ({"use_v2": True}, "VLLM_USE_V2_MODEL_RUNNER"),
        ({"is_async": True}, "no-async-scheduling"),
        ({"drafts": "probabilistic"}, "draft_sample_method"),
        ({"unpadded": False}, "disable_padded_drafter_batch"),
    ],
)
def test_what_does_not_work_is_refused_by_name(changed: dict[str, Any], culprit: str) -> None:
    compat.check_engine(engine())
    with pytest.raises(UserError, match=culprit):
        compat.check_engine(engine(**changed))


def arguments(speculative: dict[str, Any] | None, spec_method: str | None = None) -> Any:
    return SimpleNamespace(
        speculative_config=speculative, spec_method=spec_method, async_scheduling=None
    )


def test_drafts_of_any_length_are_asked_for_without_the_users_help() -> None:
    given = arguments({"method": "eagle3", "model": "head", "num_speculative_tokens": 8})
    compat.request_unpadded_drafting(given)
    assert given.speculative_config["disable_padded_drafter_batch"] is True
    assert given.async_scheduling is False, "vLLM would try, fail and warn"
    by_flag = arguments(None, "eagle3")
    compat.request_unpadded_drafting(by_flag)
    assert by_flag.speculative_config == {"disable_padded_drafter_batch": True}
    cache_only = arguments({"method": "suffix"})
    compat.request_unpadded_drafting(cache_only)
    assert cache_only.speculative_config == {"method": "suffix"}


@pytest.mark.parametrize(
    "given",
    [
        arguments(None),
        arguments({"method": "ngram"}),
        arguments({"method": "eagle3", "disable_padded_drafter_batch": False}),
        arguments({"method": "eagle3", "disable-padded-drafter-batch": False}),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(given: Any) -> None:
    with pytest.raises(UserError, match="hvd"):
        compat.request_unpadded_drafting(given)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("FULL_AND_PIECEWISE", "PIECEWISE"),
        ("NONE", "NONE"),  # a CPU, enforce_eager
        ("FULL", "FULL"),  # by somebody's optimisation level
    ],
)
def test_cuda_graphs_fit_drafts_of_any_length(mode: str, expected: str) -> None:
    pytest.importorskip("vllm")
    from vllm.config import CUDAGraphMode

    made = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode[mode]))
    compat.capture_any_length(made)
    assert made.compilation_config.cudagraph_mode is CUDAGraphMode[expected]


@pytest.mark.parametrize("given", [None, "FULL_AND_PIECEWISE"])
def test_graphs_that_were_asked_for_stay(
    monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    pytest.importorskip("vllm")
    from vllm.config import CUDAGraphMode
    from vllm.engine.arg_utils import EngineArgs

    default = CUDAGraphMode.FULL_AND_PIECEWISE
    made = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=default))
    monkeypatch.setattr(EngineArgs, "create_engine_config", lambda _: made)
    compat.hook_engine_arguments(lambda _: HvdOptions(), lambda _config, _options: None)
    mode = None if given is None else CUDAGraphMode[given]
    arguments: Any = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode))
    EngineArgs.create_engine_config(arguments)
    expected = CUDAGraphMode.PIECEWISE if given is None else default
    assert made.compilation_config.cudagraph_mode is expected


def test_a_hook_is_set_once_and_hands_through() -> None:
    class Owner:
        def say(self, word: str) -> str:
            return word

    def around(original: Any, owner: Any, word: str) -> Any:
        return original(owner, word) + "!"

    compat._wrap(Owner, "say", around)
    compat._wrap(Owner, "say", around)
    assert Owner().say("hi") == "hi!"


def test_nothing_of_vllm_is_touched_for_an_engine_without_the_section() -> None:
    for additional in ({}, {"other": 1}, object()):
        assert not compat._is_configured(SimpleNamespace(additional_config=additional))
    assert compat._is_configured(SimpleNamespace(additional_config={"hvd": {}}))


def test_a_worker_tells_us_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    said: list[object] = []
    monkeypatch.setattr(WorkerWrapperBase, "init_device", lambda _: None)
    monkeypatch.setattr(WorkerWrapperBase, "shutdown", lambda _: said.append("vllm"))
    compat.hook_workers(lambda _: None, lambda _: None, said.append)
    ours, other = (
        SimpleNamespace(vllm_config=SimpleNamespace(additional_config=additional))
        for additional in ({"hvd": {}}, {})
    )
    for worker in (
        SimpleNamespace(worker=SimpleNamespace(model_runner=ours)),
        SimpleNamespace(worker=SimpleNamespace(model_runner=other)),
        SimpleNamespace(),  # it never came to a runner
    ):
        WorkerWrapperBase.shutdown(worker)
    assert said == [ours, "vllm", "vllm", "vllm"]


@pytest.mark.parametrize(
    ("section", "request_timeout", "given", "expected"),
    [
        ({"hvd": {}}, 0, 0, compat.END_S),
        ({}, 0, 0, 0),
        ({"hvd": {}}, 0, None, None),
        ({"hvd": {}}, 30, 0, 0),  # the time for requests is over
        ({"hvd": {}}, 30, 12.5, 12.5),
    ],
)
def test_an_engine_is_given_time_to_write(
    monkeypatch: pytest.MonkeyPatch,
    section: dict[str, Any],
    request_timeout: float,
    given: float | None,
    expected: float | None,
) -> None:
    pytest.importorskip("vllm")
    from vllm.v1.engine.utils import CoreEngineProcManager

    def init(manager: Any, *, vllm_config: Any) -> None:
        manager._request_shutdown_timeout = vllm_config.shutdown_timeout

    waited: list[float | None] = []
    monkeypatch.setattr(CoreEngineProcManager, "__init__", init)
    monkeypatch.setattr(CoreEngineProcManager, "shutdown", lambda _, t=None: waited.append(t))
    compat.hook_engine_end()
    config = SimpleNamespace(additional_config=section, shutdown_timeout=request_timeout)
    CoreEngineProcManager(vllm_config=config).shutdown(given)  # type: ignore[call-arg]
    assert waited == [expected]


def request(extra: dict[str, Any] | None, salt: str | None = None) -> Any:
    params = SimpleNamespace(extra_args=extra)
    return SimpleNamespace(sampling_params=params, cache_salt=salt)


def test_a_requests_salt_reaches_the_worker_and_its_own_args_stay() -> None:
    pytest.importorskip("vllm")
    mine = {"other": 1, "hvd": "off"}
    made = request(mine, salt="s")
    compat._mark_request(made, has_head=False)
    assert made.sampling_params.extra_args == {"other": 1, "hvd": "off", "hvd_scope": "s"}
    assert mine == {"other": 1, "hvd": "off"}, "the caller's mapping may be shared"
    bare = request(None)
    compat._mark_request(bare, has_head=False)
    assert bare.sampling_params.extra_args == {"hvd_scope": ""}


@pytest.mark.parametrize(
    ("extra", "has_head"),
    [
        ({"hvd": "on"}, True),
        ({"hvd": "eagle3"}, False),
        ({"hvd_scope": "theirs"}, True),
        ({"hvdd": "off"}, True),
        ({"hvd": "off", "HVD-mode": 1}, True),
    ],
)
def test_what_a_request_may_not_ask_is_the_clients_fault(
    extra: dict[str, Any], has_head: bool
) -> None:
    pytest.importorskip("vllm")
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="hvd"):
        compat._mark_request(request(extra), has_head=has_head)
