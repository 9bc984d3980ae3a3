"""What Ray Tune calls in a search for slim models: the trial, the sampler, who counts.

Import it lazily, once Ray's environment is set: it loads Ray and Optuna.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from ray import tune

from hvd_ray.config import Config
from hvd_ray.tuning.slim_trials import WORTH, Searched
from hvd_ray.types import Draft, Source
from hvd_ray.verify.slim_search import log_margin, sweep_gates, wrong_accepts
from hvd_ray.verify.slim_window import Block, Recorded, Window

told: dict[str, Callable[[int, str], None]] = {}
"""Who hears of finished trials, by method: Ray pickles callbacks."""


def trial(point: dict[str, Any], *, searched: Searched) -> None:
    """One slim model; its worth over the search's recordings."""
    window = _window(searched.folder, json.dumps(dict(searched.config)))
    slim = searched.slim(point)
    if searched.method == "dimr":
        worth = log_margin(window, slim)
    else:
        tallies = sweep_gates(window, slim)
        worth = wrong_accepts(tallies, max_escalated=searched.max_escalated)
        worth += 1e-3 * tallies[0].mean_log_margin  # decides between equals
    tune.report({WORTH: worth})


@lru_cache(maxsize=1)
def _window(folder: str, config: str) -> Window:
    """Loaded once in each worker; trials of a reused worker find it."""
    import torch

    from hvd_ray.systems import load_engine
    from hvd_ray.tuning.slim import RECORDINGS

    torch.set_num_threads(1)
    settings = Config.model_validate_json(config).model_copy(update={"num_threads": 1})
    engine, _ = load_engine(settings)
    return Window(engine, tuple(load_recordings(Path(folder) / RECORDINGS)))


def load_recordings(path: Path) -> list[Recorded]:
    """What `save_recordings` wrote."""
    return [
        Recorded(
            np.array(row["token_ids"], np.int32),
            row["prompt_len"],
            tuple(
                Block(position, Draft(Source.SUFFIX, tuple(tokens), tuple(probs), sum(probs)))
                for position, tokens, probs in row["blocks"]
            ),
        )
        for row in json.loads(path.read_text(encoding="utf-8"))
    ]


class PeriodicSampler(optuna.samplers.BaseSampler):  # type: ignore[misc]  # untyped here
    """Random points, and every `bayes_every`-th by a Bayesian sampler that has seen them all."""

    def __init__(self, seed: int, *, bayes_every: int) -> None:
        self._random = optuna.samplers.RandomSampler(seed=seed)
        self._bayes = optuna.samplers.TPESampler(seed=seed, n_startup_trials=2)
        self._every = bayes_every

    def _of(self, trial: Any) -> Any:
        is_bayes = trial.number % self._every == self._every - 1
        return self._bayes if is_bayes else self._random

    def infer_relative_search_space(self, study: Any, trial: Any) -> Any:
        return self._of(trial).infer_relative_search_space(study, trial)

    def sample_relative(self, study: Any, trial: Any, search_space: Any) -> Any:
        return self._of(trial).sample_relative(study, trial, search_space)

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
        return self._of(trial).sample_independent(study, trial, name, distribution)


class Counting(tune.Callback):  # type: ignore[misc]  # Ray has no types
    """Tells of each trial that ends."""

    def __init__(self, method: str) -> None:
        self._method = method
        self._done = 0

    def on_trial_complete(self, *, trial: Any, **_call: Any) -> None:
        self._done += 1
        if self._method in told:
            told[self._method](self._done, str(trial.trial_id))

    def on_trial_error(self, *, trial: Any, **_call: Any) -> None:
        self.on_trial_complete(trial=trial)
