"""A group that matters is missed, one that says nothing is not."""

import pytest

from hvd_ray.config import Config
from hvd_ray.payoff.cost import RowCosts
from hvd_ray.payoff.dataset import TEST, read_labels_table
from hvd_ray.payoff.features import FEATURE_GROUPS, NUM_FEATURES
from hvd_ray.payoff.training_settings import TrainingSettings
from hvd_ray.tuning.ablation import AblationRow, ReplayJudge, ablate
from hvd_ray.tuning.data import label_table as read_table
from hvd_ray.tuning.data import open_material
from tests.unit.payoff.label_tables import label_table
from tests.unit.tuning.conftest import Data


def test_the_groups_that_the_payoff_follows_are_missed_and_no_others() -> None:
    heard: list[AblationRow] = []
    settings = TrainingSettings(kind="survival", epochs=6, hidden=(16,), learning_rate=0.01)
    rows = ablate(read_labels_table(label_table()), settings, on_row=heard.append)
    assert [row.without for row in rows] == ["nothing", *FEATURE_GROUPS]
    assert heard == rows
    whole = rows[0]
    assert (whole.num_features, whole.speed) == (NUM_FEATURES, None)
    lost = {row.without: whole.average_precision - row.average_precision for row in rows[1:]}
    assert lost["support"] == lost["place"] == 0  # constant in these labels
    assert lost["recent_history"] > 0
    assert lost["decode_state"] > 0
    missing = [NUM_FEATURES - row.num_features for row in rows[1:]]
    assert missing == [len(names) for names in FEATURE_GROUPS.values()]


@pytest.mark.parametrize("kind", ["mlp", "survival"])
def test_with_traces_every_row_has_a_replayed_speed(data: Data, kind: str) -> None:
    material = open_material(data.labels, data.traces, Config())
    test = material.replay_set(material.shards(), lambda trace: trace.split == TEST)
    judge = ReplayJudge(test, data.classes, RowCosts((1, 8, 64), (40.0, 44.0, 90.0)))
    settings = TrainingSettings(kind=kind, epochs=1, hidden=(4,))  # type: ignore[arg-type]
    rows = ablate(read_labels_table(read_table(data.labels)), settings, judge=judge)
    assert all(row.speed is not None and row.speed > 20 for row in rows)
