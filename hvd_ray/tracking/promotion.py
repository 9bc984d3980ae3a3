"""Aliases of registered predictors: who is champion, who challenges, and the change of hands."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from hvd_ray.config import Config
from hvd_ray.home import file_lock, tracking_dir
from hvd_ray.tracking.registry import CHALLENGER, CHAMPION, RegisteredPredictor, registered_name
from hvd_ray.tracking.store import OFF, Store, open_store, sqlite_path, tracking_uri

_MAX_TAG_CHARS = 4000


def find_alias(alias: str, *, config: Config) -> RegisteredPredictor | None:
    """The version of the target's predictors that holds an alias, or None.

    Raises:
        UserError: the store cannot be used.
    """
    store, name = _existing_store(config), registered_name(config.model)
    if store is None:
        return None
    with store.readable_errors():
        version = _aliases(store, name).get(alias)
    return None if version is None else RegisteredPredictor(name, str(version), alias)


def run_params(version: RegisteredPredictor, *, config: Config) -> dict[str, str]:
    """What the run that made a version was told; empty where that run is gone."""
    store = open_store(tracking_uri(config))
    with store.readable_errors():
        run_id = store.client.get_model_version(version.name, version.version).run_id
        return dict(store.client.get_run(run_id).data.params) if run_id else {}


def make_champion(
    version: RegisteredPredictor, *, config: Config, about: Mapping[str, Any]
) -> RegisteredPredictor:
    """Give a version the champion's alias, take the challenger's away, and note why on it.

    Args:
        version: the challenger.
        config: names the store.
        about: what it was promoted on; kept as the version's tags, JSON where it is not text.
    """
    store = open_store(tracking_uri(config))
    now = datetime.now(UTC).isoformat(timespec="seconds")
    with store.readable_errors(), file_lock(tracking_dir() / "registry"):
        aliases = _aliases(store, version.name)
        tags = {"promoted_at": now, "promoted_over": aliases.get(CHAMPION, "none"), **about}
        for key, value in tags.items():
            text = value if isinstance(value, str) else json.dumps(value)
            store.client.set_model_version_tag(
                version.name, version.version, key, text[:_MAX_TAG_CHARS]
            )
        store.client.set_registered_model_alias(version.name, CHAMPION, version.version)
        if str(aliases.get(CHALLENGER)) == version.version:
            store.client.delete_registered_model_alias(version.name, CHALLENGER)
    return RegisteredPredictor(version.name, version.version, CHAMPION)


def drop_champion(*, config: Config) -> RegisteredPredictor | None:
    """Take the champion's alias away, so that what ships decides again; its version stays.

    Returns:
        Who held it, or None.
    """
    champion = find_alias(CHAMPION, config=config)
    if champion is not None:
        store = open_store(tracking_uri(config))
        with store.readable_errors(), file_lock(tracking_dir() / "registry"):
            store.client.delete_registered_model_alias(champion.name, CHAMPION)
    return champion


def is_vacant(*, config: Config) -> bool:
    """Whether the registry knows predictors of the target and calls none of them champion.

    A store that is gone, or an empty one in its place, knows none.

    Raises:
        UserError: the store cannot be used.
    """
    store, name = _existing_store(config), registered_name(config.model)
    if store is None:
        return False
    with store.readable_errors():
        is_known = bool(store.client.search_model_versions(f"name = '{name}'"))
        return is_known and CHAMPION not in _aliases(store, name)


def _existing_store(config: Config) -> Store | None:
    """The store; None where tracking is off or nothing was ever kept."""
    uri = tracking_uri(config)
    database = sqlite_path(uri)
    if uri == OFF or (database is not None and not database.exists()):
        return None
    return open_store(uri)


def _aliases(store: Store, name: str) -> dict[str, str]:
    from mlflow.exceptions import MlflowException

    try:
        return {k: str(v) for k, v in store.client.get_registered_model(name).aliases.items()}
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return {}
        raise
