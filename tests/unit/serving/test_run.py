"""What `hvd serve` brings to a Serve that others use too."""

from types import SimpleNamespace
from typing import Any

import pytest

from hvd_ray.errors import UserError
from hvd_ray.serving import run
from hvd_ray.serving.settings import serve_config


class Client:
    """A Serve with applications on it, which takes a deployment for all that there is to be."""

    def __init__(self, **applications: Any) -> None:
        self._applications = {
            name: {"deployed_app_config": config} for name, config in applications.items()
        }
        self.deployed: Any = None

    def get_serve_details(self) -> dict[str, Any]:
        return {"applications": self._applications}

    def deploy_apps(self, schema: Any) -> None:
        self.deployed = schema


def deployed(monkeypatch: pytest.MonkeyPatch, client: Client) -> list[str]:
    monkeypatch.setattr("ray.serve.context._get_global_client", lambda: client)
    monkeypatch.setattr(run, "_wait_until_running", lambda _is_given_up: None)
    run.deploy(serve_config({}))
    return [app.name for app in client.deployed.applications]


def test_applications_of_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve deletes those that a deployment by settings does not name, but for those by code."""
    other = {"name": "other", "route_prefix": "/other", "import_path": "other:app"}
    ours = {"name": run.APP, "route_prefix": "/", "import_path": "hvd_ray.serving.app:build"}
    client = Client(other=other, by_code=None, **{run.APP: ours})
    assert deployed(monkeypatch, client) == [run.APP, "other"]
    assert client.deployed.applications[1].route_prefix == "/other"


def test_a_route_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(other={"name": "other", "import_path": "other:app"})
    with pytest.raises(UserError, match="'other' at /"):
        deployed(monkeypatch, client)


def test_whoever_ends_waits_for_no_new_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    deploying = SimpleNamespace(status="DEPLOYING", message="", deployments={})
    status = SimpleNamespace(applications={run.APP: deploying})
    monkeypatch.setattr("ray.serve.status", lambda: status)
    looks = iter([False, False, True, True])
    run._wait_until_running(lambda: next(looks))
    assert next(looks, None) is None, "it looked until it was told"
