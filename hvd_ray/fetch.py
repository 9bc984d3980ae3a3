"""Name a target model and have it on disk: embedded models, local folders, hub ids."""

import logging
from dataclasses import dataclass
from pathlib import Path

from hvd_ray.errors import UserError
from hvd_ray.targets import hub
from hvd_ray.targets.embedded import EMBEDDED_MODELS, EmbeddedModel, fetch_embedded, is_fetched
from hvd_ray.targets.identity import (
    check_model_folder,
    head_fingerprint,
    model_fingerprint,
    tokenizer_sha,
    vocab_size_of,
)
from hvd_ray.targets.progress import FetchProgress, LoggedProgress

__all__ = [
    "ModelRef",
    "fetch_model",
    "head_fingerprint",
    "model_fingerprint",
    "resolve_model",
    "resolve_tokenizer",
    "tokenizer_sha",
    "vocab_size_of",
]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelRef:
    """A model that can be loaded."""

    name: str
    """What people call it: the embedded name, the folder's name or the hub id."""
    path_or_id: str
    """What `from_pretrained` takes."""
    is_local: bool
    """Whether `path_or_id` is a folder on this machine."""


def resolve_model(name_or_path: str) -> ModelRef:
    """Say where a model lies; an embedded one that is absent is fetched first.

    Args:
        name_or_path: An embedded model's name, a local folder or a hub id `ORG/NAME`. A hub id
            that is cached becomes its folder; another is passed on unless `HF_HUB_OFFLINE` is set.

    Raises:
        UserError: no such model, or the folder is no loadable model.
    """
    if name_or_path in EMBEDDED_MODELS:
        return _resolve_embedded(EMBEDDED_MODELS[name_or_path])
    if _is_folder(name_or_path):
        return _resolve_folder(Path(name_or_path).expanduser().resolve())
    if hub.is_hub_id(name_or_path):
        folder = hub.cached_folder(name_or_path)
        return ModelRef(name_or_path, str(folder or name_or_path), is_local=folder is not None)
    raise _no_such_model(name_or_path)


def resolve_tokenizer(name_or_path: str) -> ModelRef:
    """Say where a tokenizer lies: as `resolve_model`, but a local folder needs no weights.

    Raises:
        UserError: no such model, or the folder holds no tokenizer.
    """
    if name_or_path in EMBEDDED_MODELS or not _is_folder(name_or_path):
        return resolve_model(name_or_path)
    folder = Path(name_or_path).expanduser().resolve()
    tokenizer_sha(folder)
    return ModelRef(folder.name, str(folder), is_local=True)


def fetch_model(
    name: str, *, force: bool = False, progress: FetchProgress | None = None
) -> ModelRef:
    """Bring a model onto this machine; nothing is done if it is there.

    It may be killed at any time and run by several processes at once: the folder appears whole
    or not at all, and a broken download is resumed.

    Args:
        name: As for `resolve_model`; a local folder is only checked.
        force: Fetch anew even if it is there.
        progress: Hears the stages; by default they go to the log.

    Raises:
        UserError: unknown name, no network, wrong content, no room, not writable.
    """
    progress = progress or LoggedProgress()
    if name in EMBEDDED_MODELS:
        fetch_embedded(EMBEDDED_MODELS[name], force=force, progress=progress)
        return _embedded_ref(EMBEDDED_MODELS[name])
    if hub.is_hub_id(name) and not hub.is_offline() and not _is_folder(name):
        progress.stage(f"fetching {name} from the hub")
        return ModelRef(name, str(hub.fetch_from_hub(name, force=force)), is_local=True)
    return resolve_model(name)


def is_present(name: str) -> bool:
    """Whether `name` is an embedded model whose folder is whole; reads a few file sizes only."""
    return name in EMBEDDED_MODELS and is_fetched(EMBEDDED_MODELS[name])


def _resolve_embedded(model: EmbeddedModel) -> ModelRef:
    if not is_fetched(model):
        _log.warning("model %s is not there yet: fetching it into %s", model.name, model.folder)
        return fetch_model(model.name)
    return _embedded_ref(model)


def _embedded_ref(model: EmbeddedModel) -> ModelRef:
    return ModelRef(model.name, str(model.folder), is_local=True)


def _is_folder(name: str) -> bool:
    return bool(name) and Path(name).expanduser().is_dir()


def _resolve_folder(folder: Path) -> ModelRef:
    check_model_folder(folder)
    return ModelRef(folder.name, str(folder), is_local=True)


def _no_such_model(name: str) -> UserError:
    known = ", ".join(EMBEDDED_MODELS)
    return UserError(
        f"no model {name!r}: it is no folder here; give {known}, a folder saved by "
        "transformers, or a hub id ORG/NAME"
    )
