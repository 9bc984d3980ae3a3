"""A training that is over says so beside what it made, so that its command, typed again, finds it.

A process can be killed after its run has ended and before it has answered: without this note the
same command would make a second run, and a second version of the same predictor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_ray.commands.train_labels import label_folders
from hvd_ray.home import atomic_path

if TYPE_CHECKING:
    from hvd_ray.config import Config
    from hvd_ray.drafting.eagle3_job import TrainJob
    from hvd_ray.payoff.training_settings import TrainingSettings

CARD, HEAD = "predictor.json", "model.safetensors"
"""The file that says what was made: a card names its weights by their hash."""


def training_key(
    labels: Path, config: Config, settings: TrainingSettings, *, wants_registration: bool
) -> str:
    """Names all that decides a training's result and where it is kept, the labels by content."""
    from hvd_ray.payoff.features import FEATURE_VERSION
    from hvd_ray.traces.store import parts_of
    from hvd_ray.tracking import tracking_uri

    facts = {
        "config": config.model_dump(mode="json"),
        "training": asdict(settings),
        "features": FEATURE_VERSION,
        "store": tracking_uri(config),
        "registers": wants_registration,
    }
    parts = (part for folder in label_folders(labels) for part in parts_of(folder, "labels"))
    return _key(parts, facts)


def head_training_key(job: TrainJob, about: Mapping[str, Any], config: Config) -> str:
    """The same of a head: `about` is what decides it, beside the responses and where it began."""
    from hvd_ray.drafting.eagle3_job import find_shards
    from hvd_ray.tracking import tracking_uri

    began = [] if job.init_head is None else sorted(job.init_head.glob("*.safetensors"))
    facts = {
        "about": about,
        "config": config.model_dump(mode="json"),
        "store": tracking_uri(config),
    }
    return _key([*find_shards(job.data), *began], facts)


def _key(files: Iterable[Path], facts: Mapping[str, Any]) -> str:
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def keep_answer(folder: Path, key: str, answer: Mapping[str, Any], *, made: str = CARD) -> None:
    """Note that what lies in `folder` is finished and registered; `made` names its chief file."""
    note = {"key": key, "card": _hash(folder / made), "answer": answer}
    with atomic_path(_place(folder)) as draft:
        draft.write_text(json.dumps(note), encoding="utf-8")


def kept_answer(folder: Path, key: str, *, made: str = CARD) -> dict[str, Any] | None:
    """What the same training has answered before; None where what it made is not there as made."""
    try:
        note = json.loads(_place(folder).read_text(encoding="utf-8"))
        is_same = note["key"] == key and note["card"] == _hash(folder / made)
        return dict(note["answer"]) if is_same else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _place(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.done")


def _hash(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
