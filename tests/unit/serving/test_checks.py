"""Who verifies is a request's choice, among what the deployment allows."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from hvd_ray.config import Config
from hvd_ray.engines.toy import ToyEngine
from hvd_ray.engines.toy_tiers import ToyTiers
from hvd_ray.errors import NotSupportedError, UserError
from hvd_ray.serving.calls import Audited, ReplicaState, together
from hvd_ray.serving.checks import Check, refuse_checks
from hvd_ray.serving.opening import check
from hvd_ray.serving.settings import serve_config
from hvd_ray.systems import Parts, build_verifier
from tests.unit.bench.test_session import _costs_with_slim as costs_with_slim
from tests.unit.bench.test_session import _slim as slim_of_toy
from tests.unit.serving.conftest import NO_SOURCES, make_replica
from tests.unit.serving.test_front import chat, complete, joined, stream
from tests.unit.serving.test_loop import until

FORCED = {"is_forced": True, "max_miss_rate": 1, "loss_budget": 1000}


@pytest.fixture
def tiered(open_client: Callable[..., TestClient]) -> TestClient:
    """A toy whose slim model is rather unlike its target, `nested` and `tiered` allowed."""
    engine = ToyEngine()
    tiers = ToyTiers(engine, closeness=0.4)
    config = Config.model_validate({"tiers": FORCED})
    checks: Any = {
        name: Check(
            tiers,
            build_verifier(f"suffix+{name}", config, engine=tiers, parts=Parts(tiers=tiers)),
        )
        for name in ("nested", "tiered")
    }
    return open_client(make_replica(engine=engine, checks=checks))


def test_nested_gives_plain_decodings_text_and_says_so(tiered: TestClient) -> None:
    plain = complete(tiered)["choices"][0]
    nested = complete(tiered, verification="nested", return_metrics=True)
    choice = nested["choices"][0]
    assert (choice["text"], choice["verification"]) == (plain["text"], "nested")
    assert "verification" not in plain
    figures = nested["metrics"]["speculative_decoding"]
    assert figures["num_slim_passes"] > 0
    assert figures["num_target_passes"] < 24
    chunks = stream(tiered, "/v1/chat/completions", verification="nested")
    assert joined(chunks) == chat(tiered)["choices"][0]["message"]["content"]
    assert chunks[-1]["choices"][0]["verification"] == "nested"
    assert (
        'hvd_passes_total{engine="0",model_name="toy",tier="slim"}' in tiered.get("/metrics").text
    )


def test_tiers_change_answers_of_those_who_ask_alone(tiered: TestClient) -> None:
    plain = complete(tiered)["choices"][0]["text"]
    lossy = complete(tiered, verification="tiered", return_metrics=True)
    choice, figures = lossy["choices"][0], lossy["metrics"]["speculative_decoding"]
    assert choice["verification"] == "tiered"
    assert "verification_reason" not in choice
    assert choice["text"] != plain
    assert figures["num_target_passes"] < len(choice["text"])
    assert complete(tiered, return_metrics=True)["choices"][0]["verification"] == "full"
    full = complete(tiered, verification="full")["choices"][0]
    assert (full["text"], full["verification"]) == (plain, "full")


def test_who_asked_for_figures_is_told_why_all_was_checked(
    open_client: Callable[..., TestClient],
) -> None:
    engine = ToyEngine()
    tiers = ToyTiers(engine, closeness=0.4)
    config = Config.model_validate({"tiers": {"is_forced": True}})
    verifier = build_verifier("suffix+tiered", config, engine=tiers, parts=Parts(tiers=tiers))
    checks: Any = {"tiered": Check(tiers, verifier)}
    distrustful = open_client(make_replica(engine=engine, checks=checks))
    (choice,) = complete(distrustful, verification="tiered", return_metrics=True)["choices"]
    assert choice["verification"] == "full"
    assert "does not trust the slim model yet" in choice["verification_reason"]
    (silent,) = complete(distrustful, verification="tiered")["choices"]
    assert "verification_reason" not in silent


def test_the_audits_bound_is_among_the_metrics(tiered: TestClient) -> None:
    def figures() -> dict[str, float]:
        """Those of `tiered`; `nested` loses nothing and has none."""
        found = re.findall(r"^hvd_tier_(\w+)\{(.*)\} (\S+)$", tiered.get("/metrics").text, re.M)
        assert all('verification="tiered"' in labels for _, labels, _ in found)
        return {name: float(value) for name, _, value in found}

    before = {"audited_tokens": 0, "missed_tokens": 0, "miss_rate_upper": 1, "trusted": 1}
    assert figures() == before, "the bound of nothing is 1, and 1 is allowed here"
    complete(tiered)
    complete(tiered, verification="tiered")
    until(lambda: figures()["audited_tokens"] > 0)
    after = figures()
    assert 0 < after["missed_tokens"] <= after["audited_tokens"]
    assert after["missed_tokens"] / after["audited_tokens"] <= after["miss_rate_upper"] <= 1


def test_several_replicas_audits_are_one() -> None:
    facts: Any = None
    one = ReplicaState(facts, is_alive=True, audits={"tiered": Audited(100, 4, 0.09, 1)})
    other = replace(one, audits={"tiered": Audited(50, 10, 0.32, 0)})
    assert together([one, other]).audits == {"tiered": Audited(150, 14, 0.32, 1)}


def test_what_is_not_allowed_is_named(client: TestClient, tiered: TestClient) -> None:
    for asked, name, allowed in ((client, "nested", "full"), (tiered, "tiered_learned", "tiered")):
        answer = asked.post("/v1/completions", json={"prompt": "a", "verification": name})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "verification")
        assert f"{allowed}" in error["message"].split("choose from")[1]
    assert tiered.get("/ui/state").json()["verifications"] == ["full", "nested", "tiered"]


def test_a_deployment_that_cannot_have_it_does_not_start() -> None:
    def no_slim(_config: Config) -> Any:
        raise UserError("no slim model ships")

    allowed = serve_config({"serving": {"verification": ["nested"]}})
    with pytest.raises(UserError, match="no slim model ships"):
        refuse_checks(allowed, replace(NO_SOURCES, slim=no_slim))
    with pytest.raises(NotSupportedError, match=r"serving\.verification with vLLM"):
        serve_config({"serving": {"engine": "vllm", "verification": ["nested"]}})


@pytest.mark.parametrize(
    ("asked", "instead"), [(["nested", "tiered"], "nested"), (["tiered"], "nested")]
)
def test_where_tiers_cannot_pay_the_key_that_was_typed_is_named(
    asked: list[str], instead: str
) -> None:
    allowed = serve_config({"serving": {"verification": asked}})
    sources = replace(NO_SOURCES, slim=slim_of_toy, costs=costs_with_slim)
    with pytest.raises(UserError, match=rf"use serving\.verification=\[{instead}\], or study"):
        refuse_checks(allowed, sources)


@pytest.mark.model
def test_tiers_that_were_not_measured_to_pay_are_refused_before_a_start(
    hvd_home: Path, default_model_path: Path
) -> None:
    hvd_home.mkdir()
    (hvd_home / "models").symlink_to(default_model_path.parent)
    check(serve_config({"serving": {"verification": ["nested"]}}))
    tiered = {"serving": {"verification": ["tiered"]}}
    with pytest.raises(UserError, match="hvd calibrate"):
        check(serve_config(tiered))
    check(serve_config({**tiered, "tiers": {"is_forced": True}}))
