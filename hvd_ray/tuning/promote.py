"""`hvd promote`: the challenger against the champion on test sessions, and the alias if it wins.

As long as there is no champion, what ships for the target stands in its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvd_ray.config import Config, PolicyName
from hvd_ray.errors import UserError
from hvd_ray.parts.costs import calibrate_command, find_costs
from hvd_ray.payoff.dataset import TEST
from hvd_ray.payoff.estimator import PredictorEstimator
from hvd_ray.payoff.features import FeatureExtractor
from hvd_ray.payoff.policy import Policy
from hvd_ray.payoff.predictor import MlpPredictor, read_fitting_card
from hvd_ray.payoff.token_classes import TokenClasses
from hvd_ray.pipelines.label import token_classes_of
from hvd_ray.pipelines.shards import RunProgress
from hvd_ray.systems import NEEDS, Need, Parts, build_policy
from hvd_ray.tracking import CHALLENGER, CHAMPION, RegisteredPredictor, resolve_predictor
from hvd_ray.tracking.promotion import find_alias, make_champion, run_params
from hvd_ray.tuning.contest import Gap, Row, contest
from hvd_ray.tuning.data import num_output_tokens, open_material
from hvd_ray.tuning.pricing import PASS, Pricing, find_pricing
from hvd_ray.tuning.recorded import ReplaySet
from hvd_ray.tuning.space import COST_POLICY, TAU_POLICY, TrialSettings
from hvd_ray.tuning.watch import Counted

FORCED = "forced"


@dataclass(frozen=True, slots=True)
class PromoteOptions:
    """What to compare on; what is None is taken from the challenger's own run."""

    labels: Path | None = None
    traces: Path | None = None
    costs: str | None = None
    is_forced: bool = False


@dataclass(frozen=True, slots=True)
class Promotion:
    """How it went."""

    challenger: RegisteredPredictor
    incumbent: str | None
    """What would be loaded without the challenger; None: nothing."""
    is_promoted: bool
    reason: str
    policy: Mapping[str, Any]
    """Under which both decided: the configured one, else as `hvd serve` would choose."""
    policy_why: str = ""
    unit: str = ""
    rows: tuple[Row, ...] = ()
    as_tuned: Row | None = None
    """The challenger under the policy it was tuned with, over all workloads, where that differs."""
    tuned: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    to_serve: str | None = None
    """What is still to be done for `hvd serve` to decide by the new champion; None: nothing."""

    def as_json(self) -> dict[str, Any]:
        return {
            "promoted": self.is_promoted,
            "reason": self.reason,
            "challenger": self.challenger.ref,
            "champion": self.incumbent,
            "policy": dict(self.policy),
            "policy_why": self.policy_why,
            "unit": self.unit,
            "rows": [row.as_json() for row in self.rows],
            "as_tuned": None if self.as_tuned is None else self.as_tuned.as_json(),
            "tuned": None if self.tuned is None else dict(self.tuned),
            "notes": list(self.notes),
            "to_serve": self.to_serve,
        }


def promote(options: PromoteOptions, config: Config, *, progress: RunProgress) -> Promotion:
    """Compare on held-out test sessions, and move the champion's alias if the challenger wins.

    It wins if the whole 95 % interval of its speed over the champion's lies above 1 (a paired
    bootstrap over sessions); where it alone has a survival curve, if it is not shown to be slower;
    and where there is nothing to compare with.

    Raises:
        UserError: there is no challenger, or nothing to compare on.
    """
    progress.stage("looking for the challenger")
    if options.labels is not None and options.traces is not None:
        model = open_material(options.labels, options.traces, config).model
        config = config.model_copy(update={"model": model})
    challenger = _challenger(config)
    incumbent, folder = _incumbent(config)
    outcome = Promotion(challenger, incumbent, True, "there was no champion", _configured(config))
    if folder is not None:
        noted = run_params(challenger, config=config)
        if options.is_forced and _lacking(options, noted):
            outcome = replace(outcome, is_promoted=False, reason="nothing was compared")
        else:
            match = _Match.load(_completed(options, noted), challenger, folder, config, progress)
            outcome = match.judged(outcome)
    if not outcome.is_promoted and options.is_forced:
        outcome = replace(outcome, is_promoted=True, reason=f"{FORCED}, though {outcome.reason}")
    if outcome.is_promoted:
        make_champion(challenger, config=config, about=_about(outcome))
        outcome = replace(outcome, to_serve=_to_serve(challenger, config))
    return outcome


@dataclass(frozen=True, slots=True)
class _Match:
    """Two predictors and the test sessions that they meet on."""

    challenger: MlpPredictor
    incumbent: MlpPredictor
    test: ReplaySet
    classes: TokenClasses
    pricing: Pricing
    config: Config
    policy_why: str

    @classmethod
    def load(
        cls,
        options: PromoteOptions,
        challenger: RegisteredPredictor,
        incumbent: Path,
        config: Config,
        progress: RunProgress,
    ) -> _Match:
        assert options.labels is not None
        assert options.traces is not None
        pricing = find_pricing(options.costs, config)
        material = open_material(options.labels, options.traces, config)
        if material.model_drafter is not None:
            pricing.check_model_price(options.labels)
        sha = material.tokenizer_sha or None
        shards = material.shards()
        counted = Counted(progress, num_output_tokens(shards), "looking up the test drafts")
        test = material.replay_set(shards, lambda trace: trace.split == TEST, on_tokens=counted)
        if not test.traces:
            raise UserError(f"{material.traces}: no test sessions to compare on")
        progress.stage("replaying the test sessions")
        ours = resolve_predictor(challenger.ref, config=config)
        first, second = (MlpPredictor.load(each, tokenizer_sha=sha) for each in (ours, incumbent))
        has_curve = "survival" in (first.card.kind, second.card.kind)
        name, why = _served(config, pricing, has_curve=has_curve)
        policy = config.policy.model_copy(update={"name": name})
        return cls(
            first,
            second,
            test,
            token_classes_of(material.model, material.tokenizer_sha),
            pricing,
            config.model_copy(update={"policy": policy}),
            why,
        )

    def judged(self, outcome: Promotion) -> Promotion:
        """The outcome with its rows and its verdict."""
        incumbent = self._configured(self.incumbent)
        rows = self._contest(self._configured(self.challenger), incumbent)
        is_promoted, reason = self._verdict(rows[0].gap)
        outcome = replace(
            outcome,
            is_promoted=is_promoted,
            reason=reason,
            policy=_configured(self.config),
            policy_why=self.policy_why,
            unit=self.pricing.unit,
            rows=tuple(rows),
            notes=tuple(
                f"the {name} has no survival curve: it decides by hvd_tau here"
                for name, predictor in ((CHALLENGER, self.challenger), (CHAMPION, self.incumbent))
                if not self._can_decide(predictor)
            ),
        )
        tuned = _tuned(self.challenger)
        if tuned is None or _decision(tuned) == outcome.policy:
            return outcome
        policy = tuned.decider(self._estimator(self.challenger), self.pricing.table)
        row = self._contest(policy, incumbent)[0]
        return replace(outcome, as_tuned=row, tuned=_decision(tuned))

    def _contest(self, challenger: Policy, incumbent: Policy) -> list[Row]:
        policies = {CHALLENGER: challenger, CHAMPION: incumbent}
        return contest(policies, self.test, self.pricing.table, seed=self.config.seed)

    def _configured(self, predictor: MlpPredictor) -> Policy:
        """The policy of the configuration; without a survival curve `hvd_cost` is `hvd_tau`."""
        name = self.config.policy.name if self._can_decide(predictor) else TAU_POLICY
        return build_policy(name, self.config, self._parts(predictor))

    def _verdict(self, gap: Gap) -> tuple[bool, str]:
        """Whether the challenger wins, and why; `hvd_cost` must not get lost by it."""
        before, after = (
            self._parts(each).has(Need.SURVIVAL) for each in (self.incumbent, self.challenger)
        )
        if not self._can_decide(self.challenger) or (before and not after):
            return False, "hvd_cost needs a survival curve, and it has none"
        if after and not before and not gap.is_better and not gap.is_worse:
            return True, "it is not slower, and gives the survival curve that hvd_cost needs"
        return gap.is_better, _words(gap)

    def _can_decide(self, predictor: MlpPredictor) -> bool:
        """Whether the configured policy can ask this predictor."""
        return all(self._parts(predictor).has(need) for need in NEEDS[self.config.policy.name])

    def _parts(self, predictor: MlpPredictor) -> Parts:
        return Parts(self._estimator(predictor), self.pricing.table)

    def _estimator(self, predictor: MlpPredictor) -> PredictorEstimator:
        return PredictorEstimator(predictor, FeatureExtractor(self.classes))


def _challenger(config: Config) -> RegisteredPredictor:
    challenger = find_alias(CHALLENGER, config=config)
    if challenger is None:
        raise UserError(
            f"no challenger is registered for {config.model}: make one with `hvd tune` or "
            "`hvd train`, or name another target with model=NAME"
        )
    return challenger


def _incumbent(config: Config) -> tuple[str | None, Path | None]:
    """What everything loads as long as the challenger is not promoted."""
    champion = find_alias(CHAMPION, config=config)
    if champion is not None:
        return champion.ref, resolve_predictor(champion.ref, config=config)
    try:
        folder = resolve_predictor(config=config)
    except UserError:
        return None, None
    return config.policy.predictor or f"shipped for {config.model}", folder


def _to_serve(champion: RegisteredPredictor, config: Config) -> str | None:
    """`hvd serve` on the torch engine takes `suffix` where the champion cannot decide by costs."""
    card = read_fitting_card(resolve_predictor(champion.ref, config=config))
    if card.kind != "survival":
        return "it has no survival curve: `hvd serve` uses it with policy.name=hvd_tau alone"
    try:
        find_costs(config)
    except UserError:
        return (
            f"type `{calibrate_command(config)}` on the machine that serves: there is no cost "
            "table here, and without one `hvd serve` decides by suffix (vLLM learns its own)"
        )
    return None


def _configured(config: Config) -> dict[str, Any]:
    """What the configuration would decide by, in the words of `_decision`."""
    name = config.policy.name
    if name not in (TAU_POLICY, COST_POLICY):
        raise UserError(f"policy.name={name} asks no predictor; compare under hvd_tau or hvd_cost")
    return {"policy": name, "tau": config.policy.tau} if name == TAU_POLICY else {"policy": name}


def _served(config: Config, pricing: Pricing, *, has_curve: bool) -> tuple[PolicyName, str]:
    """The policy to compare under and why: what would be served, unless one was configured."""
    given = config.policy.model_fields_set & {"name", "tau"}
    if given:
        words = " and ".join(f"policy.{name}" for name in sorted(given))
        return config.policy.name, f"by the {words} given"
    if pricing.file is None:
        return TAU_POLICY, "passes are counted, there is no cost table for hvd_cost"
    if not has_curve:
        return TAU_POLICY, "neither has the survival curve that hvd_cost needs"
    return COST_POLICY, "as hvd serve decides with a cost table"


def _words(gap: Gap) -> str:
    if gap.is_better:
        return "the whole interval lies above 1"
    if gap.estimate.is_degenerate:
        return "there are too few sessions to tell"
    return "the interval does not lie above 1"


def _tuned(predictor: MlpPredictor) -> TrialSettings | None:
    """The settings of the trial that made a predictor, as its card says."""
    noted = predictor.card.training.get("policy")
    return TrialSettings.from_flat(noted) if isinstance(noted, Mapping) else None


def _decision(settings: TrialSettings) -> dict[str, Any]:
    """Of a trial's settings, those that decide while decoding."""
    row = settings.flat()
    return {k: v for k, v in row.items() if k in ("policy", "tau") or k.startswith("cost.")}


def _completed(options: PromoteOptions, params: Mapping[str, str]) -> PromoteOptions:
    """The options with what the challenger's run was told filled in."""
    if lacking := _lacking(options, params):
        flags = " and ".join(f"--{name} {name.upper()}_DIR" for name in lacking)
        raise UserError(
            f"the challenger's run does not say where its {' and '.join(lacking)} are: give {flags}"
        )
    labels = options.labels or Path(params["labels"])
    traces = options.traces or Path(params["traces"])
    noted = params.get("costs")
    is_usable = noted == PASS or (noted is not None and Path(noted).is_file())
    costs = options.costs or (noted if is_usable else None)
    return replace(options, labels=labels, traces=traces, costs=costs)


def _lacking(options: PromoteOptions, params: Mapping[str, str]) -> list[str]:
    """What neither was given nor stands in the challenger's run."""
    named = {"labels": options.labels, "traces": options.traces}
    return [name for name, given in named.items() if given is None and name not in params]


def _about(outcome: Promotion) -> dict[str, Any]:
    """What stands on the promoted version."""
    gap = outcome.rows[0].gap.as_json() if outcome.rows else None
    return {
        "promotion_forced": str(outcome.reason.startswith(FORCED)).lower(),
        "promotion_reason": outcome.reason,
        "promotion_gap": gap,
        "promotion_policy": dict(outcome.policy),
    }
