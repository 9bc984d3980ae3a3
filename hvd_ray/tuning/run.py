"""`hvd tune`: prepare, run the trials, report the best one on test sessions, register it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvd_ray.config import Config
from hvd_ray.errors import UserError
from hvd_ray.payoff.dataset import TEST, TRAIN, read_labels_table
from hvd_ray.payoff.estimator import PredictorEstimator
from hvd_ray.payoff.features import FEATURE_VERSION, FeatureExtractor
from hvd_ray.payoff.predictor import MlpPredictor
from hvd_ray.pipelines.label import token_classes_of
from hvd_ray.pipelines.output import OutputFolder, check_settings, claimed, read_manifest
from hvd_ray.pipelines.shards import RunProgress
from hvd_ray.provenance import provenance
from hvd_ray.tracking import CHALLENGER, register_predictor
from hvd_ray.tuning.data import (
    Material,
    label_table,
    num_output_tokens,
    open_material,
    train_sessions,
    validation_sessions,
)
from hvd_ray.tuning.final import tau_curves, test_rows, with_card
from hvd_ray.tuning.folder import SweepFolder, load_inputs, save_inputs, write_json
from hvd_ray.tuning.page import write_page
from hvd_ray.tuning.pricing import Pricing, find_pricing
from hvd_ray.tuning.space import SweepSettings, TrialSettings
from hvd_ray.tuning.trials import Row, best_of, run_trials
from hvd_ray.tuning.watch import Counted, SweepRuns, SweepWatch


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """Where a sweep reads and writes; each field is a flag of `hvd tune`."""

    labels: Path
    traces: Path
    out: Path
    costs: str | None = None
    """A file of `hvd calibrate`, `pass`, or None for this machine's own table."""
    is_resumed: bool = False
    wants_registration: bool = True


def run_sweep(
    options: SweepOptions, sweep: SweepSettings, config: Config, *, progress: RunProgress
) -> dict[str, Any]:
    """Sweep, or go on with a sweep that was killed; a finished one is only read.

    Returns:
        What `sweep.json` holds.

    Raises:
        UserError: bad labels, traces or costs, another sweep in the folder, a store that fails.
    """
    progress.stage(f"reading the traces in {options.traces}")
    material = open_material(options.labels, options.traces, config)
    config = config.model_copy(update={"model": material.model, "seed": sweep.seed})
    pricing = find_pricing(options.costs, config)
    if material.model_drafter is not None:
        pricing.check_model_price(options.labels)
    folder = SweepFolder(options.out.absolute())
    settings = _settings(sweep, material, pricing)
    _refuse_unasked(folder, is_resumed=options.is_resumed)
    if check_settings(folder.path, settings) and _is_complete(folder):
        return folder.read_result()
    with claimed(folder.path, settings) as claim:
        return _Sweep(options, sweep, config, material, pricing, folder, progress).run(claim)


@dataclass(frozen=True, slots=True)
class _Sweep:
    """One sweep on its way; every step leaves its result in the folder and is not done twice."""

    options: SweepOptions
    sweep: SweepSettings
    config: Config
    material: Material
    pricing: Pricing
    folder: SweepFolder
    progress: RunProgress

    def run(self, claim: OutputFolder) -> dict[str, Any]:
        self._prepare()
        self.progress.stage("opening the tracking store")
        runs = SweepRuns(self.config, self.folder.runs)
        try:
            rows = self._trials(runs)
            result = self._report(rows, runs)
            self._keep(result, runs)
        except BaseException as error:
            runs.end_quietly("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
            raise
        runs.parent.finish()
        claim.finish({"best": result["best"]["trial"]}, about=result["provenance"])
        return result

    def _prepare(self) -> None:
        """Deal the sessions and look up the validation traces' drafts."""
        if self.folder.is_prepared:
            return
        read_labels_table(label_table(self.options.labels))  # refuses what the end would miss
        shards = [
            [trace for trace in shard if trace.split != TEST] for shard in self.material.shards()
        ]
        sessions = validation_sessions(
            train_sessions(shards), settings=self.sweep.validation, seed=self.sweep.seed
        )
        classes = token_classes_of(self.material.model, self.material.tokenizer_sha)
        validation = self.material.replay_set(
            shards,
            lambda trace: trace.split == TRAIN and trace.session_id in sessions,
            on_tokens=Counted(
                self.progress, num_output_tokens(shards), "looking up the validation drafts"
            ),
        )
        save_inputs(
            self.folder,
            self.material,
            self.sweep,
            validation=validation,
            sessions=sessions,
            classes=classes,
            pricing=self.pricing,
        )

    def _trials(self, runs: SweepRuns) -> list[Row]:
        if self.folder.rows.exists():
            return self.folder.read_rows()
        self.progress.stage("starting Ray")
        self.progress.expect(self.sweep.trials)
        runs.parent.log_params(self._about_run())
        watch = SweepWatch(runs, self.progress, self.pricing.unit)
        rows = run_trials(self.folder, self.sweep, watch)
        runs.close_all_but({row["trial"] for row in rows})
        write_json(self.folder.rows, rows)
        return rows

    def _report(self, rows: list[Row], runs: SweepRuns) -> dict[str, Any]:
        """The best trial on the test sessions, written to `best/` and `sweep.json`."""
        best = best_of(rows)
        settings = TrialSettings.from_flat(best["params"])
        inputs = load_inputs(self.folder)
        about = self._provenance()
        predictor = with_card(
            MlpPredictor.load(self.folder.predictor(best["trial"])),
            settings,
            inputs,
            test_labels=read_labels_table(label_table(self.options.labels)).test,
            about=about,
        )
        predictor.save(self.folder.best)
        estimator = PredictorEstimator(predictor, FeatureExtractor(inputs.classes))
        shards = self.material.shards()
        test = self.material.replay_set(
            shards,
            lambda trace: trace.split == TEST,
            on_tokens=Counted(
                self.progress, num_output_tokens(shards), "looking up the test drafts"
            ),
        )
        on_tau = Counted(self.progress, len(self.sweep.taus), "replaying every tau")
        curves = tau_curves(
            settings, estimator, inputs, taus=self.sweep.taus, on_tau=lambda: on_tau(1)
        )
        result = {
            "provenance": about,
            "unit": self.pricing.unit,
            "model": self.material.model,
            "sweep": self.sweep.model_dump(mode="json"),
            "trials": rows,
            "best": {**best, "predictor": self.folder.best.name},
            "curves": curves,
            "test": test_rows(settings, estimator, test, self.pricing.table, seed=self.sweep.seed),
            "run_id": runs.parent.run_id,
            "registered": None,
        }
        write_json(self.folder.result, result)
        return result

    def _keep(self, result: dict[str, Any], runs: SweepRuns) -> None:
        """The page, and the best model as a registered challenger."""
        write_page(self.folder.page, result)
        whole = result["test"][0]
        figures = {f"test/{name}": value for name, value in whole["speeds"].items()}
        runs.parent.log_metrics({**figures, "test/gap": whole["gap"]["ratio"]})
        if runs.parent.run_id is not None and self.options.wants_registration:
            self.progress.stage("registering the best predictor")
            version = register_predictor(
                runs.parent, self.folder.best, config=self.config, alias=CHALLENGER
            )
            result["registered"] = version.ref
            write_json(self.folder.result, result)
        runs.keep_files([self.folder.result, self.folder.page])

    def _about_run(self) -> dict[str, Any]:
        """For the sweep's run: `hvd promote` finds its traces, labels and costs here again."""
        return {
            "labels": str(self.options.labels.absolute()),
            "traces": str(self.options.traces.absolute()),
            "costs": str(self.options.costs),
            "sweep": self.sweep.model_dump(mode="json"),
        }

    def _provenance(self) -> dict[str, Any]:
        return provenance(
            config=self.config, traces_hash=self.material.note.traces_hash, **self.pricing.about
        )


def _settings(sweep: SweepSettings, material: Material, pricing: Pricing) -> Mapping[str, Any]:
    """What decides the result; how many trials run at once decides only the order of the search."""
    costs = "pass" if pricing.file is None else pricing.file.model_dump_json()
    return {
        "command": "tune",
        "feature_version": FEATURE_VERSION,
        "traces_hash": material.note.traces_hash,
        "labels": str(material.labels.absolute()),
        "model": material.model,
        "model_drafter": asdict(material.model_drafter) if material.model_drafter else None,
        "costs": hashlib.sha256(costs.encode()).hexdigest()[:16],
        **sweep.model_dump(mode="json", exclude={"concurrency"}),
    }


def _refuse_unasked(folder: SweepFolder, *, is_resumed: bool) -> None:
    if read_manifest(folder.path) is not None and not is_resumed:
        raise UserError(
            f"{folder.path}: holds a sweep already; go on with --resume, or choose another --out"
        )


def _is_complete(folder: SweepFolder) -> bool:
    return bool((read_manifest(folder.path) or {}).get("complete"))
