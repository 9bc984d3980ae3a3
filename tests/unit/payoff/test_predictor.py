"""The predictor: its arithmetic against torch, its bounds, its files and what it refuses."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from hvd_ray.context import DecodeContext
from hvd_ray.errors import UserError
from hvd_ray.payoff.estimator import PredictorEstimator
from hvd_ray.payoff.features import DRAFT_LEN_INDEX, FEATURE_NAMES, NUM_FEATURES, FeatureExtractor
from hvd_ray.payoff.network import Network, folded
from hvd_ray.payoff.predictor import CARD_FILE, KINDS, WEIGHTS_FILE, Kind, MlpPredictor
from hvd_ray.payoff.token_classes import TokenClasses
from hvd_ray.types import NO_DRAFT, Draft, Float32Array, Source, TokenBuffer
from tests.unit.payoff.networks import random_features, random_predictor

ROOT = Path(__file__).parents[3]


def torch_outputs(network: Network, features_BF: Float32Array) -> torch.Tensor:
    low_F, high_F = torch.from_numpy(network.low_F), torch.from_numpy(network.high_F)
    x_BI = torch.from_numpy(features_BF).clamp(low_F, high_F)
    for index, (weight_IO, bias_O) in enumerate(network.layers):
        x_BI = x_BI @ torch.from_numpy(weight_IO) + torch.from_numpy(bias_O)
        if index < len(network.layers) - 1:
            x_BI = x_BI.relu()
    return x_BI


HIDDEN = [(256, 256), (31,), (), (64, 17, 5)]


@pytest.mark.parametrize("hidden", HIDDEN)
def test_mlp_agrees_with_torch(hidden: tuple[int, ...]) -> None:
    predictor, features_BF = random_predictor(hidden=hidden), random_features(67)
    raw_B = torch_outputs(predictor.network, features_BF)[:, 0].numpy()
    expected_B = raw_B.clip(0, features_BF[:, DRAFT_LEN_INDEX])
    assert 0 < (expected_B == raw_B).mean() < 1, "both sides of the bound are tried"
    found = predictor.predict(features_BF)
    np.testing.assert_allclose(found.expected_B, expected_B, rtol=1e-5, atol=1e-5)
    assert found.survival_BK is None


@pytest.mark.parametrize("hidden", HIDDEN)
def test_survival_agrees_with_torch(hidden: tuple[int, ...]) -> None:
    predictor, features_BF = random_predictor("survival", hidden=hidden), random_features(67)
    logits_BK = torch_outputs(predictor.network, features_BF)
    survival_BK = torch.cumprod(torch.sigmoid(logits_BK), dim=1).numpy()
    beyond = np.arange(1, 65) > features_BF[:, DRAFT_LEN_INDEX, None]
    survival_BK[beyond] = 0
    found = predictor.predict(features_BF)
    assert found.survival_BK is not None
    np.testing.assert_allclose(found.survival_BK, survival_BK, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.expected_B, survival_BK.sum(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_groups", [2, 3])
def test_groups_say_what_zeros_between_them_would(kind: Kind, num_groups: int) -> None:
    predictor = random_predictor(kind, hidden=(12, 24, 18), seed=4)
    layers = list(predictor.network.layers)
    for index in (1, 2):
        blocks = np.split(layers[index][0], num_groups, axis=0)
        parts = [np.split(b, num_groups, axis=1)[g] for g, b in enumerate(blocks)]
        layers[index] = (np.concatenate(parts, axis=1), layers[index][1])
    bounds = {"low_F": predictor.network.low_F, "high_F": predictor.network.high_F}
    grouped = MlpPredictor(Network(layers, **bounds), predictor.card)
    for index in (1, 2):
        whole_IO = np.zeros_like(predictor.network.layers[index][0])
        num_in, num_out = (n // num_groups for n in whole_IO.shape)
        for g in range(num_groups):
            columns = slice(g * num_out, (g + 1) * num_out)
            whole_IO[g * num_in : (g + 1) * num_in, columns] = layers[index][0][:, columns]
        layers[index] = (whole_IO, layers[index][1])
    whole = MlpPredictor(Network(layers, **bounds), predictor.card)
    assert grouped.network.groups.tolist() == [1, num_groups, num_groups, 1]
    for num_rows in (1, 4, 7):
        features_BF = random_features(num_rows)
        found, expected = grouped.predict(features_BF), whole.predict(features_BF)
        np.testing.assert_allclose(found.expected_B, expected.expected_B, rtol=1e-6)


def test_survival_never_rises() -> None:
    found = random_predictor("survival").predict(random_features(200, seed=3))
    assert found.survival_BK is not None
    assert (np.diff(found.survival_BK, axis=1) <= 0).all()
    assert (found.survival_BK <= 1).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 7, 64])
def test_a_row_does_not_depend_on_its_neighbours_to_the_bit(kind: Kind, num_rows: int) -> None:
    """Replay asks in batches, live decoding row by row; both must decide alike."""
    predictor, features_BF = random_predictor(kind), random_features(70)
    alone_B = [predictor.predict(features_BF[i : i + 1]).expected_B[0] for i in range(70)]
    for start in (0, 3, 6):
        rows = slice(start, start + num_rows)
        assert predictor.predict(features_BF[rows]).expected_B.tolist() == alone_B[rows]


def test_no_rows_and_rows_apart_in_memory() -> None:
    predictor, features_BF = random_predictor(), random_features(9)
    assert len(predictor.predict(features_BF[:0]).expected_B) == 0
    apart = np.repeat(features_BF, 2, axis=1)[:, ::2]
    expected_B = predictor.predict(features_BF).expected_B
    assert np.array_equal(predictor.predict(apart).expected_B, expected_B)


def test_standardisation_folds_into_the_first_layer() -> None:
    rng = np.random.default_rng(5)
    weight_IO, bias_O = rng.normal(size=(6, 4)), rng.normal(size=4)
    mean_F, scale_F = rng.normal(size=6), rng.uniform(0.5, 2, size=6)
    raw_weight_IO, raw_bias_O = folded(weight_IO, bias_O, mean_F=mean_F, scale_F=scale_F)
    features_BF = rng.normal(size=(10, 6))
    standardised = ((features_BF - mean_F) / scale_F) @ weight_IO + bias_O
    np.testing.assert_allclose(features_BF @ raw_weight_IO + raw_bias_O, standardised, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_save_and_load(tmp_path: Path, kind: Kind) -> None:
    predictor, features_BF = random_predictor(kind), random_features(8)
    predictor.save(tmp_path / "p")
    loaded = MlpPredictor.load(tmp_path / "p")
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == [CARD_FILE, WEIGHTS_FILE]
    before, after = predictor.predict(features_BF), loaded.predict(features_BF)
    assert np.array_equal(before.expected_B, after.expected_B)
    assert loaded.card.kind == kind
    assert loaded.card.model == "toy"


def test_saving_again_replaces(tmp_path: Path) -> None:
    random_predictor(seed=1).save(tmp_path / "p")
    random_predictor(seed=2).save(tmp_path / "p")
    loaded = MlpPredictor.load(tmp_path / "p")
    assert np.array_equal(loaded.network.params, random_predictor(seed=2).network.params)


def test_saving_removes_nothing_but_a_predictor(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match=r"holds 'thesis\.tex'"):
        random_predictor().save(tmp_path)
    with pytest.raises(UserError, match="is a file"):
        random_predictor().save(tmp_path / "thesis.tex")
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def edit_card(folder: Path, **changes: Any) -> None:
    card = json.loads((folder / CARD_FILE).read_text())
    (folder / CARD_FILE).write_text(json.dumps(card | changes))


def edit_weights(folder: Path, **changes: Any) -> None:
    import hashlib

    tensors = {**load_file(folder / WEIGHTS_FILE), **changes}
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, folder / WEIGHTS_FILE)
    weights = (folder / WEIGHTS_FILE).read_bytes()
    edit_card(folder, weights_sha256=hashlib.sha256(weights).hexdigest())


def names_with(index: int, name: str) -> list[str]:
    names = list(FEATURE_NAMES)
    names[index] = name
    return names


NAN_BIAS = np.full(1, np.nan, dtype=np.float32)
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no card": (lambda p: (p / CARD_FILE).unlink(), "holds no payoff predictor"),
    "no weights": (lambda p: (p / WEIGHTS_FILE).unlink(), "cannot be read"),
    "half a card": (lambda p: (p / CARD_FILE).write_text('{"kind": "ml'), "cannot be read"),
    "binary card": (lambda p: (p / CARD_FILE).write_bytes(b"\xff\xfe\x00"), "cannot be read"),
    "a list": (lambda p: (p / CARD_FILE).write_text("[1]"), "format version None"),
    "future format": (lambda p: edit_card(p, format_version=9), "format version 9"),
    "unknown kind": (lambda p: edit_card(p, kind="forest"), "kind"),
    "unknown key": (lambda p: edit_card(p, colour="red"), "colour"),
    "half the weights": (
        lambda p: (p / WEIGHTS_FILE).write_bytes((p / WEIGHTS_FILE).read_bytes()[:500]),
        "damaged",
    ),
    "other name": (
        lambda p: edit_card(p, feature_names=names_with(3, "moon_phase")),
        "trained on other features: feature 3 is 'moon_phase', expected 'cache_log_match_len'",
    ),
    "fewer names": (
        lambda p: edit_card(p, feature_names=FEATURE_NAMES[:9]),
        f"trained on other features: 9 features, expected {NUM_FEATURES}",
    ),
    "other version": (
        lambda p: edit_card(p, feature_version=99),
        "trained on other features: feature version 99, expected",
    ),
    "not finite": (lambda p: edit_weights(p, **{"layers.2.bias_O": NAN_BIAS}), "not finite"),
    "overflowing": (
        lambda p: edit_weights(
            p, **{"layers.1.weight_IO": load_file(p / WEIGHTS_FILE)["layers.1.weight_IO"] * 1e37}
        ),
        "layer 1 has weights so large that its sums overflow",
    ),
    "wrong shape": (
        lambda p: edit_weights(p, **{"layers.1.bias_O": np.zeros(7, np.float32)}),
        "shape",
    ),
    "not a matrix": (
        lambda p: edit_weights(p, **{"layers.1.weight_IO": np.zeros(7, np.float32)}),
        "shape",
    ),
    "other type": (
        lambda p: edit_weights(p, **{"layers.2.bias_O": np.zeros(1, np.float64)}),
        "float64",
    ),
    "missing tensor": (lambda p: edit_weights(p, **{"layers.1.bias_O": None}), "layers.1.bias_O"),
    "no layers": (
        lambda p: edit_weights(
            p, **{f"layers.{i}.{x}": None for i in range(3) for x in ("weight_IO", "bias_O")}
        ),
        "layers.0.weight_IO",
    ),
    "unknown tensor": (lambda p: edit_weights(p, extra=NAN_BIAS), "extra"),
    "fewer features": (
        lambda p: edit_weights(p, low_F=np.zeros(3, np.float32), high_F=np.zeros(3, np.float32)),
        "shape",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_foreign_predictor_is_refused_in_one_line(tmp_path: Path, damage: str) -> None:
    spoil, says = DAMAGES[damage]
    random_predictor().save(tmp_path / "p")
    spoil(tmp_path / "p")
    with pytest.raises(UserError, match=None) as refusal:
        MlpPredictor.load(tmp_path / "p")
    message = str(refusal.value)
    assert says in message
    assert str(tmp_path / "p") in message
    assert "hvd train" in message
    assert "\n" not in message


def test_a_head_of_the_wrong_kind_is_refused(tmp_path: Path) -> None:
    random_predictor("survival").save(tmp_path / "p")
    edit_card(tmp_path / "p", kind="mlp")
    with pytest.raises(UserError, match="kind mlp has one output, got 64"):
        MlpPredictor.load(tmp_path / "p")


def test_a_folder_that_is_absent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no payoff predictor"):
        MlpPredictor.load(tmp_path / "nowhere")


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    predictor = random_predictor()
    predictor.card = predictor.card.model_copy(update={"tokenizer_sha": "aa"})
    predictor.save(tmp_path / "p")
    assert MlpPredictor.load(tmp_path / "p", tokenizer_sha="aa").card.tokenizer_sha == "aa"
    with pytest.raises(UserError, match="another tokenizer"):
        MlpPredictor.load(tmp_path / "p", tokenizer_sha="bb")


def test_the_estimator_asks_the_predictor_about_the_draft() -> None:
    extractor = FeatureExtractor(TokenClasses.from_texts(["a", "b"]))
    predictor = random_predictor()
    estimator = PredictorEstimator(predictor, extractor)
    draft = Draft(Source.SUFFIX, (0, 1, 1), (1.0, 0.5, 0.5), 2.0, 3)
    context = DecodeContext(TokenBuffer([0, 1, 0]), 2, 100, 64)
    expected = predictor.predict(extractor.extract(draft, context)[None]).expected_B[0]
    assert estimator.expected_length(draft, context) == expected
    assert estimator.expected_length(NO_DRAFT, context) == 0.0


READY = """
from hvd_ray.context import DecodeContext
from hvd_ray.payoff.estimator import PredictorEstimator
from hvd_ray.payoff.feature_kernel import write_features
from hvd_ray.payoff.features import FeatureExtractor
from hvd_ray.payoff.network_kernel import judge
from hvd_ray.payoff.token_classes import TokenClasses
from hvd_ray.types import Draft, Source, TokenBuffer
from tests.unit.payoff.networks import random_predictor

estimator = PredictorEstimator(
    random_predictor("KIND"), FeatureExtractor(TokenClasses.from_texts(["a", "b"]))
)
before = len(write_features.signatures), len(judge.signatures)
draft = Draft(Source.SUFFIX, (0, 1, 1), (1.0, 0.5, 0.5), 2, 3, False)
estimator.expected_length(draft, DecodeContext(TokenBuffer([0, 1, 0]), 2, 100, 64))
assert before == (1, 1) == (len(write_features.signatures), len(judge.signatures))
"""


@pytest.mark.parametrize("kind", KINDS)
def test_everything_is_compiled_before_the_first_decision(kind: Kind) -> None:
    subprocess.run([sys.executable, "-c", READY.replace("KIND", kind)], check=True, cwd=ROOT)


@pytest.mark.parametrize(("num_rows", "allowed_us"), [(1, 60), (64, 300)])
@pytest.mark.parametrize("kind", KINDS)
def test_inference_is_fast(kind: Kind, num_rows: int, allowed_us: float) -> None:
    """Five times the allowance: the test machine is shared, the bench measures exactly."""
    predictor, features_BF = random_predictor(kind), random_features(num_rows)
    predictor.predict(features_BF)
    times_us = []
    for _ in range(200):
        started = time.perf_counter()
        predictor.predict(features_BF)
        times_us.append((time.perf_counter() - started) * 1e6)
    assert np.median(times_us) < 5 * allowed_us
