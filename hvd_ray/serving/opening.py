"""From settings to a replica that serves: loads the target, fills its cache."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from hvd_ray.errors import UserError
from hvd_ray.fetch import resolve_model, tokenizer_sha
from hvd_ray.parts.find import Sources, find_parts
from hvd_ray.serving.auth import LOCAL_TENANT, load_keys
from hvd_ray.serving.checks import refuse_checks
from hvd_ray.serving.kept import KeptSettings
from hvd_ray.serving.lineup import Stage, set_stage
from hvd_ray.serving.replica import Replica
from hvd_ray.serving.settings import ServeConfig, ServingConfig, hot_settings, num_shared_cores
from hvd_ray.traces.store import read_traces, refuse_unknown_tokens

_log = logging.getLogger(__name__)


def check(config: ServeConfig) -> None:
    """Refuse settings that a replica would refuse, before one is started for them.

    Raises:
        UserError: a part that was named, or that a named policy needs, cannot be had.
    """
    if config.serving.engine == "vllm":
        from hvd_ray.serving.vllm_arguments import engine_arguments

        engine_arguments(config)
        return
    config = _with_cores(config)
    if "name" in config.policy.model_fields_set:
        find_parts([config.policy.name], config, Sources())
    refuse_checks(config, Sources())
    _check_warm(config.serving)


def _check_warm(serving: ServingConfig) -> None:
    """Raises UserError where traces are not there, or nobody could ever draft from them."""
    if serving.warm_traces is None:
        return
    if not serving.warm_traces.exists():
        raise UserError(f"serving.warm_traces={serving.warm_traces}: there is nothing")
    keys = load_keys(serving.api_keys)
    names = sorted({tenant for _, tenant in keys.tenant_of} or {LOCAL_TENANT})
    if serving.warm_tenant not in names:
        raise UserError(
            f"serving.warm_tenant={serving.warm_tenant}: whose cache serving.warm_traces goes to; "
            f"nobody with a key has that name, choose from {', '.join(names)}"
        )


def _with_cores(config: ServeConfig) -> ServeConfig:
    """With the threads that a replica will have: a cost table is for one number of them."""
    num_threads = config.num_threads or num_shared_cores(config)
    return config.model_copy(update={"num_threads": num_threads})


def load_stage(config: ServeConfig) -> Stage:
    """The target and its drafters, with an empty cache.

    Raises:
        UserError: the model or a head that was named cannot be had.
    """
    from hvd_ray.systems import load_engine

    config = _with_cores(config)
    engine, codec = load_engine(config)
    return set_stage(config, engine=engine, codec=codec)


def open_replica(
    config: ServeConfig, stage: Stage, tree: dict[str, Any], kept: KeptSettings | None = None
) -> Replica:
    """A replica with the settings of a `user_config`, its cache filled if that is wished.

    Args:
        config: what lasts.
        stage: the target, loaded.
        tree: the `user_config`.
        kept: settings that held before, for when these do not.

    Raises:
        UserError: the settings ask for what cannot be had, and none have held before.
    """
    root = resolve_model(config.model).path_or_id
    try:
        served = Replica(stage, name=config.served_name, root=root, hot=hot_settings(tree))
        if kept is not None:
            kept.keep(tree)
    except UserError as error:
        last = kept.last() if kept is not None else None
        if last is None:
            raise
        served = Replica(stage, name=config.served_name, root=root, hot=hot_settings(last))
        served.refuse(error)
    for note in served.lineup.notes:
        _log.warning(note)
    if config.serving.warm_traces is not None:
        num_tokens = warm(stage, served, config, root=root)
        _log.info("the cache begins with %d tokens of %s", num_tokens, config.serving.warm_traces)
    return served


def warm(stage: Stage, served: Replica, config: ServeConfig, *, root: str) -> int:
    """Put the outputs of stored traces into a tenant's cache; the number of tokens kept.

    Raises:
        UserError: the traces cannot be read, or their tokens are not the target's.
    """
    place = config.serving.warm_traces
    assert place is not None
    refuse_unknown_tokens(place, num_token_ids=stage.engine.capabilities.vocab_size)
    sha, scope = tokenizer_sha(root), served.scope_of(config.serving.warm_tenant)
    for number, trace in enumerate(read_traces(place)):
        if trace.tokenizer_sha != sha:
            raise UserError(
                f"serving.warm_traces={place}: trace {trace.trace_id} has the tokens of another "
                f"tokenizer than {config.model}"
            )
        if trace.error is None and trace.output_token_ids:
            request = replace(trace.request(), request_id=f"warm-{number}", scope=scope)
            stage.cache.start(request)
            stage.cache.observe(request.request_id, trace.output_token_ids)
            stage.cache.stop(request.request_id)
    return stage.cache.num_cached_tokens
