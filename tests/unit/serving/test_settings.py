"""Settings of a deployment: from words, files and Serve's YAML."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from hvd_ray.errors import UserError
from hvd_ray.serving.settings import deploy_tree, hot_settings, num_shared_cores, serve_config

FILES = sorted((Path(__file__).parents[3] / "cluster").glob("serve*.yaml"))


def test_what_may_change_is_not_part_of_what_lasts() -> None:
    config = serve_config(
        {"policy": {"name": "suffix"}, "serving": {"limits": {"max_running": 2}, "replicas": 2}}
    )
    assert config.lasting == {"serving": {"replicas": 2}}
    assert config.hot == {"policy": {"name": "suffix"}, "limits": {"max_running": 2}}
    assert hot_settings(config.hot).is_policy_named
    assert not hot_settings(serve_config({}).hot).is_policy_named


@pytest.mark.parametrize(
    ("tree", "word"),
    [
        ({"serving": {"limit": {}}}, "serving.limit: unknown"),
        ({"serving": {"engine": "gpu"}}, "serving.engine"),
        ({"serving": {"limits": {"request_timeout_s": 0}}}, "request_timeout_s"),
        ({"serving": {"replicas": 0}}, "serving.replicas"),
        ({"verification": "nested"}, r"choose it with serving.verification=.nested."),
    ],
)
def test_mistakes_are_named(tree: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        serve_config(tree)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_yaml_files_are_serves_and_ours(file: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    from hvd_ray.serving.app import FRONT, REPLICA, BuildArgs

    schema = ServeDeploySchema.model_validate(yaml.safe_load(file.read_text()))
    app = schema.applications[0]
    assert BuildArgs.model_validate(app.args).config().model == "smollm2-135m"
    assert {deployment.name for deployment in app.deployments} == {FRONT, REPLICA}
    for deployment in app.deployments:
        assert not hot_settings(deployment.user_config).is_policy_named  # hvd_cost where it can
    is_public = schema.http_options.host == "0.0.0.0"
    assert is_public == ("api_keys" in app.args["serving"])


def test_builder_words_are_nested_by_their_dots() -> None:
    from hvd_ray.serving.app import BuildArgs

    words = {"policy.tau": "4", "policy.name": "hvd_tau", "serving.replicas": "2", "model": "m"}
    config = BuildArgs.model_validate(words).config()
    assert (config.policy.tau, config.policy.name) == (4, "hvd_tau")
    assert (config.serving.replicas, config.model) == (2, "m")


def test_serve_calls_the_builder_with_its_model() -> None:
    """As `serve run` and `serve deploy` do: words and trees become the one pydantic parameter."""
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

    from hvd_ray.serving.app import build

    words = {"serving.replicas": "3", "policy.name": "suffix"}
    app = call_user_app_builder_with_args_if_necessary(build, words)
    assert app._bound_deployment.init_args[0] == {"serving": {"replicas": 3}}


def test_the_application_has_our_limits() -> None:
    from hvd_ray.serving.app import application

    app = application(serve_config({"serving": {"autoscaling": {"max_replicas": 3}}}))
    assert app._bound_deployment.name == "Front"
    replica = app._bound_deployment.init_args[1]._bound_deployment
    assert replica._deployment_config.autoscaling_config.max_replicas == 3
    assert replica._deployment_config.user_config == {"policy": {}, "limits": {}}


@pytest.mark.parametrize(
    ("serving", "word"),
    [
        ({"vllm": {"max_model_len": 4096}}, "serving.vllm.max_model_len: only with vLLM"),
        ({"engine": "vllm", "warm_traces": "traces"}, "serving.warm_traces with vLLM"),
        ({"replicas": 2, "autoscaling": {"max_replicas": 3}}, "serving.replicas .--replicas. and"),
    ],
)
def test_what_would_do_nothing_is_refused(serving: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        serve_config({"serving": serving})


def test_replicas_share_the_cores_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: set(range(8)))
    for serving, num_cores in (
        ({}, 8),
        ({"replicas": 3}, 2),
        ({"replicas": 9}, 1),
        ({"autoscaling": {"min_replicas": 1, "max_replicas": 4}}, 2),
    ):
        assert num_shared_cores(serve_config({"serving": serving})) == num_cores


def test_only_what_lasts_restarts_the_replicas() -> None:
    """Serve restarts what has other `args`, and only reconfigures for another `user_config`."""
    from ray.serve.schema import ServeDeploySchema

    def arguments(tree: dict[str, Any]) -> Any:
        deployed = deploy_tree(serve_config(tree), app="hvd")
        return ServeDeploySchema.model_validate(deployed).applications[0].args

    assert arguments({"policy": {"name": "rule_match"}}) == arguments({})
    assert arguments({"serving": {"limits": {"max_running": 9}}}) == arguments({})
    assert arguments({"dtype": "float32"}) != arguments({})


@pytest.mark.parametrize(
    ("given", "named"),
    [({"min_replicas": 0}, "min_replicas"), ({"min_replicas": 3}, "min_replicas=3")],
)
def test_replicas_by_load_are_one_at_least_and_no_more_than_the_most(
    given: dict[str, int], named: str
) -> None:
    """Health and metrics ask the replicas, and to ask where there is none would start one."""
    with pytest.raises(UserError, match=named):
        serve_config({"serving": {"autoscaling": given}})
