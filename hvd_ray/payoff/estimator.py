"""The predictor behind the seam that policies ask: features, then the network."""

from __future__ import annotations

import numpy as np

from hvd_ray.context import DecodeContext
from hvd_ray.payoff.features import NUM_FEATURES, FeatureExtractor
from hvd_ray.payoff.predictor import Payoff, PayoffPredictor
from hvd_ray.types import Draft, Float32Array


class PredictorEstimator:
    """`policy.PayoffEstimator` by features and a trained predictor; for one thread at a time."""

    def __init__(self, predictor: PayoffPredictor, extractor: FeatureExtractor) -> None:
        self._predictor = predictor
        self._extractor = extractor
        self._features_1F = np.zeros((1, NUM_FEATURES), dtype=np.float32)

    def payoff(self, draft: Draft, context: DecodeContext) -> Payoff:
        """What is expected of a draft at the context's position."""
        self._extractor.write(draft, context, self._features_1F[0])
        return self._predictor.predict(self._features_1F)

    @property
    def has_survival(self) -> bool:
        """Whether the predictor gives a survival curve."""
        return self._predictor.num_survival > 0

    def survival(self, draft: Draft, context: DecodeContext) -> Float32Array:
        """P(at least k tokens are accepted), k = 1..draft length; `cost_policy`'s view."""
        survival_BK = self.payoff(draft, context).survival_BK
        assert survival_BK is not None, "ask `has_survival` first"
        curve_K: Float32Array = survival_BK[0, : len(draft)]
        return curve_K

    def expected_length(self, draft: Draft, context: DecodeContext) -> float:
        """Expected accepted length, in tokens; 0 for an empty draft."""
        if not draft.token_ids:
            return 0.0
        return float(self.payoff(draft, context).expected_B[0])
