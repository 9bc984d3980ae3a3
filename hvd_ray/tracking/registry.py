"""Payoff predictors in the model registry: `hvd-payoff-TARGET`, with a champion and challengers.

Without a champion decides what ships for the target, if anything does.
A version is the predictor's plain folder (safetensors and JSON) as an artifact of the run that made
it; nothing is pickled.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_ray.config import Config
from hvd_ray.errors import UserError
from hvd_ray.home import atomic_dir, file_lock, tracking_dir
from hvd_ray.provenance import masked
from hvd_ray.shipped import shipped_folder
from hvd_ray.tracking.artifacts import fetch_folder, in_time
from hvd_ray.tracking.runs import MlflowTracker, Tracker
from hvd_ray.tracking.store import OFF, Store, open_store, sqlite_path, tracking_uri

CHAMPION = "champion"
CHALLENGER = "challenger"
PREDICTOR_ARTIFACT = "predictor"
PREDICTOR_CARD = "predictor.json"
"""What a folder must hold to be a predictor; the rest is for whoever loads it to check."""

_MODEL_REF = re.compile(
    r"models:/(?P<name>[^/@\x00-\x1f]+)(?:@(?P<alias>[^/@\x00-\x1f]+)|/(?P<version>\d+))"
)


@dataclass(frozen=True, slots=True)
class RegisteredPredictor:
    """A version of a registered model."""

    name: str
    version: str
    alias: str
    """`champion` or `challenger`."""

    @property
    def ref(self) -> str:
        """What `policy.predictor` takes; stays this version when the alias moves on."""
        return f"models:/{self.name}/{self.version}"


def registered_name(model: str) -> str:
    """The registered model that holds the predictors of a target."""
    last = Path(model).name if Path(model).is_absolute() else model
    return "hvd-payoff-" + re.sub(r"[^A-Za-z0-9_.]+", "-", last).strip("-").lower()


def register_predictor(
    tracker: Tracker,
    folder: Path,
    *,
    config: Config,
    alias: str | None = None,
    replaces_shipped: bool = False,
) -> RegisteredPredictor:
    """Keep a predictor's folder as an artifact of the run and as a new version in the registry.

    Args:
        tracker: the run that made it.
        folder: as written by the predictor's `save`.
        config: names the target.
        alias: `champion` or `challenger`; by default a version challenges the champion or, as
            long as there is none, what ships for the target. Where nothing ships it becomes the
            champion.
        replaces_shipped: become the champion, if there is none, whatever ships.

    Raises:
        UserError: tracking is off, or the store cannot be used.
    """
    if not isinstance(tracker, MlflowTracker):
        raise UserError("the predictor cannot be registered: tracking is off (tracking.uri=none)")
    tracker.log_artifacts(folder, PREDICTOR_ARTIFACT)
    store, name = tracker.store, registered_name(config.model)
    with store.readable_errors(), file_lock(tracking_dir() / "registry"):
        aliases = _registered_aliases(store, name)
        version = str(_version_of_run(store, name, tracker.run_id))
        held = next((each for each, holder in aliases.items() if holder == version), None)
        is_free = replaces_shipped or shipped_folder(config.model, "payoff") is None
        usual = CHAMPION if is_free and CHAMPION not in aliases else CHALLENGER
        alias = held or alias or usual
        store.client.set_registered_model_alias(name, alias, version)
    return RegisteredPredictor(name, version, alias)


def _version_of_run(store: Store, name: str, run_id: str) -> Any:
    """The version that a run has made; a run that was killed after that makes no second one."""
    found = store.client.search_model_versions(f"name = '{name}' and run_id = '{run_id}'")
    if found:
        return found[0].version
    source = f"runs:/{run_id}/{PREDICTOR_ARTIFACT}"
    return store.client.create_model_version(name, source, run_id).version


def resolve_predictor(ref: str | None = None, *, config: Config) -> Path:
    """The folder of a predictor, downloaded first where it lies in a registry.

    Args:
        ref: a folder, `models:/NAME@ALIAS`, `models:/NAME/VERSION`, or None for
            `policy.predictor` and, without one, the champion of the target or, as long as there
            is none, what ships for it.
        config: names the target and the store.

    Raises:
        UserError: there is no such predictor; the message says what to type.
    """
    ref = ref or config.policy.predictor
    if ref is None:
        return _champion_or_shipped(config)
    if not ref.startswith("models:"):
        return _predictor_folder(Path(ref).expanduser())
    return _registered_folder(ref, config)


class _NotRegisteredError(UserError):
    """There is no such version."""


def _champion_or_shipped(config: Config) -> Path:
    try:
        return _registered_folder(f"models:/{registered_name(config.model)}@{CHAMPION}", config)
    except _NotRegisteredError:
        shipped = shipped_folder(config.model, "payoff")
        if shipped is None:
            raise
        return shipped


def _registered_folder(ref: str, config: Config) -> Path:
    found = _MODEL_REF.fullmatch(ref)
    if found is None:
        raise UserError(
            f"predictor {ref!r}: expected a folder, models:/NAME@ALIAS or models:/NAME/VERSION"
        )
    uri = tracking_uri(config)
    database = sqlite_path(uri)
    if uri == OFF or (database is not None and not database.exists()):
        raise _not_registered(ref, uri)
    return _download(open_store(uri), ref, **found.groupdict())


def _predictor_folder(folder: Path) -> Path:
    if not (folder / PREDICTOR_CARD).is_file():
        raise UserError(
            f"predictor {folder}: no folder with {PREDICTOR_CARD}; give one written by `hvd train`"
        )
    return folder


def _not_registered(ref: str, uri: str) -> _NotRegisteredError:
    place = "tracking is off" if uri == OFF else f"not in {masked(uri)}"
    return _NotRegisteredError(
        f"no payoff predictor {ref} ({place}): train one with `hvd train LABELS_DIR`, or name a "
        "folder with policy.predictor=DIR"
    )


def _download(store: Store, ref: str, *, name: str, alias: str | None, version: str | None) -> Path:
    """Copy a version's files to HVD_HOME, once: a version never changes."""
    with store.readable_errors():
        found = in_time(
            store,
            lambda: _model_version(store, ref, name=name, alias=alias, version=version),
            meanwhile=lambda: None,
        )
        if not re.fullmatch(r"\d+", str(found.version)):  # it becomes a part of a path
            raise UserError(f"{ref}: {masked(store.uri)} answers with version {found.version!r}")
        identity = f"{store.uri} {name} {found.version} {found.run_id} {found.creation_timestamp}"
        digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
        folder = tracking_dir() / "downloads" / f"{name}-{found.version}-{digest}"
        with file_lock(folder):
            if not (folder / PREDICTOR_CARD).is_file():
                with atomic_dir(folder) as draft:
                    fetch_folder(store, str(found.source), to=draft)
                    if not (draft / PREDICTOR_CARD).is_file():
                        raise UserError(
                            f"{ref}: is no payoff predictor ({PREDICTOR_CARD} is missing there)"
                        )
    return folder


def _model_version(
    store: Store, ref: str, *, name: str, alias: str | None, version: str | None
) -> Any:
    from mlflow.exceptions import MlflowException

    try:
        if alias is not None:
            return store.client.get_model_version_by_alias(name, alias)
        return store.client.get_model_version(name, version)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise _not_registered(ref, store.uri) from None
        raise


def _registered_aliases(store: Store, name: str) -> dict[str, str]:
    """Alias and version of a registered model, which is made if it is absent."""
    from mlflow.exceptions import MlflowException

    try:
        store.client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    aliases = store.client.get_registered_model(name).aliases
    return {alias: str(version) for alias, version in aliases.items()}
