"""The labelled positions that a predictor learns from and is judged by.

Only positions with a cache draft count: where there is none, there is nothing to decide. Train and
test are told apart by the `split` column, which goes by session. Shapes: N positions, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_ray.errors import UserError
from hvd_ray.payoff.features import FEATURE_NAMES, NUM_FEATURES
from hvd_ray.types import Float32Array, Int32Array

TRAIN = "train"
TEST = "test"


@dataclass(frozen=True, slots=True, eq=False)
class LabelSet:
    """Positions with a non-empty cache draft, in the order of the table."""

    features_NF: Float32Array
    draft_len_N: Int32Array
    accepted_N: Int32Array
    workload_N: NDArray[np.str_]
    is_visited_N: NDArray[np.bool_]
    """Positions at which decoding that verifies every cache draft stops."""

    def __len__(self) -> int:
        return len(self.accepted_N)

    def select(self, mask_N: NDArray[np.bool_]) -> LabelSet:
        """The positions where `mask_N` holds."""
        return LabelSet(
            self.features_NF[mask_N],
            self.draft_len_N[mask_N],
            self.accepted_N[mask_N],
            self.workload_N[mask_N],
            self.is_visited_N[mask_N],
        )

    def without(self, columns: Sequence[int]) -> LabelSet:
        """These positions with features that are constant in some columns.

        A predictor clips features to the range that training saw, so whatever it is asked later,
        it reads the same constant there.
        """
        if not columns:
            return self
        features_NF = np.array(self.features_NF)
        features_NF[:, list(columns)] = 0.0
        return replace(self, features_NF=features_NF)


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """A label table, split by session."""

    train: LabelSet
    test: LabelSet
    num_positions: int
    """All rows of the table, those without a draft or without a split among them."""
    num_unsplit: int
    """Rows of no split; they are not used."""


def read_labels_table(table: Any) -> Labels:
    """Split the rows of a pyarrow label table (`traces.schema.labels_schema`).

    Raises:
        UserError: no position with a draft to learn from, or none to be judged by.
    """
    split_N = table.column("split").to_numpy()
    draft_len_N = table.column("draft_len").to_numpy().astype(np.int32)
    has_draft_N = draft_len_N > 0
    usable = _label_set(table, draft_len_N).select
    train, test = usable(has_draft_N & (split_N == TRAIN)), usable(has_draft_N & (split_N == TEST))
    for name, part in ((TRAIN, train), (TEST, test)):
        if len(part) == 0:
            raise UserError(
                f"labels: no position with a cache draft in split {name!r}"
                f" ({table.num_rows} rows in all); collect more sessions and label them again"
            )
    is_unsplit_N = (split_N != TRAIN) & (split_N != TEST)
    return Labels(train, test, int(table.num_rows), int(is_unsplit_N.sum()))


def label_set(table: Any, *, split: str) -> LabelSet:
    """The positions of one split that have a draft; there may be none."""
    split_N = table.column("split").to_numpy()
    draft_len_N = table.column("draft_len").to_numpy().astype(np.int32)
    return _label_set(table, draft_len_N).select((draft_len_N > 0) & (split_N == split))


def _label_set(table: Any, draft_len_N: Int32Array) -> LabelSet:
    features_NF = np.empty((table.num_rows, NUM_FEATURES), dtype=np.float32)
    for index, name in enumerate(FEATURE_NAMES):
        features_NF[:, index] = table.column(name).to_numpy()
    accepted_N = table.column("accepted_len").to_numpy().astype(np.int32)
    _require_sound(features_NF, draft_len_N, accepted_N)
    workload_N = np.asarray(table.column("workload").to_pylist(), dtype=np.str_)
    is_visited_N = table.column("is_visited").to_numpy(zero_copy_only=False).astype(np.bool_)
    return LabelSet(features_NF, draft_len_N, accepted_N, workload_N, is_visited_N)


def _require_sound(
    features_NF: Float32Array, draft_len_N: Int32Array, accepted_N: Int32Array
) -> None:
    bad_rows = np.flatnonzero(~np.isfinite(features_NF).all(axis=1))
    if len(bad_rows):
        name = FEATURE_NAMES[int(np.flatnonzero(~np.isfinite(features_NF[bad_rows[0]]))[0])]
        raise UserError(f"labels: row {bad_rows[0]}: the feature {name} is not finite")
    odd_rows = np.flatnonzero((accepted_N < 0) | (accepted_N > draft_len_N))
    if len(odd_rows):
        row = int(odd_rows[0])
        raise UserError(
            f"labels: row {row}: accepted_len {accepted_N[row]} of a draft of {draft_len_N[row]}"
        )
