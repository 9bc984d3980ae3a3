"""A training that is over says so beside its predictor, so that its command, typed again, finds it.

A process can be killed after its run has ended and before it has answered: without this note the
same command would make a second run and a second version of the same predictor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_ray.commands.train_labels import label_folders
from hvd_ray.home import atomic_path

if TYPE_CHECKING:
    from hvd_ray.config import Config
    from hvd_ray.payoff.training_settings import TrainingSettings


def training_key(
    labels: Path, config: Config, settings: TrainingSettings, *, wants_registration: bool
) -> str:
    """Names all that decides a training's result and where it is kept, the labels by content."""
    from hvd_ray.payoff.features import FEATURE_VERSION
    from hvd_ray.traces.store import parts_of
    from hvd_ray.tracking import tracking_uri

    digest = hashlib.sha256()
    for folder in label_folders(labels):
        for part in parts_of(folder, "labels"):
            with part.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    facts = {
        "config": config.model_dump(mode="json"),
        "training": asdict(settings),
        "features": FEATURE_VERSION,
        "store": tracking_uri(config),
        "registers": wants_registration,
    }
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def keep_answer(folder: Path, key: str, answer: Mapping[str, Any]) -> None:
    """Note that the predictor in `folder` is finished and registered."""
    note = {"key": key, "card": _card_hash(folder), "answer": answer}
    with atomic_path(_place(folder)) as draft:
        draft.write_text(json.dumps(note), encoding="utf-8")


def kept_answer(folder: Path, key: str) -> dict[str, Any] | None:
    """What the same training has answered before; None where its predictor is not there as made."""
    try:
        note = json.loads(_place(folder).read_text(encoding="utf-8"))
        is_same = note["key"] == key and note["card"] == _card_hash(folder)
        return dict(note["answer"]) if is_same else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _place(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.done")


def _card_hash(folder: Path) -> str:
    """The card names its weights by their hash."""
    return hashlib.sha256((folder / "predictor.json").read_bytes()).hexdigest()
