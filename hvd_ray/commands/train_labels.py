"""The labels that `hvd train` is given: one folder of `hvd traces label`, or a folder of such."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_ray.errors import UserError

if TYPE_CHECKING:
    from hvd_ray.payoff.dataset import Labels

_SAME = ("model", "tokenizer_sha", "suffix")
"""What labels must have in common, where they say it, to teach one predictor."""


def label_folders(labels: Path) -> list[Path]:
    """The folder itself or, where it holds folders that were labelled each for itself, those.

    Raises:
        UserError: there is no such folder.
    """
    from hvd_ray.pipelines.output import read_manifest

    if not labels.exists():
        raise UserError(f"{labels}: no such folder; make labels with `hvd traces label TRACES_DIR`")
    if labels.is_file() or (labels / "labels").is_dir():
        return [labels]
    inside = [path for path in sorted(labels.iterdir()) if read_manifest(path) is not None]
    return inside or [labels]


def read_labels_dir(labels: Path) -> Labels:
    """All labels there, split by session.

    Raises:
        UserError: there are none, or they are of other features.
    """
    import pyarrow as pa

    from hvd_ray.payoff.dataset import read_labels_table
    from hvd_ray.payoff.features import FEATURE_NAMES, FEATURE_VERSION
    from hvd_ray.traces.store import read_labels

    tables = []
    for folder in label_folders(labels):
        table = read_labels(folder, feature_names=FEATURE_NAMES, feature_version=FEATURE_VERSION)
        _refuse_gaps(folder, len(table))
        tables.append(table)
    return read_labels_table(pa.concat_tables(tables))


def noted(labels: Path) -> Mapping[str, Any]:
    """What the labelling wrote down of the model and its tokenizer; empty without a note.

    Raises:
        UserError: folders were labelled for different models or caches.
    """
    notes: dict[str, Any] = {}
    for folder in label_folders(labels):
        theirs = _note(folder)
        for key in _SAME:
            if key in notes and theirs.get(key) not in (None, notes[key]):
                raise UserError(
                    f"{folder}: labelled with {key} {theirs[key]!r}, and others in {labels} with "
                    f"{notes[key]!r}; train on labels of one kind"
                )
        notes = {**theirs, **notes}
    return notes


def _note(folder: Path) -> dict[str, Any]:
    from hvd_ray.pipelines.output import read_manifest

    manifest = read_manifest(folder) or {}
    if manifest.get("complete") is False:
        raise UserError(
            f"{folder}: its labelling is not finished; type the same `hvd traces label` again"
        )
    return {**manifest.get("settings", {}), **{k: v for k, v in manifest.items() if k == "model"}}


def _refuse_gaps(folder: Path, num_rows: int) -> None:
    """Shards that were lost after the labelling would be missed by nobody."""
    from hvd_ray.pipelines.output import read_manifest

    wanted = ((read_manifest(folder) or {}).get("result") or {}).get("positions", num_rows)
    if num_rows != wanted:
        raise UserError(
            f"{folder}: holds {num_rows:,} of the {wanted:,} positions that were labelled; "
            "label the traces again into another folder"
        )
