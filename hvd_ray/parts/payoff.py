"""The predictor behind the systems that need one: where it is found, and how it is asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_ray.config import Config
from hvd_ray.text import TextCodec

if TYPE_CHECKING:
    from hvd_ray.payoff.features import FeatureExtractor
    from hvd_ray.payoff.policy import PayoffEstimator
    from hvd_ray.payoff.predictor import MlpPredictor, PredictorCard


@dataclass(frozen=True, slots=True)
class PayoffSource:
    """A predictor that fits the target."""

    predictor: MlpPredictor
    reference: str
    """Folder, registered version or alias."""
    tokenizer_sha: str | None
    """Of the target; None where its files are not at hand."""

    def extractor(self, codec: TextCodec, *, vocab_size: int) -> FeatureExtractor:
        return feature_extractor(codec, vocab_size=vocab_size, tokenizer_sha=self.tokenizer_sha)

    def estimator(self, codec: TextCodec, *, vocab_size: int) -> PayoffEstimator:
        from hvd_ray.payoff.estimator import PredictorEstimator

        return PredictorEstimator(self.predictor, self.extractor(codec, vocab_size=vocab_size))

    @property
    def has_survival(self) -> bool:
        """Whether its predictor gives a survival curve."""
        return self.predictor.num_survival > 0

    @property
    def facts(self) -> dict[str, Any]:
        """For the provenance of a result."""
        card = self.predictor.card
        return {
            "predictor": self.reference,
            "predictor_kind": card.kind,
            "predictor_sha256": card.weights_sha256,
        }


def find_payoff(config: Config) -> PayoffSource:
    """The predictor that the configuration names, else the target's champion, else the shipped one.

    Raises:
        UserError: there is none, it is damaged, or it was trained on other features or for
            another tokenizer.
    """
    from hvd_ray.fetch import resolve_model, tokenizer_sha
    from hvd_ray.payoff.predictor import MlpPredictor
    from hvd_ray.tracking import resolve_predictor

    folder = resolve_predictor(config=config)
    model = resolve_model(config.model)
    sha = tokenizer_sha(model.path_or_id) if model.is_local else None
    predictor = MlpPredictor.load(folder, tokenizer_sha=sha)
    return PayoffSource(predictor, config.policy.predictor or _unnamed(folder, config), sha)


def find_card(config: Config) -> PredictorCard:
    """The card of the predictor that `find_payoff` would find; loads no compiled code.

    Raises:
        UserError: as `find_payoff`, but for damaged weights.
    """
    from hvd_ray.fetch import resolve_model, tokenizer_sha
    from hvd_ray.payoff.predictor import read_fitting_card
    from hvd_ray.tracking import resolve_predictor

    folder = resolve_predictor(config=config)
    model = resolve_model(config.model)
    sha = tokenizer_sha(model.path_or_id) if model.is_local else None
    return read_fitting_card(folder, tokenizer_sha=sha)


def _unnamed(folder: Path, config: Config) -> str:
    """What a predictor is called that the configuration does not name."""
    from hvd_ray.shipped import shipped_folder

    if folder == shipped_folder(config.model, "payoff"):
        return f"shipped for {config.model}"
    name, version, _ = folder.name.rsplit("-", 2)  # as the registry's download is called
    return f"champion models:/{name}/{version}"


def feature_extractor(
    codec: TextCodec, *, vocab_size: int, tokenizer_sha: str | None
) -> FeatureExtractor:
    """Features for the target's tokenizer; its table of token classes is made once."""
    from hvd_ray.payoff.features import FeatureExtractor
    from hvd_ray.payoff.token_classes import TokenClasses, cached_token_classes

    if not tokenizer_sha:
        return FeatureExtractor(TokenClasses.from_codec(codec, vocab_size))
    classes = cached_token_classes(codec, vocab_size=vocab_size, tokenizer_sha=tokenizer_sha)
    return FeatureExtractor(classes)
