"""Predictors trained on one kind of work and tested on the others."""

import numpy as np
import pytest

from hvd_ray.errors import UserError
from hvd_ray.paper.transfer import (
    EVERYTHING,
    SCORE,
    kinds_of,
    read_kinds,
    transfer_json,
    transfer_markdown,
    transfer_table,
)
from hvd_ray.payoff.dataset import Labels, LabelSet
from hvd_ray.payoff.features import DRAFT_LEN_INDEX, NUM_FEATURES, SCORE_INDEX
from hvd_ray.payoff.training_settings import TrainingSettings
from tests.unit.tuning.test_pieces import Many


def label_set(seed: int) -> LabelSet:
    """Accepted length is the score; in `b` what the score leaves of twelve."""
    rng = np.random.default_rng(seed)
    features = rng.uniform(0, 12, size=(800, NUM_FEATURES)).astype(np.float32)
    features[:, DRAFT_LEN_INDEX] = 20
    workload = np.array(["a"] * 400 + ["b"] * 400)
    score = features[:, SCORE_INDEX]
    accepted = np.where(workload == "a", score, 12 - score).astype(np.int32)
    return LabelSet(features, np.full(800, 20, np.int32), accepted, workload, np.ones(800, bool))


@pytest.fixture(scope="module")
def cells():
    labels = Labels(label_set(1), label_set(2), 1600, 0)
    settings = TrainingSettings(kind="mlp", epochs=60, learning_rate=5e-3, tau=6.0)
    return transfer_table(labels, {"a": "family a", "b": "family b"}, settings)


def test_what_was_learned_holds_at_home_and_not_abroad(cells):
    found = {(c.trained_on, c.tested_on): c.average_precision for c in cells}
    assert found["family a", "family a"] > 0.9 > found["family a", "family b"]
    assert found["family b", "family b"] > 0.9 > found["family b", "family a"]
    assert found[SCORE, "family a"] > 0.9 > found[SCORE, "family b"]
    assert (EVERYTHING, "family a") in found


def test_the_table_says_everything_once(cells):
    text = transfer_markdown(cells)
    assert text.count("family a") == 2
    assert len(transfer_json(cells, {})["cells"]) == 4 * 2


def test_workers_find_the_same():
    labels = Labels(label_set(1), label_set(2), 1600, 0)
    settings = TrainingSettings(kind="survival", epochs=2, hidden=(8,))
    groups = {"a": "a", "b": "b"}
    alone = transfer_table(labels, groups, settings)
    assert transfer_table(labels, groups, settings, workers=Many(3)) == alone


def test_one_kind_of_work_is_no_transfer(tmp_path):
    with pytest.raises(UserError, match="labels"):
        read_kinds(tmp_path, None)


def test_where_all_are_of_one_family_workloads_stand_for_themselves(cells):
    labels = Labels(label_set(1), label_set(2), 1600, 0)
    same = kinds_of(labels, {"a": "other", "b": "other"})
    assert same.groups == {"a": "a", "b": "b"}
    assert "one family (other)" in same.note
    assert same.note in transfer_markdown(cells, same.note)
    apart = kinds_of(labels, {"a": "code", "b": "other"})
    assert (apart.groups, apart.note) == ({"a": "code", "b": "other"}, "")
    assert kinds_of(labels, {}).note == ""
