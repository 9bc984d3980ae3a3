"""A cache that begins with stored traces."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from hvd_ray.errors import UserError
from hvd_ray.fetch import ModelRef
from hvd_ray.serving.calls import Call, Piece
from hvd_ray.serving.kept import KeptSettings
from hvd_ray.serving.opening import check, open_replica, warm
from hvd_ray.serving.settings import serve_config
from hvd_ray.traces.schema import Trace
from hvd_ray.traces.store import write_traces
from hvd_ray.types import SamplingParams
from tests.unit.serving.conftest import make_replica

PROMPT = (2, 1, 4, 7, 5)


def trace(number: int, **extra: Any) -> Trace:
    values = {
        "trace_id": f"t{number}",
        "prompt_id": "p",
        "workload": "w",
        "family": "chat",
        "scope": "elsewhere",
        "session_id": "s",
        "created_at": datetime.now(UTC),
        "model": "toy",
        "tokenizer_sha": "sha",
        "prompt_token_ids": PROMPT,
        "output_token_ids": (22, 11, 3, 10, 1, 5, 18, 12, 6, 5, 5, 20),
        "finish_reason": "length",
        "context_length": 512,
        **extra,
    }
    return Trace(**values)


@pytest.fixture
def sha(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvd_ray.serving.opening.tokenizer_sha", lambda _root: "sha")


@pytest.mark.usefixtures("sha")
def test_outputs_of_traces_are_drafted_for_their_tenant_alone(tmp_path: Path) -> None:
    write_traces([trace(1), trace(2, error="lost", output_token_ids=())], tmp_path / "a.parquet")
    config = serve_config({"serving": {"warm_traces": str(tmp_path), "warm_tenant": "alice"}})
    replica = make_replica()
    assert warm(replica._stage, replica, config, root="/toys") == 12

    async def accepted(tenant: str) -> int:
        sampling = SamplingParams(max_tokens=12)
        call = Call(tenant, (PROMPT,), sampling, tenant=tenant)
        pieces = [e async for batch in replica.serve(call) for e in batch if isinstance(e, Piece)]
        return sum(piece.step.accepted for piece in pieces if piece.step)

    assert asyncio.run(accepted("alice")) > asyncio.run(accepted("bob"))
    replica.end()


@pytest.mark.usefixtures("sha")
def test_tokens_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    write_traces([trace(1, tokenizer_sha="other")], tmp_path / "a.parquet")
    config = serve_config({"serving": {"warm_traces": str(tmp_path)}})
    replica = make_replica()
    with pytest.raises(UserError, match="another tokenizer"):
        warm(replica._stage, replica, config, root="/toys")
    replica.end()


def test_settings_that_held_serve_on_after_a_refused_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that starts later is given what the running ones refused."""
    toy = ModelRef("toy", "/toys/toy", is_local=True)
    monkeypatch.setattr("hvd_ray.serving.opening.resolve_model", lambda _name: toy)
    replica = make_replica()
    stage, config = replica._stage, serve_config({})
    kept = KeptSettings(tmp_path / "settings.json")
    bad = {"policy": {"name": "hvd_tau", "predictor": "/nowhere"}}
    with pytest.raises(UserError, match="nothing is at hand"):
        open_replica(config, stage, bad, kept)
    opened = open_replica(config, stage, {"policy": {"name": "rule_match"}}, kept)
    later = open_replica(config, stage, bad, kept)

    async def state_of(served: Any) -> Any:
        return await served.state()

    state = asyncio.run(state_of(later))
    assert (state.policy, state.is_alive) == ("rule_match", True)
    assert "nothing is at hand" in state.refused
    for one in (replica, opened, later):
        one.end()


def test_kept_settings_belong_to_one_deployment_of_one_session(hvd_home: Path) -> None:  # noqa: ARG001
    one = KeptSettings.of("s", "app", {"model": "m"})
    assert one.last() is None
    one.keep({"policy": {"tau": 1}})
    assert KeptSettings.of("s", "app", {"model": "m"}).last() == {"policy": {"tau": 1}}
    for other in (("t", "app", {"model": "m"}), ("s", "b", {"model": "m"}), ("s", "app", {})):
        assert KeptSettings.of(*other).last() is None
    one.path.write_text("{")
    assert one.last() is None


def test_warm_traces_that_are_nobodys_are_refused_before_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HVD_API_KEYS", raising=False)
    keys = tmp_path / "keys"
    keys.write_text(f"alice {'a' * 20}\n")

    def checked(**serving: Any) -> None:
        check(serve_config({"serving": {key: str(value) for key, value in serving.items()}}))

    checked(warm_traces=tmp_path)
    checked(warm_traces=tmp_path, api_keys=keys, warm_tenant="alice")
    with pytest.raises(UserError, match=r"warm_tenant=local: .* choose from alice"):
        checked(warm_traces=tmp_path, api_keys=keys)
    with pytest.raises(UserError, match=r"serving.warm_traces=.*nowhere: there is nothing"):
        checked(warm_traces=tmp_path / "nowhere")
