"""A learned gate on disk: a card that says for which slim model, and its weights beside it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from hvd_ray.errors import UserError
from hvd_ray.home import atomic_path
from hvd_ray.payoff.network import Network
from hvd_ray.verify.gate import FEATURE_NAMES, LearnedGate
from hvd_ray.verify.slim_file import Escalation, SlimFile
from hvd_ray.versioned_json import read_versioned

CARD, WEIGHTS = "gate.json", "gate.safetensors"
FORMAT_VERSION = 1
TRAIN = "train one with `hvd slim gate`"


class GateCard(BaseModel):
    """What the weights are for and how good they were."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int = FORMAT_VERSION
    slim: str
    """Key of the slim model whose rows it reads."""
    feature_names: tuple[str, ...] = FEATURE_NAMES
    weights_sha256: str
    figures: dict[str, float] = {}
    escalation: Escalation = Escalation()
    """On held-out blocks, by `theta_learned`."""
    provenance: dict[str, Any] = {}


def write_gate(folder: Path, network: Network, card: GateCard) -> None:
    """Write weights and card, replacing those that are there."""
    from safetensors.numpy import save

    weights: bytes = save(network.tensors())
    card = card.model_copy(update={"weights_sha256": hashlib.sha256(weights).hexdigest()})
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / WEIGHTS) as draft:
        draft.write_bytes(weights)
    with atomic_path(folder / CARD) as draft:
        text = json.dumps(card.model_dump(mode="json"), indent=2, sort_keys=True)
        draft.write_text(text + "\n", encoding="utf-8")


def read_gate(folder: Path, *, slim: SlimFile, theta: float) -> tuple[LearnedGate, GateCard]:
    """The gate in a folder, for this slim model.

    Raises:
        UserError: absent, damaged, of other features or for another slim model.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    absent = f"no learned gate in {folder}; {TRAIN}"
    card = read_versioned(
        folder / CARD,
        GateCard,
        what="learned gate",
        version=FORMAT_VERSION,
        remedy=TRAIN,
        absent=absent,
    )
    try:
        weights = (folder / WEIGHTS).read_bytes()
    except FileNotFoundError:
        raise UserError(absent) from None
    except OSError as error:
        raise UserError(f"learned gate in {folder}: cannot be read ({error}); {TRAIN}") from None
    if card.feature_names != FEATURE_NAMES:
        raise UserError(f"learned gate in {folder}: made by another version; {TRAIN}")
    if card.slim != slim.key:
        raise UserError(f"learned gate in {folder}: made for another slim model; {TRAIN}")
    if hashlib.sha256(weights).hexdigest() != card.weights_sha256:
        raise UserError(f"learned gate in {folder}: {WEIGHTS} is not the card's; {TRAIN}")
    try:
        network = Network.from_tensors(load(weights))
    except (SafetensorError, KeyError, ValueError, UserError) as error:
        raise UserError(f"learned gate in {folder}: {error}; {TRAIN}") from None
    return LearnedGate(network, theta), card
