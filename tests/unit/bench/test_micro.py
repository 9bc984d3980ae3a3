"""The micro figures: what is timed, on which contexts, and that the parts add up."""

import numpy as np
import pytest

from hvd_ray.bench.micro import BATCH_SIZES, DEFINITIONS, micro_figures, untrained_predictor
from hvd_ray.config import Config
from hvd_ray.payoff.features import NUM_FEATURES, FeatureExtractor
from hvd_ray.payoff.predictor import Payoff
from hvd_ray.payoff.token_classes import TokenClasses

VOCAB = 50


@pytest.fixture(scope="module")
def extractor():
    return FeatureExtractor(TokenClasses.from_texts([chr(97 + i % 26) for i in range(VOCAB)]))


@pytest.fixture(scope="module")
def texts():
    """Ten words in any order, so that the cache has something to draft, and one short text."""
    rng = np.random.default_rng(0)
    words = [tuple(rng.integers(0, VOCAB, 6).tolist()) for _ in range(10)]
    long = [[t for i in rng.integers(0, 10, 20) for t in words[i]] for _ in range(70)]
    return [*long, [1, 2, 3]]


class SlowPredictor:
    """Takes a known time, so that the figures can be checked against it."""

    num_survival = 0

    def __init__(self, seconds=0.0):
        self.num_calls = 0
        self.seconds = seconds

    def predict(self, features_BF):
        from time import sleep

        self.num_calls += 1
        sleep(self.seconds)
        return Payoff(np.zeros(len(features_BF), dtype=np.float32))


def _figures(texts, extractor, predictor, num_decisions=100):
    return micro_figures(
        texts,
        predictor=predictor,
        extractor=extractor,
        config=Config(),
        num_decisions=num_decisions,
    )


def test_every_promised_figure_is_there_and_positive(texts, extractor):
    figures = _figures(texts, extractor, untrained_predictor())
    assert set(DEFINITIONS) <= set(figures)
    assert set(figures["decision_us"]) == {str(size) for size in BATCH_SIZES}
    flat = [v for f in figures.values() for v in (f.values() if isinstance(f, dict) else [f])]
    assert all(value > 0 for value in flat)


def test_a_slow_predictor_shows_in_the_decision_and_nowhere_else(texts, extractor):
    figures = _figures(texts, extractor, SlowPredictor(0.0005), num_decisions=60)
    assert figures["predictor_us"] > 500
    assert figures["decision_us"]["1"] > 500
    assert figures["decision_us"]["64"] > 10 * 500
    assert figures["lookup_us"] < 500
    assert figures["features_us"] < 500


def test_the_predictor_is_asked_for_the_drafts_found(texts, extractor):
    predictor = SlowPredictor()
    _figures(texts, extractor, predictor, num_decisions=300)
    assert predictor.num_calls > 300, "the cache found hardly anything to judge"


def test_the_contexts_are_walked_the_same_way_each_time(texts, extractor):
    one, two = SlowPredictor(), SlowPredictor()
    _figures(texts, extractor, one)
    _figures(texts, extractor, two)
    assert one.num_calls == two.num_calls


def test_the_stand_in_predictor_has_the_usual_shape():
    predictor = untrained_predictor()
    assert predictor.network.widths.tolist() == [NUM_FEATURES, 256, 256, 1]
    assert np.isfinite(predictor.predict(np.zeros((3, NUM_FEATURES), np.float32)).expected_B).all()
