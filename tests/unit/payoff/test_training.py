"""Training: it learns, repeats itself, is honest on held-out sessions and refuses bad labels."""

import numpy as np
import pytest
import torch

from hvd_ray.errors import UserError
from hvd_ray.payoff.dataset import Labels, read_labels_table
from hvd_ray.payoff.features import DRAFT_LEN_INDEX, FEATURE_NAMES
from hvd_ray.payoff.predictor import KINDS, Kind
from hvd_ray.payoff.training import (
    TrainedPredictor,
    _conditional_cross_entropy,
    _Truth,
    train_predictor,
)
from hvd_ray.payoff.training_settings import TrainingSettings
from tests.unit.payoff.label_tables import label_table


@pytest.fixture(scope="module")
def labels() -> Labels:
    return read_labels_table(label_table())


@pytest.fixture(scope="module", params=KINDS)
def trained(request: pytest.FixtureRequest, labels: Labels) -> TrainedPredictor:
    settings = TrainingSettings(kind=request.param, epochs=15, hidden=(32,), learning_rate=1e-2)
    return train_predictor(labels, settings, model="toy")


def test_only_rows_with_a_draft_and_a_split_are_used(labels: Labels) -> None:
    table = label_table()
    has_draft = table.column("draft_len").to_numpy() > 0
    split = table.column("split").to_numpy()
    assert len(labels.train) == (has_draft & (split == "train")).sum()
    assert len(labels.test) == (has_draft & (split == "test")).sum()
    assert labels.num_positions == table.num_rows
    assert (labels.train.draft_len_N == labels.train.features_NF[:, DRAFT_LEN_INDEX]).all()


def test_it_learns_what_the_score_does_not_know(trained: TrainedPredictor) -> None:
    ours, score = (trained.quality_of("tools", judge) for judge in ("predictor", "score"))
    assert ours["average_precision"] > 0.95 > score["average_precision"]
    assert ours["best_f1"] > 0.85 > score["best_f1"]
    assert ours["mean_abs_error"] < 1.5 < score["mean_abs_error"]
    assert ours["num_positions"] == score["num_positions"]


def test_the_rows_cover_all_and_every_workload(trained: TrainedPredictor) -> None:
    names = [(row.workload, row.judge) for row in trained.rows]
    is_survival = trained.predictor.card.kind == "survival"
    judges = ("predictor", "chance", "score") if is_survival else ("predictor", "score")
    assert names == [(w, j) for w in ("all", "chat", "tools") for j in judges]
    sizes = {row.workload: row.quality.num_positions for row in trained.rows}
    assert sizes["all"] == sizes["chat"] + sizes["tools"]
    if is_survival:
        assert trained.quality_of("all", "chance")["calibration_error"] < 0.1


def test_the_card_tells_the_story(trained: TrainedPredictor, labels: Labels) -> None:
    card = trained.predictor.card
    assert card.model == "toy"
    assert card.training["epochs"] == 15
    assert card.training["num_train_positions"] == len(labels.train)
    assert (
        card.metrics["predictor/all"]["recall"] == trained.quality_of("all", "predictor")["recall"]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_weights(labels: Labels, kind: Kind) -> None:
    def weights(seed: int) -> np.ndarray:
        settings = TrainingSettings(kind=kind, epochs=1, hidden=(16,), seed=seed)
        return train_predictor(labels, settings).predictor.network.params

    torch.manual_seed(1)
    first = weights(7)
    before = torch.random.get_rng_state()
    assert np.array_equal(first, weights(7))
    assert torch.equal(before, torch.random.get_rng_state()), "the caller's stream is left alone"
    assert not np.array_equal(first, weights(8))


def test_a_feature_that_was_constant_in_training_has_no_say(trained: TrainedPredictor) -> None:
    """Labels are made by always verifying, so the selection rate is 1 there and less in use."""
    features_BF = label_features()
    before = trained.predictor.predict(features_BF).expected_B
    features_BF[:, FEATURE_NAMES.index("recent_selection_rate")] = 0.25
    assert np.array_equal(before, trained.predictor.predict(features_BF).expected_B)


def label_features() -> np.ndarray:
    return read_labels_table(label_table(200, seed=9)).test.features_NF.copy()


def test_features_beyond_what_training_saw_are_clipped(trained: TrainedPredictor) -> None:
    """A far outlier says no more than `CLIP` spreads do, in training and in use."""
    features_BF = label_features()
    far_BF, farther_BF = features_BF.copy(), features_BF.copy()
    index = FEATURE_NAMES.index("cache_score")
    far_BF[:, index], farther_BF[:, index] = 1e4, 1e6
    far, farther = (trained.predictor.predict(f).expected_B for f in (far_BF, farther_BF))
    assert np.array_equal(far, farther)


def test_several_members_are_kept_as_their_mean(labels: Labels) -> None:
    """One network in use, which says what the mean of all members' outputs says."""
    settings = TrainingSettings(kind="mlp", epochs=2, hidden=(8, 8), members=3)
    network = train_predictor(labels, settings).predictor.network
    assert network.widths.tolist() == [len(FEATURE_NAMES), 24, 24, 1]
    (first_IO, first_O), (middle_IO, middle_O), (last_IO, _) = network.layers
    assert (network.groups.tolist(), middle_IO.shape) == ([1, 3, 1], (8, 24))
    features_F = label_features()[0]
    x = np.clip(features_F, network.low_F, network.high_F)
    first = np.maximum(x @ first_IO + first_O, 0)
    members = [slice(i, i + 8) for i in (0, 8, 16)]
    means = [
        np.maximum(first[m] @ middle_IO[:, m] + middle_O[m], 0) @ (3 * last_IO[m, 0])
        for m in members
    ]
    whole_IO = np.zeros((24, 24), dtype=np.float32)
    for m in members:
        whole_IO[m, m] = middle_IO[:, m]
    together = np.maximum(first @ whole_IO + middle_O, 0) @ last_IO[:, 0]
    assert np.mean(means) == pytest.approx(together, rel=1e-4)


def test_losses_and_epochs_are_reported(labels: Labels) -> None:
    heard: list[tuple[int, float]] = []
    train_predictor(
        labels,
        TrainingSettings(epochs=4, hidden=(32,)),
        log_metrics=lambda figures, epoch: heard.append((epoch, figures["train_loss"])),
    )
    assert [epoch for epoch, _ in heard] == [1, 2, 3, 4]
    assert heard[-1][1] < heard[0][1]


def test_the_conditional_cross_entropy_by_hand() -> None:
    """A draft of 3 accepted up to 1: k=1 was a hit, k=2 a miss, k=3 was never tried."""
    logits_BK = torch.tensor([[0.3, -0.2, 9.0, -9.0], [1.0, 1.0, 50.0, 50.0]])
    truth = _Truth(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 2.0]))
    sigmoid = torch.sigmoid(logits_BK).double().numpy()
    first = -np.log(sigmoid[0, 0]) - np.log(1 - sigmoid[0, 1])
    second = -np.log(sigmoid[1, 0]) - np.log(sigmoid[1, 1])  # the whole draft: nothing missed
    loss = _conditional_cross_entropy(logits_BK, truth)
    assert float(loss) == pytest.approx((first + second) / 2, rel=1e-5)


def test_the_batch_shrinks_with_few_positions() -> None:
    settings = TrainingSettings()
    assert settings.batch_for(10_000_000) == 65_536
    assert settings.batch_for(64_000) == 1_000
    assert settings.batch_for(100) == 64


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"split": ["train"] * 300}, "split 'test'"),
        ({"split": [""] * 300}, "split 'train'"),
        ({"draft_len": np.zeros(300, np.int32), "accepted_len": np.zeros(300, np.int32)}, "train"),
        ({"accepted_len": np.full(300, 99, np.int32)}, "accepted_len 99"),
        ({"recent_accepted_1": np.full(300, np.nan, np.float32)}, "recent_accepted_1"),
    ],
)
def test_labels_that_cannot_teach_are_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_labels_table(label_table(300, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "forest"},
        {"epochs": 0},
        {"batch_size": 0},
        {"learning_rate": float("nan")},
        {"learning_rate": 0.0},
        {"hidden": (0,)},
        {"tau": float("nan")},
        {"tau": -1.0},
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, object]) -> None:
    (name,) = changes
    with pytest.raises(UserError, match=f"training: {name} must be"):
        TrainingSettings(**changes)  # type: ignore[arg-type]
