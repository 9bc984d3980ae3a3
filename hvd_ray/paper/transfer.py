"""A predictor trained on one kind of work and tested on another: does it carry over?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvd_ray.bench.report import markdown_table
from hvd_ray.errors import UserError
from hvd_ray.home import atomic_path
from hvd_ray.pages.document import Markup, document, section, table
from hvd_ray.payoff.dataset import Labels, LabelSet, read_labels_table
from hvd_ray.payoff.features import FEATURE_NAMES, FEATURE_VERSION, SCORE_INDEX
from hvd_ray.payoff.quality import quality
from hvd_ray.payoff.training import one_thread, train_predictor
from hvd_ray.payoff.training_settings import TrainingSettings
from hvd_ray.pipelines.spread import IN_PROCESS, OnDone, Workers, nobody
from hvd_ray.traces.store import read_labels, read_traces

EVERYTHING = "all"
SCORE = "the cache's score"
"""Learns nothing: what a predictor has to beat."""


@dataclass(frozen=True, slots=True)
class TransferCell:
    """One predictor on one group's test sessions."""

    trained_on: str
    tested_on: str
    positions: int
    precision: float | None
    recall: float | None
    average_precision: float | None


@dataclass(frozen=True, slots=True)
class Kinds:
    """Labels, and what counts as a kind of work in them."""

    labels: Labels
    groups: Mapping[str, str]
    """Of each workload: its family, or the workload itself."""
    note: str = ""
    """Why it is the workload where families were to be had."""


def read_kinds(labels: Path, traces: Path | None) -> Kinds:
    """Labels with their families; with their workloads where families are unknown or all the same.

    Raises:
        UserError: there are no labels, or no traces, or fewer than two kinds of work.
    """
    table_ = read_labels(labels, feature_names=FEATURE_NAMES, feature_version=FEATURE_VERSION)
    found = read_labels_table(table_)
    families = {} if traces is None else {t.workload: t.family for t in read_traces(traces)}
    kinds = kinds_of(found, families)
    if len(kinds.groups) < 2:
        raise UserError(
            f"{labels}: one kind of work only ({', '.join(kinds.groups)}); a transfer "
            "needs two, so label traces of several workloads"
        )
    return kinds


def kinds_of(labels: Labels, families: Mapping[str, str]) -> Kinds:
    """By the family of each workload, where there is more than one; else by workload."""
    names = [str(name) for name in np.unique(labels.train.workload_N)]
    groups = {name: families.get(name) or name for name in names}
    of_all = set(groups.values())
    if len(names) < 2 or len(of_all) > 1:
        return Kinds(labels, groups)
    note = f"All traces are of one family ({of_all.pop()}), so each workload stands for itself."
    return Kinds(labels, {name: name for name in names}, note)


def transfer_table(
    labels: Labels,
    groups: Mapping[str, str],
    settings: TrainingSettings,
    *,
    workers: Workers = IN_PROCESS,
    on_done: OnDone = nobody,
) -> list[TransferCell]:
    """Train on each group's train sessions, and on all, and test each on every group.

    Args:
        labels: of several workloads.
        groups: of each workload.
        settings: of the training.
        workers: who trains; how many they are does not change the cells.
        on_done: hears of each predictor that has been judged.
    """
    train_N, test_N = (_groups_of(part, groups) for part in (labels.train, labels.test))
    names = [name for name in sorted(set(groups.values())) if (test_N == name).any()]
    learned = [name for name in names if (train_N == name).any()]
    shared = _Shared(labels, train_N, test_N, names, settings)
    rows = workers.map(_row, [*learned, EVERYTHING], shared=shared, on_done=on_done)
    score_N = labels.test.features_NF[:, SCORE_INDEX]
    return [cell for row in (*rows, _cells(SCORE, score_N, shared)) for cell in row]


class _Shared(NamedTuple):
    """What every training and every test needs."""

    labels: Labels
    train_N: NDArray[np.str_]
    """The group of each position."""
    test_N: NDArray[np.str_]
    names: list[str]
    settings: TrainingSettings


def _row(shared: _Shared, learned: str) -> list[TransferCell]:
    """Train on one group, or on all, and test on each."""
    labels = shared.labels
    mask_N = (shared.train_N == learned) | (learned == EVERYTHING)
    mine = replace(labels, train=labels.train.select(mask_N))
    with one_thread():
        predictor = train_predictor(mine, shared.settings).predictor
    estimate_N = predictor.predict(labels.test.features_NF).expected_B
    return _cells(learned, estimate_N, shared)


def transfer_json(cells: Sequence[TransferCell], about: Mapping[str, Any]) -> dict[str, Any]:
    return {"format": 1, "cells": [asdict(cell) for cell in cells], "provenance": dict(about)}


def transfer_markdown(cells: Sequence[TransferCell], note: str = "") -> str:
    """Precision / recall / average precision; trained on down, tested on across."""
    words = f"{_CAPTION} {note}".rstrip()
    return "\n\n".join(["# Transfer of the payoff predictor", words, markdown_table(*_grid(cells))])


def write_transfer_page(path: Path, cells: Sequence[TransferCell], note: str = "") -> None:
    head, body = _grid(cells)
    words = f"{_CAPTION} {note}".rstrip()
    part: Markup = section("Transfer", table(head, body), caption=words)
    with atomic_path(path) as draft:
        draft.write_text(document("Transfer of the payoff predictor", part), encoding="utf-8")


_CAPTION = (
    "Precision / recall / average precision at an accepted length of 6 or more, on the test "
    "sessions of each kind of work; rows by what the predictor learned from."
)


def _grid(cells: Sequence[TransferCell]) -> tuple[list[str], list[list[str]]]:
    rows = list(dict.fromkeys(cell.trained_on for cell in cells))
    columns = list(dict.fromkeys(cell.tested_on for cell in cells))
    found = {(cell.trained_on, cell.tested_on): cell for cell in cells}
    body = [[row, *(_words(found[row, column]) for column in columns)] for row in rows]
    return ["trained on \\ tested on", *columns], body


def _words(cell: TransferCell) -> str:
    figures = (cell.precision, cell.recall, cell.average_precision)
    return " / ".join("-" if figure is None else f"{figure:.2f}" for figure in figures)


def _groups_of(labels: LabelSet, groups: Mapping[str, str]) -> NDArray[np.str_]:
    return np.array([groups.get(str(name), "") for name in labels.workload_N], dtype=np.str_)


def _cells(trained_on: str, estimate_N: Any, shared: _Shared) -> list[TransferCell]:
    cells = []
    for name in shared.names:
        mask_N = shared.test_N == name
        accepted_N = shared.labels.test.accepted_N[mask_N]
        found = quality(estimate_N[mask_N], accepted_N, tau=shared.settings.tau)
        cells.append(
            TransferCell(
                trained_on,
                name,
                found.num_positions,
                found.precision,
                found.recall,
                found.average_precision,
            )
        )
    return cells
