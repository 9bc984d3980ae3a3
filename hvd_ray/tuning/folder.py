"""The folder of a sweep: what stands where, so that a killed sweep can go on.

`manifest.json` what was asked; `data/` what the trials have in common; `trials/` Ray Tune's own
state and the TensorBoard files; `predictors/TRIAL/` each trial's latest predictor; `trials.json`
how they ended; `best/` the best one; `runs.json` the tracking runs; `sweep.json` the result;
`sweep.html` the page.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from hvd_ray.errors import UserError
from hvd_ray.home import atomic_path
from hvd_ray.payoff.token_classes import TokenClasses
from hvd_ray.tuning.data import Material, fit_labels, label_table
from hvd_ray.tuning.objective import TrialInputs
from hvd_ray.tuning.pricing import Pricing
from hvd_ray.tuning.recorded import ReplaySet
from hvd_ray.tuning.space import SweepSettings


@dataclass(frozen=True, slots=True)
class SweepFolder:
    """The places in a sweep's folder."""

    path: Path

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def trials(self) -> Path:
        """Ray Tune's experiment; TensorBoard reads it as it is."""
        return self.path / "trials"

    @property
    def best(self) -> Path:
        return self.path / "best"

    @property
    def rows(self) -> Path:
        """Every trial's row, once all are over."""
        return self.path / "trials.json"

    @property
    def runs(self) -> Path:
        return self.path / "runs.json"

    @property
    def result(self) -> Path:
        return self.path / "sweep.json"

    @property
    def page(self) -> Path:
        return self.path / "sweep.html"

    def predictor(self, trial: str) -> Path:
        return self.path / "predictors" / trial

    @property
    def is_prepared(self) -> bool:
        return (self.data / "inputs.json").exists()

    def read_result(self) -> dict[str, Any]:
        """What `sweep.json` holds.

        Raises:
            UserError: the sweep is not finished, or the folder is none of a sweep.
        """
        if not self.result.exists():
            raise UserError(
                f"{self.path}: holds no finished sweep ({self.result.name} is missing); run "
                "`hvd tune`, or go on with --resume"
            )
        result = _read_json(self.result)
        if not isinstance(result, dict) or "trials" not in result:
            raise UserError(f"{self.result}: is no result of `hvd tune`")
        return result

    def read_rows(self) -> list[dict[str, Any]]:
        """What `trials.json` holds."""
        rows: list[dict[str, Any]] = _read_json(self.rows)
        return rows


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all, replacing what is there."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    with atomic_path(path) as draft:
        draft.write_text(text + "\n", encoding="utf-8")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from None


def save_inputs(
    folder: SweepFolder,
    material: Material,
    sweep: SweepSettings,
    *,
    validation: ReplaySet,
    sessions: frozenset[str],
    classes: TokenClasses,
    pricing: Pricing,
) -> None:
    """Write what the trials share; `inputs.json` comes last and says that it is complete."""
    validation.save(folder.data / "validation")
    classes.save(folder.data / "token_classes.npz")
    pricing.save(folder.data)
    inputs = {
        "labels": str(material.labels.absolute()),
        "validation_sessions": sorted(sessions),
        "model": material.model,
        "tokenizer_sha": material.tokenizer_sha,
        "sweep": sweep.model_dump(mode="json"),
    }
    write_json(folder.data / "inputs.json", inputs)


@lru_cache(maxsize=1)
def load_inputs(folder: SweepFolder) -> TrialInputs:
    """Read what the trials share, once in a process."""
    inputs = _read_json(folder.data / "inputs.json")
    classes = TokenClasses.load(folder.data / "token_classes.npz")
    assert classes is not None, "written by save_inputs"
    sweep = SweepSettings.model_validate(inputs["sweep"])
    sessions = frozenset(inputs["validation_sessions"])
    return TrialInputs(
        labels=fit_labels(label_table(Path(inputs["labels"])), sessions),
        validation=ReplaySet.load(folder.data / "validation"),
        classes=classes,
        costs=Pricing.load(folder.data).table,
        asha=sweep.asha,
        seed=sweep.seed,
        model=inputs["model"],
        tokenizer_sha=inputs["tokenizer_sha"],
    )
