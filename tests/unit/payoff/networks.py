"""Random predictors and features for the tests of this folder."""

from itertools import pairwise

import numpy as np

from hvd_ray.payoff.features import DRAFT_LEN_INDEX, NUM_FEATURES
from hvd_ray.payoff.network import Layer, Network
from hvd_ray.payoff.predictor import Kind, MlpPredictor, PredictorCard
from hvd_ray.types import Float32Array


def random_predictor(
    kind: Kind = "mlp", *, hidden: tuple[int, ...] = (256, 256), seed: int = 0
) -> MlpPredictor:
    """A predictor with random weights; survival heads know drafts of 64 tokens."""
    rng = np.random.default_rng(seed)
    widths = [NUM_FEATURES, *hidden, 1 if kind == "mlp" else 64]
    layers = []
    for num_in, num_out in pairwise(widths):
        weight_IO = rng.normal(size=(num_in, num_out)) / np.sqrt(num_in)
        bias_O = rng.normal(size=num_out)
        layers.append((weight_IO.astype(np.float32), bias_O.astype(np.float32)))
    if kind == "mlp":
        layers[-1] = _centred(layers)
    low_F = np.full(NUM_FEATURES, -1, dtype=np.float32)
    network = Network(layers, low_F=low_F, high_F=np.full(NUM_FEATURES, 64, dtype=np.float32))
    return MlpPredictor(network, PredictorCard(kind=kind, model="toy"))


def _centred(layers: list[Layer]) -> Layer:
    """The last layer, such that its outputs lie around 20 tokens, some beyond any draft."""
    x_BI = random_features(100)
    for weight_IO, bias_O in layers[:-1]:
        x_BI = np.maximum(x_BI @ weight_IO + bias_O, 0)
    outputs_B = x_BI @ layers[-1][0]
    scale = np.float32(20) / outputs_B.std()
    bias_O = np.float32(20) - scale * outputs_B.mean(axis=0)
    return scale * layers[-1][0], bias_O.astype(np.float32)


def random_features(num_rows: int, *, seed: int = 1) -> Float32Array:
    """Features in a plausible range, draft lengths among them."""
    rng = np.random.default_rng(seed)
    features_BF = rng.uniform(-2, 2, size=(num_rows, NUM_FEATURES)).astype(np.float32)
    features_BF[:, DRAFT_LEN_INDEX] = rng.integers(1, 65, size=num_rows)
    return features_BF
