"""The files of cluster/ and jobs/env/: their schemas, and that they fit one another."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

REPO = Path(__file__).parents[3]
CLUSTER = REPO / "cluster"
SCHEMAS = yaml.safe_load(Path(__file__).with_name("schemas.yaml").read_text(encoding="utf-8"))
MANIFESTS = sorted([*CLUSTER.glob("kuberay/*.yaml"), CLUSTER / "monitoring" / "podmonitor.yaml"])


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def check_kubernetes(document: dict[str, Any]) -> None:
    kind = f"{document.get('apiVersion')} {document.get('kind')}"
    schema = {
        "definitions": SCHEMAS["definitions"],
        "type": "object",
        "additionalProperties": False,
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "properties": {
            "apiVersion": {},
            "kind": {},
            "metadata": {"$ref": "#/definitions/metadata"},
            **SCHEMAS["kinds"][kind],
        },
    }
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(document, schema, cls=jsonschema.Draft7Validator)


def ray_specs(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The clusters that a manifest describes."""
    spec = document["spec"]
    names = {"RayCluster": None, "RayJob": "rayClusterSpec", "RayService": "rayClusterConfig"}
    if document["kind"] in names:
        inner = names[document["kind"]]
        yield spec if inner is None else spec[inner]


CLUSTERS = [
    pytest.param(spec, id=path.stem)
    for path in MANIFESTS
    for document in documents(path)
    for spec in ray_specs(document)
]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_every_manifest_has_known_fields_of_the_right_kind(path: Path) -> None:
    for document in documents(path):
        check_kubernetes(document)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: d["spec"].update(rayversion="2.60.0"), "rayversion"),
        (lambda d: d["spec"]["authOptions"].update(mode="tokens"), "tokens"),
        (
            lambda d: d["spec"]["headGroupSpec"]["template"]["spec"]["securityContext"].update(
                fsgroup=1000
            ),
            "fsgroup",
        ),
        (lambda d: d["spec"]["workerGroupSpecs"][0].pop("maxReplicas"), "maxReplicas"),
        (lambda d: d["spec"]["headGroupSpec"]["rayStartParams"].update(num_cpus=2), "2 is not"),
        (
            lambda d: d["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["resources"][
                "limits"
            ].update(memory="16GB"),
            "16GB",
        ),
    ],
)
def test_a_misspelt_manifest_is_found_out(change: Any, reason: str) -> None:
    document = deepcopy(documents(CLUSTER / "kuberay" / "raycluster-gpu.yaml")[0])
    change(document)
    with pytest.raises(jsonschema.ValidationError, match=reason):
        check_kubernetes(document)


@pytest.mark.parametrize("spec", CLUSTERS)
def test_a_cluster_has_what_its_jobs_need(spec: dict[str, Any]) -> None:
    """The Ray of the lock, a token, one shared folder, probes, metrics, bounded resources."""
    import ray

    assert spec["rayVersion"] == ray.__version__
    assert spec["authOptions"] == {"mode": "token"}
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    for group in groups:
        pod = group["template"]["spec"]
        container = pod["containers"][0]
        claims = {
            volume["name"]: volume.get("persistentVolumeClaim", {}).get("claimName")
            for volume in pod["volumes"]
        }
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert claims[mounts["/shared"]] == "hvd-shared"
        assert set(mounts.values()) <= set(claims)
        assert {"readinessProbe", "livenessProbe"} <= set(container)
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert group["rayStartParams"]["metrics-export-port"] == "8080"
        assert {"name": "metrics", "containerPort": 8080} in container["ports"]
        variables = {each["name"]: each["value"] for each in container["env"]}
        assert variables["HVD_HOME"].startswith("/shared/")
        assert variables["MLFLOW_TRACKING_URI"] == "http://hvd-mlflow:5000"
    assert len({g["template"]["spec"]["containers"][0]["image"] for g in groups}) == 1


@pytest.mark.parametrize("spec", CLUSTERS)
def test_gpus_are_asked_for_where_the_image_has_them(spec: dict[str, Any]) -> None:
    for group in spec["workerGroupSpecs"]:
        container = group["template"]["spec"]["containers"][0]
        has_gpu = "nvidia.com/gpu" in container["resources"]["limits"]
        assert has_gpu == container["image"].endswith(":gpu")
        assert has_gpu == ("tolerations" in group["template"]["spec"])


def pods(tree: Any) -> Iterator[dict[str, Any]]:
    """The specs of pods anywhere in a manifest."""
    if isinstance(tree, dict):
        if "containers" in tree:
            yield tree
        for value in tree.values():
            yield from pods(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from pods(value)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_pods_may_write_to_their_volumes(path: Path) -> None:
    """They run as the image's user, not as root."""
    (user,) = re.findall(r"ARG RAY_UID=(\d+)", (CLUSTER / "Dockerfile").read_text("utf-8"))
    for document in documents(path):
        for pod in pods(document):
            if pod.get("volumes"):
                assert pod["securityContext"]["fsGroup"] == int(user)


def test_the_metrics_of_every_pod_are_scraped() -> None:
    monitor = documents(CLUSTER / "monitoring" / "podmonitor.yaml")[0]["spec"]
    for parameter in CLUSTERS:
        (spec,) = parameter.values
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            labels = group["template"]["metadata"]["labels"]
            assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert monitor["podMetricsEndpoints"][0]["port"] == "metrics"


@pytest.mark.parametrize(
    "path", sorted(CLUSTER.glob("kuberay/rayjob-*.yaml")), ids=lambda path: path.stem
)
def test_a_rayjob_runs_a_job_of_ours_that_fits_its_cluster(path: Path) -> None:
    spec = documents(path)[0]["spec"]
    python, script, *words = shlex.split(spec["entrypoint"])
    assert python == "python"
    assert (REPO / script).is_file()
    flags = dict(pairwise(words))
    assert flags["--out"].startswith("/shared/")
    group = spec["rayClusterSpec"]["workerGroupSpecs"][0]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert int(flags["--workers"]) <= group["maxReplicas"] * int(limits["cpu"])
    assert int(flags["--shards"]) >= int(flags["--workers"])
    gpus = float(flags.get("--gpus-per-worker", 0)) * int(flags["--workers"])
    assert gpus <= group["maxReplicas"] * int(limits.get("nvidia.com/gpu", 0))
    assert yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]


SERVE_CONFIGS = [
    *(pytest.param(documents(path)[0], id=path.stem) for path in CLUSTER.glob("serve*.yaml")),
    *(
        pytest.param(yaml.safe_load(documents(path)[0]["spec"]["serveConfigV2"]), id=path.stem)
        for path in CLUSTER.glob("kuberay/rayservice-*.yaml")
    ),
]


def serve_application(config: dict[str, Any]) -> Any:
    """The one application, by Ray Serve's own schema, which drops what it does not know."""
    from ray.serve.schema import ServeDeploySchema

    known = ServeDeploySchema.model_validate(config)
    dropped = list(missing_keys(config, known.model_dump(exclude_unset=True)))
    assert not dropped, f"Ray Serve knows no {', '.join(dropped)}"
    (application,) = known.applications
    return application


def missing_keys(given: Any, kept: Any, *, place: str = "") -> Iterator[str]:
    """The keys of a tree that another one lacks."""
    if isinstance(given, dict):
        for key, value in given.items():
            if not isinstance(kept, dict) or key not in kept:
                yield f"{place}{key}"
            else:
                yield from missing_keys(value, kept[key], place=f"{place}{key}.")
    elif isinstance(given, list):
        for at, (value, other) in enumerate(zip(given, kept, strict=True)):
            yield from missing_keys(value, other, place=f"{place}{at}.")


@pytest.mark.parametrize("config", SERVE_CONFIGS)
def test_serve_takes_the_application(config: dict[str, Any]) -> None:
    """Ray Serve's own schema, then our own settings: a misspelt one fails in either."""
    from hvd_ray.serving.app import BuildArgs
    from hvd_ray.serving.settings import FRONT, REPLICA, hot_settings

    application = serve_application(config)
    settings = BuildArgs(**application.args).config()
    assert {each.name for each in application.deployments} == {FRONT, REPLICA}
    for deployment in application.deployments:
        hot = hot_settings(deployment.user_config)
        assert not hot.is_policy_named, "a champion would never serve"
    if settings.serving.engine == "torch":
        assert settings.num_threads == settings.serving.cpus_per_replica, "as calibrated"
    if config["http_options"]["host"] != "127.0.0.1":
        assert settings.serving.api_keys is not None, "beyond loopback clients need keys"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: c["applications"][0].update(route_prefx="/"), "applications.0.route_prefx"),
        (lambda c: c.update(proxy_locatoin="HeadOnly"), "proxy_locatoin"),
        (lambda c: c["http_options"].update(prt=1), "http_options.prt"),
        (
            lambda c: c["applications"][0]["deployments"][1].update(user_conf={}),
            "applications.0.deployments.1.user_conf",
        ),
    ],
)
def test_a_misspelt_key_of_serve_is_found_out(change: Any, reason: str) -> None:
    config = deepcopy(documents(CLUSTER / "serve.yaml")[0])
    change(config)
    with pytest.raises(AssertionError, match=f"knows no {re.escape(reason)}\\n"):
        serve_application(config)


@pytest.mark.parametrize(
    "path", sorted(CLUSTER.glob("kuberay/rayservice-*.yaml")), ids=lambda path: path.stem
)
def test_a_service_has_its_keys_its_port_and_room_for_its_replicas(path: Path) -> None:
    document = documents(path)[0]
    serving = yaml.safe_load(document["spec"]["serveConfigV2"])["applications"][0]["args"][
        "serving"
    ]
    (spec,) = ray_specs(document)
    group = spec["workerGroupSpecs"][0]
    pod = group["template"]["spec"]
    limits = pod["containers"][0]["resources"]["limits"]
    assert {"name": "serve", "containerPort": 8000} in pod["containers"][0]["ports"]
    assert Path(serving["api_keys"]).parent == Path("/etc/hvd")
    assert {"name": "keys", "mountPath": "/etc/hvd"} in pod["containers"][0]["volumeMounts"]
    most = serving["autoscaling"]["max_replicas"]
    assert most * serving["cpus_per_replica"] <= group["maxReplicas"] * int(limits["cpu"])
    gpus = most * serving.get("gpus_per_replica", 0)
    assert gpus <= group["maxReplicas"] * int(limits.get("nvidia.com/gpu", 0))
    assert serving["drain_s"] < pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("name", ["local", "gpu"])
def test_ray_up_takes_the_file(name: str) -> None:
    """Ray's own schema and defaults, as `ray up` applies them before it asks any cloud."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((CLUSTER / f"{name}.yaml").read_text(encoding="utf-8"))
    config = prepare_config(config)
    validate_config(config)
    options = json.dumps(config["docker"])
    assert "RAY_AUTH_MODE=token" in options
    assert "/shared:/shared" in options


def as_ray_runs_it(config: dict[str, Any], command: str) -> list[str]:
    """The words of the node's shell for a command of `ray up` in the container."""
    from ray.autoscaler._private.command_runner import DockerCommandRunner

    commands: list[str] = []
    runner = DockerCommandRunner(
        config["docker"],
        log_prefix="",
        node_id="0",
        provider=None,
        auth_config=config["auth"],
        cluster_name="hvd",
        process_runner=subprocess,
        use_internal_ip=False,
    )
    runner.home_dir = "/home/ray"
    runner.ssh_command_runner.run = lambda cmd, **_: commands.append(cmd)
    runner.run(command)
    return shlex.split(commands[0])


DOCKERFILE = (CLUSTER / "Dockerfile").read_text(encoding="utf-8")
LAST_STAGE = DOCKERFILE.rsplit("\nFROM ", 1)[1].replace("\\\n", " ")


@pytest.mark.parametrize("name", ["local", "gpu"])
def test_the_image_finds_what_ray_up_runs_in_a_login_shell(name: str, tmp_path: Path) -> None:
    """Ray runs `bash --login`, whose /etc/profile forgets the image's PATH."""
    config = yaml.safe_load((CLUSTER / f"{name}.yaml").read_text(encoding="utf-8"))
    *docker, inner = as_ray_runs_it(config, "ray stop")
    assert docker == ["docker", "exec", "-it", "hvd", "/bin/bash", "-c"]
    assert inner.startswith("bash --login "), "else profile.d is not read"
    (line,) = re.findall(r"RUN echo '([^']+)' > /etc/profile\.d/\S+\.sh\n", LAST_STAGE)
    (tmp_path / "ray").write_text("#!/bin/sh\necho found\n")
    (tmp_path / "ray").chmod(0o755)
    script = f"PATH=/usr/bin:/bin; {line}; ray stop".replace("/venv/bin", str(tmp_path))
    assert subprocess.run(["bash", "-c", script], capture_output=True).stdout == b"found\n"
    assert re.search(r"^ENV .*\bPATH=/venv/bin:", LAST_STAGE, re.MULTILINE)


def test_the_image_has_the_programs_that_ray_up_uses_in_it() -> None:
    """Files by rsync, workers by the head's ssh, `ray exec --screen`; AWS by boto3."""
    (packages,) = re.findall(r"apt-get install -y --no-install-recommends ([^&]+)&&", LAST_STAGE)
    assert {"rsync", "openssh-client", "screen"} <= set(packages.split())
    assert re.search(r"/venv/bin/pip install .*\bboto3==", DOCKERFILE)
    made = re.findall(r"install -d -o ray -g ray -m 0700 ([^&]+)&&", LAST_STAGE)[0].split()
    variables = dict(re.findall(r"(\w+)=(\S+)", LAST_STAGE))
    assert variables["SCREENDIR"] in made


@pytest.mark.parametrize("name", ["local", "gpu"])
def test_ray_up_hands_out_the_token_where_the_image_lets_it(name: str) -> None:
    config = yaml.safe_load((CLUSTER / f"{name}.yaml").read_text(encoding="utf-8"))
    ((there, here),) = config["file_mounts"].items()
    assert here == "~/.ray", "where `ray get-auth-token --generate` puts auth_token"
    assert f"-e RAY_AUTH_TOKEN_PATH={there}/auth_token" in config["docker"]["run_options"]
    assert there in LAST_STAGE, "made for the user ray, not for root by Docker"


def test_ray_up_installs_nothing_on_aws_and_names_one_tracking_server() -> None:
    """Ray's defaults for AWS run pip in the image, as a user who may not."""
    from ray.autoscaler._private.util import prepare_config

    config = prepare_config(yaml.safe_load((CLUSTER / "gpu.yaml").read_text(encoding="utf-8")))
    assert config["head_setup_commands"] == config["worker_setup_commands"] == []
    for commands, host in (
        (config["head_start_ray_commands"], "127.0.0.1"),
        (config["worker_start_ray_commands"], "$RAY_HEAD_IP"),
    ):
        assert f"export MLFLOW_TRACKING_URI=http://{host}:5000; ray start" in commands[-1]


def test_ray_up_refuses_an_unknown_key() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((CLUSTER / "gpu.yaml").read_text(encoding="utf-8"))
    with pytest.raises(jsonschema.ValidationError, match="idle_timeout"):
        validate_config(prepare_config(config | {"idle_timeout": 5}))


@pytest.mark.parametrize(
    "path", sorted((REPO / "jobs" / "env").glob("*.yaml")), ids=lambda path: path.stem
)
def test_ray_takes_the_runtime_environment(path: Path) -> None:
    from ray.runtime_env import RuntimeEnv

    env = RuntimeEnv(**yaml.safe_load(path.read_text(encoding="utf-8")))
    assert env["env_vars"]["HVD_HOME"].startswith("/shared/")


def test_the_lock_that_a_runtime_environment_names_travels_with_the_job() -> None:
    from hvd_ray.pipelines.upload import plan_upload

    env = yaml.safe_load((REPO / "jobs" / "env" / "pip.yaml").read_text(encoding="utf-8"))
    (requirement,) = env["pip"]["packages"]
    name = requirement.removeprefix("-r ${RAY_RUNTIME_ENV_CREATE_WORKING_DIR}/")
    assert name in {path.as_posix() for path, _ in plan_upload(REPO).sizes}
