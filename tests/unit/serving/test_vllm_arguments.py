"""Arguments of vLLM's engine from our settings; the engine itself is held to by conformance."""

from pathlib import Path
from typing import Any

import pytest

from hvd_ray.errors import NotSupportedError, UserError
from hvd_ray.serving.settings import serve_config
from hvd_ray.serving.vllm_arguments import (
    engine_arguments,
    has_plugin,
    policy_name,
    policy_notes,
    served_modes,
)
from hvd_ray.vllm_plugin.options import read_options


@pytest.fixture(autouse=True)
def no_champion(hvd_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def arguments(tree: dict[str, Any]) -> dict[str, Any]:
    serving = {"engine": "vllm", **tree.get("serving", {})}
    return engine_arguments(serve_config({**tree, "serving": serving}))


def options(found: dict[str, Any]) -> Any:
    return read_options(found["additional_config"])


def test_by_default_our_plugin_decides_by_cost_with_the_shipped_head() -> None:
    found = arguments({})
    assert options(found).policy == "cost"
    assert str(options(found).payoff).endswith("assets/smollm2-135m/payoff")  # the shipped one
    assert found["speculative_config"]["method"] == "eagle3"
    assert found["per_request_spec_decode_metrics"] == "summary"
    assert served_modes(found) == ("off", "cache", "eagle3", "auto")
    assert policy_name(found) == "hvd cost"


def test_a_model_without_a_head_drafts_from_the_cache(tiny_llama_path: Path) -> None:
    found = arguments({"model": str(tiny_llama_path)})
    assert found["speculative_config"]["method"] == "suffix"
    assert served_modes(found) == ("off", "cache", "auto")
    assert "eagle3_tokens" not in found["additional_config"]["hvd"], "it would have no effect"
    (note,) = policy_notes(serve_config({"model": str(tiny_llama_path)}), found)
    assert note.startswith("by the cache's own probabilities, without a predictor: ")
    assert policy_notes(serve_config({}), arguments({})) == ()


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"name": "hvd_tau", "tau": 3.5}, {"policy": "tau", "tau": 3.5}),
        ({"name": "rule_match", "min_match": 7}, {"policy": "match", "min_match": 7}),
        ({"name": "suffix"}, {"policy": "cache"}),
        ({"name": "greedy"}, {"policy": "off"}),
    ],
)
def test_a_named_policy_is_the_plugins(policy: dict[str, Any], expected: dict[str, Any]) -> None:
    found = options(arguments({"policy": policy}))
    assert {name: getattr(found, name) for name in expected} == expected


def test_a_policy_that_the_plugin_does_not_have() -> None:
    with pytest.raises(NotSupportedError, match=r"policy.name=ngram with vLLM; choose from"):
        arguments({"policy": {"name": "ngram"}})


def test_vllms_own_arguments_win() -> None:
    own = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
    found = arguments({"serving": {"vllm": {**own, "max_model_len": 512}}})
    assert found["speculative_config"] == own["speculative_config"]
    assert found["max_model_len"] == 512
    assert not has_plugin(found)
    assert served_modes(found) == ("auto",)
    assert policy_name(found) == "vLLM ngram"
    plain = arguments({"serving": {"vllm": {"speculative_config": None}}})
    assert "speculative_config" not in plain
    assert policy_name(plain) == "greedy"


@pytest.mark.parametrize("own", [{}, {"speculative_config": {"method": "ngram"}}])
def test_processors_that_a_draft_would_not_go_through_are_refused(own: dict[str, Any]) -> None:
    """Case S15: with no drafts they are vLLM's to run."""
    processors = {"logits_processors": ["mine.Processor"]}
    with pytest.raises(NotSupportedError, match=r"serving\.vllm\.logits_processors together"):
        arguments({"serving": {"vllm": {**own, **processors}}})
    plain = arguments({"serving": {"vllm": {"speculative_config": None, **processors}}})
    assert plain["logits_processors"] == ["mine.Processor"]


@pytest.mark.parametrize("name", ["max_prompt_tokens", "max_output_tokens"])
def test_limits_that_vllm_would_not_keep_are_refused(name: str) -> None:
    with pytest.raises(NotSupportedError, match=rf"{name} with vLLM.*serving\.vllm"):
        arguments({"serving": {"limits": {name: 100}}})
    assert arguments({"serving": {"limits": {"max_requests": 100}}})


def test_the_model_stands_at_the_top() -> None:
    with pytest.raises(UserError, match="at the top"):
        arguments({"serving": {"vllm": {"model": "m"}}})


def test_a_gpu_gets_vllms_own_graphs() -> None:
    assert arguments({})["enforce_eager"] is True
    assert "enforce_eager" not in arguments({"serving": {"gpus_per_replica": 1}})
