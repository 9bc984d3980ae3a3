"""The predictor behind the seam that policies ask: features, then the network."""

from __future__ import annotations

from collections.abc import Sequence

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

    def survival_all(
        self, drafts_B: Sequence[Draft], contexts_B: Sequence[DecodeContext]
    ) -> list[Float32Array]:
        """`survival` of many drafts at once: one call of the network; `joint_policy`'s view."""
        if not drafts_B:
            return []
        features_BF = np.empty((len(drafts_B), NUM_FEATURES), dtype=np.float32)
        for row, (draft, context) in enumerate(zip(drafts_B, contexts_B, strict=True)):
            self._extractor.write(draft, context, features_BF[row])
        survival_BK = self._predictor.predict(features_BF).survival_BK
        assert survival_BK is not None, "ask `has_survival` first"
        return [curve_K[: len(draft)] for curve_K, draft in zip(survival_BK, drafts_B, strict=True)]

    def expected_length(self, draft: Draft, context: DecodeContext) -> float:
        """Expected accepted length, in tokens; 0 for an empty draft."""
        if not draft.token_ids:
            return 0.0
        return float(self.payoff(draft, context).expected_B[0])


class CacheOwnEstimator:
    """The cache's own probabilities taken at their word: decisions without a trained predictor."""

    has_survival = True

    def survival(self, draft: Draft, context: DecodeContext) -> Float32Array:  # noqa: ARG002
        """P(at least k tokens are accepted): how often the continuation was seen."""
        return np.asarray(draft.probs, dtype=np.float32)

    def survival_all(
        self, drafts_B: Sequence[Draft], contexts_B: Sequence[DecodeContext]
    ) -> list[Float32Array]:
        pairs = zip(drafts_B, contexts_B, strict=True)
        return [self.survival(draft, context) for draft, context in pairs]

    def expected_length(self, draft: Draft, context: DecodeContext) -> float:  # noqa: ARG002
        """Expected accepted length, in tokens."""
        return draft.score
