"""What Ray Tune calls: the trial in a worker, and the callback that passes on to a watch.

Import it lazily, once Ray's environment is set: it loads Ray.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray import tune

from hvd_ray.payoff.predictor import MlpPredictor
from hvd_ray.tuning.folder import SweepFolder, load_inputs
from hvd_ray.tuning.objective import EPOCH, SPEED, Metrics, run_trial
from hvd_ray.tuning.space import TrialSettings
from hvd_ray.tuning.watch import TrialWatch

OURS = (EPOCH, SPEED, "train_loss", "emitted_per_pass", "accepted_share", "precision", "recall")
_MORE = ("num_params", "train_s", "replay_s")

watches: dict[str, TrialWatch] = {}
"""Who hears of the trials, by the sweep's folder: Ray pickles callbacks with the experiment and
brings copies back after a kill, so what is live cannot stand in the callback itself."""


def trial(params: dict[str, Any], *, folder: str) -> None:
    """One trial, in a worker: everything but the settings is read from the sweep's folder."""
    import torch

    torch.set_num_threads(1)
    place = SweepFolder(Path(folder))
    name = tune.get_context().get_trial_id()

    def report(predictor: MlpPredictor, metrics: Metrics) -> None:
        predictor.save(place.predictor(name))
        tune.report({key: value for key, value in metrics.items() if value is not None})

    run_trial(TrialSettings.from_flat(params), load_inputs(place), report)


def folder_name(trial: Any) -> str:
    """Of a trial's files; TensorBoard shows it."""
    return f"trial-{trial.trial_id}"


def own_metrics(result: dict[str, Any]) -> dict[str, float]:
    """Of a Tune result, the figures that are a trial's own."""
    return {
        key: float(value)
        for key, value in result.items()
        if key in (*OURS, *_MORE) or key.startswith(f"{SPEED}/")
    }


class Forwarding(tune.Callback):  # type: ignore[misc]  # Ray has no types
    """Passes on what happens to the trials of a folder's sweep."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    @property
    def _watch(self) -> TrialWatch:
        return watches[self._folder]

    def on_trial_start(self, *, trial: Any, **_call: Any) -> None:
        self._watch.started(trial.trial_id, trial.config)

    def on_trial_result(self, *, trial: Any, result: dict[str, Any], **_call: Any) -> None:
        if SPEED in result:
            self._watch.reported(trial.trial_id, own_metrics(result))

    def on_trial_complete(self, *, trial: Any, **_call: Any) -> None:
        self._watch.ended(trial.trial_id, is_ok=True)

    def on_trial_error(self, *, trial: Any, **_call: Any) -> None:
        self._watch.ended(trial.trial_id, is_ok=False)
