"""The searched methods on Ray Tune: DIMR's random and Bayesian steps, ours with warm starts."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvd_ray.engines.slim import SlimLayers
from hvd_ray.errors import UserError
from hvd_ray.pipelines.cluster import connected
from hvd_ray.pipelines.shards import RunProgress
from hvd_ray.tuning.trials import _set_environment
from hvd_ray.verify.slim_search import SublayerCosts, scores_of, sublayers, whole_layers

WORTH = "worth"
"""What a trial reports; smaller is better."""
BAYES_EVERY = 4
"""DIMR: every fourth step is Bayesian, the others random."""


@dataclass(frozen=True, slots=True)
class Searched:
    """One search, as its trials need it."""

    method: str
    folder: str
    config: Mapping[str, Any]
    num_layers: int
    skip_ratio: float
    max_ratio: float
    max_escalated: float
    costs: Mapping[str, float]
    start: tuple[SlimLayers, ...] = ()
    """Where ours begins: what the other methods found."""

    def names(self) -> list[str]:
        """The numbers of a point, one for each thing that may be skipped."""
        kinds = ("layer",) if self.method == "dimr" else ("attention", "mlp")
        return [f"{kind}{layer}" for kind in kinds for layer in range(self.num_layers)]

    def slim(self, point: Mapping[str, float]) -> SlimLayers:
        """The slim model of a point."""
        layers = range(self.num_layers)
        if self.method == "dimr":
            scores = [point[f"layer{layer}"] for layer in layers]
            return whole_layers(scores, skip_ratio=self.skip_ratio)
        return sublayers(
            {
                (kind, layer): point[f"{kind}{layer}"]
                for kind in ("attention", "mlp")
                for layer in layers
            },
            num_layers=self.num_layers,
            costs=SublayerCosts(**self.costs),
            max_ratio=self.max_ratio,
        )

    def warm_points(self) -> list[dict[str, float]]:
        """The starting slim models as points."""
        if self.method == "dimr":
            return []
        return [
            {f"{kind}{layer}": score for (kind, layer), score in scores_of(slim).items()}
            for slim in self.start
        ]


def run_slim_trials(
    searched: Searched,
    *,
    num_trials: int,
    concurrency: int,
    seed: int,
    progress: RunProgress,
) -> SlimLayers:
    """The best slim model of a search.

    Raises:
        UserError: every trial failed.
    """
    _set_environment()
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    with connected(num_cpus=concurrency), tempfile.TemporaryDirectory() as storage:
        from ray import tune

        from hvd_ray.tuning import slim_hooks

        progress.expect(num_trials)
        trial = tune.with_parameters(slim_hooks.trial, searched=searched)
        tuner = tune.Tuner(
            tune.with_resources(trial, {"cpu": 1}),
            tune_config=tune.TuneConfig(
                metric=WORTH,
                mode="min",
                search_alg=_search(searched, seed),
                num_samples=num_trials,
                max_concurrent_trials=concurrency,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                name=searched.method,
                storage_path=storage,
                callbacks=[slim_hooks.Counting(searched.method)],
                verbose=0,
            ),
        )
        slim_hooks.told[searched.method] = progress.advance
        try:
            results = tuner.fit()
        finally:
            del slim_hooks.told[searched.method]
        good = [result for result in results if result.error is None]
        if not good:
            raise UserError(f"every trial of {searched.method} failed: {results[0].error}")
        best = min(good, key=lambda result: float((result.metrics or {})[WORTH]))
        return searched.slim(best.config or {})


def _search(searched: Searched, seed: int) -> Any:
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = {name: optuna.distributions.FloatDistribution(0.0, 1.0) for name in searched.names()}
    sampler: Any = optuna.samplers.TPESampler(seed=seed, n_startup_trials=8)
    if searched.method == "dimr":
        from hvd_ray.tuning.slim_hooks import PeriodicSampler

        sampler = PeriodicSampler(seed, bayes_every=BAYES_EVERY)
    return OptunaSearch(
        space,
        metric=WORTH,
        mode="min",
        sampler=sampler,
        points_to_evaluate=searched.warm_points() or None,
    )
