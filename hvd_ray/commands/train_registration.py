"""What `hvd train` registers, and what it says of it: who decides now, and what to type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_ray.config import DEFAULT_MODEL, Config
from hvd_ray.shipped import shipped_folder
from hvd_ray.tracking import CHAMPION, RegisteredPredictor, Tracker

if TYPE_CHECKING:
    from hvd_ray.payoff.dataset import LabelSet
    from hvd_ray.payoff.predictor import MlpPredictor
    from hvd_ray.payoff.succession import Succession


@dataclass(frozen=True, slots=True)
class Registration:
    """A registered predictor and whom it would follow."""

    version: RegisteredPredictor
    model: str
    has_curve: bool
    beside_shipped: Succession | None
    """None where nothing ships, or a champion decides already."""

    def as_json(self) -> dict[str, Any]:
        beside = self.beside_shipped
        return {
            "registered": self.version.ref,
            "alias": self.version.alias,
            "beside_shipped": None if beside is None else beside.as_json(),
        }

    def lines(self) -> Iterator[str]:
        """What it changes, by which figures, and what to type next."""
        yield f"registered: {self.version.ref} as {self.version.alias}"
        yield from self._of_champion() if self.version.alias == CHAMPION else self._of_challenger()
        if not self.has_curve and self.beside_shipped is None:
            yield "it gives no survival curve, which hvd_cost needs: --kind survival makes one"

    def _of_champion(self) -> Iterator[str]:
        if self.beside_shipped is None:
            yield "it decides from now on; policy.predictor=FOLDER names another"
        else:
            yield "it decides from now on instead of the shipped one:"
            yield f"  {self.beside_shipped.figures}"
            yield f"  undo:    {self._typed('hvd promote --shipped')}"

    def _of_challenger(self) -> Iterator[str]:
        if self.beside_shipped is None:
            yield "the champion goes on deciding"
        else:
            yield "the shipped predictor goes on deciding:"
            found = (self.beside_shipped.figures, *self.beside_shipped.obstacles)
            yield from (f"  {line}" for line in found)
        ref = f"models:/{self.version.name}@{self.version.alias}"
        yield f"  compare: {self._typed('hvd promote --traces TRACES_DIR')}"
        yield f"  try:     {self._typed(f'hvd bench policy.predictor={ref}')}"
        yield f"  take:    {self._typed('hvd promote --force')}"

    def _typed(self, command: str) -> str:
        return command if self.model == DEFAULT_MODEL else f"{command} model={self.model}"


def register_trained(
    tracker: Tracker,
    predictor: MlpPredictor,
    folder: Path,
    *,
    held_out: LabelSet,
    config: Config,
) -> Registration:
    """Register it; as champion only where nobody decides yet, or what ships does it no better.

    Args:
        tracker: the run that made it.
        predictor: as saved in `folder`.
        folder: what is registered.
        held_out: positions that it was not trained on.
        config: names the target and the store.
    """
    from hvd_ray.tracking import register_predictor
    from hvd_ray.tracking.promotion import find_alias

    is_first = find_alias(CHAMPION, config=config) is None
    beside = _beside_shipped(predictor, held_out, config.model) if is_first else None
    is_due = beside is not None and beside.is_due
    version = register_predictor(tracker, folder, config=config, replaces_shipped=is_due)
    return Registration(version, config.model, predictor.num_survival > 0, beside)


def _beside_shipped(predictor: MlpPredictor, held_out: LabelSet, model: str) -> Succession | None:
    from hvd_ray.payoff.predictor import MlpPredictor
    from hvd_ray.payoff.succession import succession

    shipped = shipped_folder(model, "payoff")
    return None if shipped is None else succession(predictor, MlpPredictor.load(shipped), held_out)
