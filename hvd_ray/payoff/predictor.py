"""The payoff predictor: how many tokens of a cache draft will the target accept?

Two heads over the same small network: `mlp`, the paper's (2606.01019: the expected accepted length
as one number), and `survival`, the chance that at least k tokens are accepted for every k, from
which the expected length of the draft cut at any k follows. Training lives in `training.py`; this
module needs neither torch nor a tracking server.

On disk a predictor is a folder with `weights.safetensors` and `predictor.json`.
Shapes: B batch, F features, K the longest draft a survival head knows.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from hvd_ray.errors import UserError
from hvd_ray.home import atomic_dir
from hvd_ray.payoff.features import DRAFT_LEN_INDEX, FEATURE_NAMES, FEATURE_VERSION, NUM_FEATURES
from hvd_ray.payoff.network import Network
from hvd_ray.types import Float32Array
from hvd_ray.versioned_json import read_versioned

FORMAT_VERSION = 1
CARD_FILE = "predictor.json"
WEIGHTS_FILE = "weights.safetensors"
TRAIN_AGAIN = "train again with `hvd train LABELS_DIR`"

Kind = Literal["mlp", "survival"]
KINDS: tuple[Kind, ...] = ("mlp", "survival")


@dataclass(frozen=True, slots=True, eq=False)
class Payoff:
    """What a predictor says of B drafts."""

    expected_B: Float32Array
    """Expected accepted length, in tokens, within [0, draft length]."""
    survival_BK: Float32Array | None = None
    """P(accepted >= k) for k = 1..K, 0 beyond the draft's length; None from a head without it."""


class PayoffPredictor(Protocol):
    """Judges drafts by their features; a pure function."""

    @property
    def num_survival(self) -> int:
        """K of the survival curve; 0 for a predictor without one."""
        ...

    def predict(self, features_BF: Float32Array) -> Payoff:
        """Judge B drafts. `features_BF` is float32 [B, F], in the order of `FEATURE_NAMES`."""
        ...

    def save(self, folder: Path) -> None:
        """Write the predictor to `folder`, whole or not at all, replacing one that is there."""
        ...


class PredictorCard(BaseModel):
    """`predictor.json`: what the weights are for and where they come from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int = FORMAT_VERSION
    kind: Kind
    feature_version: int = FEATURE_VERSION
    feature_names: tuple[str, ...] = FEATURE_NAMES
    weights_sha256: str = ""
    """Ties the card to its weights file; filled in by `save`."""
    model: str = ""
    """The target whose traces it learnt from."""
    tokenizer_sha: str | None = None
    training: dict[str, Any] = {}
    """Settings and provenance of the training run."""
    metrics: dict[str, Any] = {}
    """Quality on held-out sessions."""


class MlpPredictor:
    """A network and its card; the card's `kind` says how to read the outputs.

    Raises:
        UserError: the network's inputs or outputs do not fit the features or the kind.
    """

    def __init__(self, network: Network, card: PredictorCard) -> None:
        from hvd_ray.payoff.network_kernel import judge

        if len(network.low_F) != NUM_FEATURES:
            raise UserError(f"takes {len(network.low_F)} features, expected {NUM_FEATURES}")
        if card.kind == "mlp" and network.num_outputs != 1:
            raise UserError(f"kind mlp has one output, got {network.num_outputs}")
        self.network = network
        self.card = card
        self.num_survival = network.num_outputs if card.kind == "survival" else 0
        """K of the survival curve; 0 for a head without one."""
        self._judge = judge
        self.predict(np.zeros((1, NUM_FEATURES), dtype=np.float32))  # compile now, not in use

    def __reduce__(self) -> tuple[type[MlpPredictor], tuple[Network, PredictorCard]]:
        """Made anew where it arrives: compiled code stays with the process."""
        return MlpPredictor, (self.network, self.card)

    def predict(self, features_BF: Float32Array) -> Payoff:
        assert features_BF.shape[1:] == (NUM_FEATURES,), "features of another version"
        num_rows = len(features_BF)
        expected_B = np.empty(num_rows, dtype=np.float32)
        survival_BK = np.empty((num_rows, self.num_survival), dtype=np.float32)
        self._judge(
            np.ascontiguousarray(features_BF, dtype=np.float32),
            self.network.low_F,
            self.network.high_F,
            self.network.params,
            self.network.widths,
            self.network.groups,
            DRAFT_LEN_INDEX,
            survival_BK,
            expected_B,
        )
        return Payoff(expected_B, survival_BK if self.num_survival else None)

    def save(self, folder: Path) -> None:
        from safetensors.numpy import save

        check_replaceable(folder)
        weights: bytes = save(self.network.tensors())
        card = self.card.model_copy(update={"weights_sha256": hashlib.sha256(weights).hexdigest()})
        with atomic_dir(folder) as draft:
            (draft / WEIGHTS_FILE).write_bytes(weights)
            text = json.dumps(card.model_dump(mode="json"), indent=2, sort_keys=True)
            (draft / CARD_FILE).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, *, tokenizer_sha: str | None = None) -> MlpPredictor:
        """Read a predictor and check that it fits this version and, if given, the tokenizer.

        Raises:
            UserError: no predictor there, a damaged one, or one trained on other features or for
                another tokenizer; one line that says what to type.
        """
        card = read_fitting_card(folder, tokenizer_sha=tokenizer_sha)
        try:
            return cls(Network.from_tensors(_read_weights(folder, card)), card)
        except UserError as error:
            raise UserError(f"predictor {folder}: {error}; {TRAIN_AGAIN}") from None


def read_fitting_card(folder: Path, *, tokenizer_sha: str | None = None) -> PredictorCard:
    """The card of a predictor that fits this version and, if given, the tokenizer.

    Raises:
        UserError: as `MlpPredictor.load`, but for the weights, which are not read.
    """
    card = read_card(folder)
    _check_features(card, folder)
    if tokenizer_sha and card.tokenizer_sha and tokenizer_sha != card.tokenizer_sha:
        raise UserError(
            f"predictor {folder}: trained for another tokenizer (of {card.model or 'unknown'});"
            f" {TRAIN_AGAIN}"
        )
    return card


def check_replaceable(folder: Path) -> None:
    """Refuse to save a predictor over anything but a predictor.

    Raises:
        UserError: the folder holds other things, or is no folder.
    """
    if folder.is_file():
        raise UserError(f"{folder}: is a file; give a folder for the predictor")
    others = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if strangers := sorted(others - {CARD_FILE, WEIGHTS_FILE}):
        raise UserError(
            f"{folder}: holds {strangers[0]!r}, which saving a predictor there would remove; "
            "choose another folder"
        )


def read_card(folder: Path) -> PredictorCard:
    """The card of the predictor in `folder`, unchecked against the features of this version.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    return read_versioned(
        folder / CARD_FILE,
        PredictorCard,
        what="predictor",
        version=FORMAT_VERSION,
        remedy=TRAIN_AGAIN,
        absent=f"{folder}: holds no payoff predictor ({CARD_FILE} is missing); give a folder "
        "written by `hvd train`",
    )


def _check_features(card: PredictorCard, folder: Path) -> None:
    if (difference := feature_difference(card.feature_names, card.feature_version)) is not None:
        raise UserError(
            f"predictor {folder}: trained on other features: {difference}; {TRAIN_AGAIN}"
        )


def feature_difference(names: tuple[str, ...], version: int) -> str | None:
    """The first way in which these features are not those of this version, in words."""
    for index, (theirs, ours) in enumerate(zip(names, FEATURE_NAMES, strict=False)):
        if theirs != ours:
            return f"feature {index} is {theirs!r}, expected {ours!r}"
    if len(names) != NUM_FEATURES:
        return f"{len(names)} features, expected {NUM_FEATURES}"
    if version != FEATURE_VERSION:
        return f"feature version {version}, expected {FEATURE_VERSION}"
    return None


def _read_weights(folder: Path, card: PredictorCard) -> dict[str, NDArray[np.float32]]:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        weights = (folder / WEIGHTS_FILE).read_bytes()
    except OSError as error:
        raise UserError(f"{WEIGHTS_FILE} cannot be read ({error.strerror})") from None
    if hashlib.sha256(weights).hexdigest() != card.weights_sha256:
        raise UserError(f"{WEIGHTS_FILE} is damaged or not the one {CARD_FILE} was written for")
    try:
        tensors: dict[str, NDArray[np.float32]] = load(weights)
    except (SafetensorError, KeyError, ValueError) as error:
        raise UserError(f"{WEIGHTS_FILE} is no safetensors file ({error})") from None
    return tensors
