"""What an advice starts from: costs, a head, the traffic, its look-ups, a predictor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_ray.advise.acceptance import (
    NO_HEAD,
    HeadAcceptance,
    assumed_acceptance,
    measured_acceptance,
    parse_acceptance,
)
from hvd_ray.advise.lookups import Walked, walk
from hvd_ray.advise.material import Roles, Traffic, deal_roles, read_traffic, recorded_steps
from hvd_ray.advise.options import LEARN, NO_PREDICTOR, PASS, AdviceOptions
from hvd_ray.config import Config
from hvd_ray.errors import UserError
from hvd_ray.payoff.cost_by_hand import NamedCosts, named, read_any_costs
from hvd_ray.payoff.dataset import TEST, label_set
from hvd_ray.payoff.estimator import PredictorEstimator
from hvd_ray.payoff.features import FeatureExtractor
from hvd_ray.payoff.quality import QualityRow, judged
from hvd_ray.payoff.token_classes import TokenClasses
from hvd_ray.pipelines.shards import RunProgress
from hvd_ray.traces.schema import Trace

if TYPE_CHECKING:
    from hvd_ray.payoff.predictor import MlpPredictor

CHAMPION = "champion"


@dataclass(frozen=True, slots=True)
class KnownPayoff:
    """A predictor and how it did on the judged sessions."""

    estimator: PredictorEstimator | None
    quality: tuple[QualityRow, ...]
    basis: str
    reference: str | None
    """What a configuration calls it."""


def find_costs_for(options: AdviceOptions, config: Config) -> tuple[NamedCosts | None, str]:
    """The table that was named, or this machine's; None: every pass costs the same, and why.

    Raises:
        UserError: the table cannot be read, or a load is asked for and there is none.
    """
    costs, lacking = _costs_at_hand(options, config)
    if costs is None and options.concurrency > 1:
        raise UserError(
            f"--concurrency {options.concurrency} needs a cost table: without one every pass costs "
            f"the same at any load; name one with --costs ({lacking})"
        )
    return costs, lacking


def _costs_at_hand(options: AdviceOptions, config: Config) -> tuple[NamedCosts | None, str]:
    if options.costs == PASS:
        return None, "--costs pass asked for none"
    if options.costs is not None:
        return read_any_costs(Path(options.costs)), ""
    from hvd_ray.parts.costs import find_costs

    try:
        return named(find_costs(config)), ""
    except UserError as error:
        return None, str(error)


def find_head(options: AdviceOptions) -> HeadAcceptance | None:
    if options.eagle3 == NO_HEAD:
        return None
    if options.eagle3 is None:
        return assumed_acceptance()
    folder = Path(options.eagle3)
    if folder.is_dir():
        return measured_acceptance(recorded_steps(folder).values(), basis=folder.name)
    return parse_acceptance(options.eagle3)


def read_logs(options: AdviceOptions, progress: RunProgress) -> Traffic:
    return read_traffic(
        options.logs,
        tokenizer=options.tokenizer,
        import_settings={
            "log_format": options.log_format,
            "turns": options.turns,
            "on_bad_line": options.on_bad_line,
            "limit": options.limit,
            "num_workers": options.num_workers,
        },
        cut_loops=not options.keep_loops,
        progress=progress,
    )


def roles_of(traffic: Traffic, options: AdviceOptions) -> Roles:
    return deal_roles(
        traffic.traces,
        sides=options.split,
        is_learning=options.predictor == LEARN,
        judged_tokens=options.judged_tokens,
        learned_tokens=options.learned_tokens,
    )


def walk_through(
    traffic: Traffic,
    roles: Roles,
    config: Config,
    classes: TokenClasses,
    progress: RunProgress,
) -> Walked:
    progress.stage("looking up every position")
    progress.expect(len(traffic.traces), unit="answers")
    num_done = 0

    def on_trace(trace: Trace) -> None:
        nonlocal num_done
        num_done += 1
        progress.advance(num_done, trace.workload)

    return walk(
        traffic.traces,
        roles,
        suffix=config.drafting.suffix,
        extractor=FeatureExtractor(classes),
        on_trace=on_trace,
    )


def find_payoff_for(
    walked: Walked,
    options: AdviceOptions,
    config: Config,
    *,
    folder: Path | None,
    classes: TokenClasses,
    traffic: Traffic,
    progress: RunProgress,
) -> KnownPayoff:
    """The predictor that was asked for: one at hand, one learned here, or none.

    Raises:
        UserError: it cannot be read or is of another tokenizer, or there is nothing to learn from.
    """
    if options.predictor == NO_PREDICTOR:
        return KnownPayoff(None, (), "none was asked for", None)
    if folder is None:
        progress.stage("learning a predictor from the train sessions")
        return _learned(walked, options, config, classes, traffic)
    from hvd_ray.payoff.predictor import MlpPredictor

    predictor = MlpPredictor.load(folder, tokenizer_sha=traffic.tokenizer_sha or None)
    quality = _quality(predictor, walked, config)
    estimator = PredictorEstimator(predictor, FeatureExtractor(classes))
    basis = f"{options.predictor}, {predictor.card.kind}"
    return KnownPayoff(estimator, quality, basis, options.predictor)


def _learned(
    walked: Walked,
    options: AdviceOptions,
    config: Config,
    classes: TokenClasses,
    traffic: Traffic,
) -> KnownPayoff:
    from hvd_ray.payoff.dataset import read_labels_table
    from hvd_ray.payoff.training import train_predictor
    from hvd_ray.payoff.training_settings import TrainingSettings

    labels = read_labels_table(walked.labels)
    settings = TrainingSettings(kind="survival", seed=config.seed, tau=config.policy.tau)
    trained = train_predictor(
        labels, settings, model=options.tokenizer, tokenizer_sha=traffic.tokenizer_sha or None
    )
    reference = None
    if options.save_predictor is not None:
        trained.predictor.save(options.save_predictor)
        reference = str(options.save_predictor)
    basis = f"learned from {len(labels.train):,} positions of the log's train sessions"
    estimator = PredictorEstimator(trained.predictor, FeatureExtractor(classes))
    return KnownPayoff(estimator, trained.rows, basis, reference)


def predictor_folder(options: AdviceOptions, config: Config) -> Path | None:
    """Where the predictor that was named lies; None where none was.

    Raises:
        UserError: there is none.
    """
    if options.predictor in (LEARN, NO_PREDICTOR):
        return None
    from hvd_ray.tracking import resolve_predictor

    named = None if options.predictor == CHAMPION else options.predictor
    return resolve_predictor(named, config=config)


def _quality(predictor: MlpPredictor, walked: Walked, config: Config) -> tuple[QualityRow, ...]:
    labels = label_set(walked.labels, split=TEST)
    return judged(predictor, labels, tau=config.policy.tau) if len(labels) else ()
