"""Settings of a deployment: the configuration tree with a `serving` section."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hvd_ray.config import Config, PolicyConfig, Positive, validated
from hvd_ray.errors import NotSupportedError, UserError
from hvd_ray.types import VerificationName

FRONT, REPLICA = "Front", "Replica"
"""The deployments' names in Serve, which its YAML files use."""
MOST_REQUESTS = 100_000
"""That a replica can be told to take on."""
LISTED_IN = "hvd_ray/serving/settings.py and hvd_ray/config.py"
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Limits(_Section):
    """What a replica and the front take on; may change while they run."""

    max_running: Annotated[int, Field(ge=1, le=1024)] = 4
    """Outputs that a replica decodes at once, step by step in turn (torch engine)."""
    max_requests: Annotated[int, Field(ge=1, le=MOST_REQUESTS)] = 64
    """Requests on a replica, running and waiting; more get 429."""
    max_prompt_tokens: Positive | None = None
    """None: what the model's context holds."""
    max_output_tokens: Positive | None = None
    """The most that a request may ask for, and what one gets that names nothing."""
    max_body_bytes: Positive = 4_000_000
    request_timeout_s: Seconds = 600.0
    """Seconds after which a request is given up, waiting included."""


class HotSettings(_Section):
    """What `user_config` holds: settings that change without a restart."""

    policy: PolicyConfig = PolicyConfig()
    limits: Limits = Limits()

    @property
    def is_policy_named(self) -> bool:
        """Whether somebody chose the policy; if not, the best one that can be built is served."""
        return "name" in self.policy.model_fields_set


class Autoscaling(_Section):
    min_replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    """Not 0: health and metrics ask the replicas, and to ask where there is none starts one."""
    max_replicas: Annotated[int, Field(ge=1, le=1000)] = 2
    target_requests: Annotated[float, Field(gt=0)] = 4.0
    """Requests on a replica at which another one is started."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas={self.min_replicas} is more than max_replicas={self.max_replicas}"
            )
        return self


class ServingConfig(_Section):
    engine: Literal["torch", "vllm"] = "torch"
    served_name: str | None = None
    """What clients call the model; None: the last part of `model`."""
    replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    autoscaling: Autoscaling | None = None
    """In place of a fixed number of replicas."""
    cpus_per_replica: Annotated[float, Field(ge=0, le=1024)] = 1.0
    gpus_per_replica: Annotated[float, Field(ge=0, le=1024)] = 0.0
    api_keys: Path | None = None
    """A file of `NAME KEY` lines; None: the variable HVD_API_KEYS, or no keys on loopback."""
    verification: tuple[VerificationName, ...] = ()
    """What a request may ask for beside `full`; each needs a slim model (torch engine)."""
    limits: Limits = Limits()
    warm_traces: Path | None = None
    """Traces whose outputs the cache begins with."""
    warm_tenant: str = "local"
    """Whose cache they go to: a name in the key file."""
    poll_s: Seconds = 30.0
    """How often the registry is asked whether the champion has changed."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Arguments of vLLM's engine, under its own names, e.g. `speculative_config`."""
    drain_s: Seconds = 60.0
    """How long a replica that is to end may finish its requests."""

    @property
    def most_replicas(self) -> int:
        """As many as there may be at once."""
        return self.replicas if self.autoscaling is None else self.autoscaling.max_replicas


class ServeConfig(Config):
    serving: ServingConfig = ServingConfig()

    @property
    def served_name(self) -> str:
        return self.serving.served_name or Path(self.model).name

    @property
    def lasting(self) -> dict[str, Any]:
        """What was given, without what may change: another value restarts the replicas."""
        hot: Any = {"policy": True, "serving": {"limits"}}
        tree = self.model_dump(mode="json", exclude_unset=True, exclude=hot)
        return {key: value for key, value in tree.items() if value != {}}

    @property
    def hot(self) -> dict[str, Any]:
        """The `user_config` that these settings make: what was given, not the defaults."""
        return {
            "policy": self.policy.model_dump(exclude_unset=True),
            "limits": self.serving.limits.model_dump(exclude_unset=True),
        }


def num_shared_cores(config: ServeConfig) -> int:
    """The cores that are this process's share: replicas of one machine do not fight for them."""
    return max(1, len(os.sched_getaffinity(0)) // config.serving.most_replicas)


def deploy_tree(config: ServeConfig, *, app: str) -> dict[str, Any]:
    """What a YAML file of Serve's says for these settings, but for where it listens.

    Settings that may change stand in `user_config`, so that another value restarts nothing.
    """
    hot = [{"name": name, "user_config": config.hot} for name in (REPLICA, FRONT)]
    entry = {
        "name": app,
        "route_prefix": "/",
        "import_path": "hvd_ray.serving.app:build",
        "args": config.lasting,
        "deployments": hot,
    }
    return {"applications": [entry]}


def serve_config(tree: Mapping[str, Any]) -> ServeConfig:
    """Validated settings of a deployment.

    Raises:
        UserError: a key is unknown or a value out of range.
        NotSupportedError: another verification for everybody, or any but `full` with vLLM.
    """
    config = validated(ServeConfig, dict(tree), where=LISTED_IN)
    if config.verification != "full":
        raise NotSupportedError(
            f"verification={config.verification} for every request of `hvd serve`; let requests "
            f"choose it with serving.verification=[{config.verification}]"
        )
    if config.serving.verification and config.serving.engine == "vllm":
        raise NotSupportedError(
            "serving.verification with vLLM, which verifies in full; serve with --engine torch"
        )
    _refuse_idle(config.serving)
    return config


def _refuse_idle(serving: ServingConfig) -> None:
    """Refuse what would be taken without a word and do nothing.

    Raises:
        UserError: a setting is another engine's, or at odds with another one.
    """
    if serving.engine == "torch" and serving.vllm:
        name = next(iter(serving.vllm))
        raise UserError(f"serving.vllm.{name}: only with vLLM; add --engine vllm or leave it out")
    if serving.engine == "vllm" and serving.warm_traces is not None:
        raise NotSupportedError("serving.warm_traces with vLLM, whose cache begins empty")
    if serving.autoscaling is not None and "replicas" in serving.model_fields_set:
        raise UserError(
            "serving.replicas (--replicas) and serving.autoscaling: give a number of replicas, or "
            "how few and how many there may be"
        )


def hot_settings(tree: Mapping[str, Any]) -> HotSettings:
    """A validated `user_config`.

    Raises:
        UserError: a key is unknown or a value out of range.
    """
    return validated(HotSettings, dict(tree), where=LISTED_IN)
