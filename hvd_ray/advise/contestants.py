"""The systems that the traffic is replayed under, and what each replay costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hvd_ray.advise.acceptance import HeadAcceptance
from hvd_ray.advise.lookups import JudgedTrace
from hvd_ray.config import Config
from hvd_ray.drafting.base import Drafter
from hvd_ray.drafting.continuing import ContinuingNgramDrafter
from hvd_ray.payoff.cost import CostTable
from hvd_ray.payoff.cost_policy import CostPolicy
from hvd_ray.payoff.estimator import PredictorEstimator
from hvd_ray.payoff.policy import (
    AlwaysCache,
    AlwaysModel,
    MatchRule,
    NeverDraft,
    Policy,
    ScoreRule,
    ThresholdPolicy,
)
from hvd_ray.traces.oracle import replay_oracle
from hvd_ray.traces.replay import Replay, replay
from hvd_ray.tuning.recorded import RecordedDrafter

GREEDY = "greedy"
ORACLE = "oracle"
WITH_HEAD = "+head"
"""Ends the name of a hybrid that falls back to a head."""

Drafts = Literal["nothing", "ngram", "cache"]


@dataclass(frozen=True, slots=True)
class Contestant:
    """A system as replay sees it; `policy` None is the oracle."""

    name: str
    policy: Policy | None
    drafts_from: Drafts = "cache"
    uses_head: bool = False

    @property
    def is_deployable(self) -> bool:
        """Whether somebody could turn it on."""
        return self.name != GREEDY and not self.name.startswith(ORACLE)


def contestants(
    config: Config,
    *,
    estimator: PredictorEstimator | None,
    costs: CostTable,
    head: HeadAcceptance | None,
) -> list[Contestant]:
    """All systems that can be judged, those with a head after those without."""
    found = [
        Contestant(GREEDY, NeverDraft(), "nothing"),
        Contestant("ngram", AlwaysCache(), "ngram"),
        Contestant("suffix", AlwaysCache()),
        *_hybrids(config, estimator, costs, None),
        Contestant(ORACLE, None),
    ]
    if head is not None:
        found += [
            Contestant("eagle3", AlwaysModel(), "nothing", uses_head=True),
            *_hybrids(config, estimator, costs, head),
            Contestant(ORACLE + WITH_HEAD, None, uses_head=True),
        ]
    return found


def _hybrids(
    config: Config,
    estimator: PredictorEstimator | None,
    costs: CostTable,
    head: HeadAcceptance | None,
) -> Iterator[Contestant]:
    ending, settings = WITH_HEAD if head else "", config.policy
    policies: dict[str, Policy] = {
        "rule_score": ScoreRule(settings.model_draft_tokens),
        "rule_match": MatchRule(settings.min_match),
    }
    if estimator is not None:
        policies["hvd_tau"] = ThresholdPolicy(estimator, settings.tau)
        if estimator.has_survival:
            policies["hvd_cost"] = cost_policy(estimator, costs, head)
    for name, policy in policies.items():
        yield Contestant(name + ending, policy, uses_head=head is not None)


def cost_policy(
    estimator: PredictorEstimator, costs: CostTable, head: HeadAcceptance | None
) -> CostPolicy:
    """`hvd_cost`, which expects of a head what the advice expects of it."""
    if head is None:
        return CostPolicy(estimator, costs)
    return CostPolicy(estimator, costs, len(head.chances), head.chances)


@dataclass(frozen=True, slots=True)
class Field:
    """The judged traces in time order, and what a head is taken to do there."""

    judged: tuple[JudgedTrace, ...]
    head: HeadAcceptance | None
    config: Config

    def replays(self, contestant: Contestant, costs: CostTable) -> list[Replay]:
        """Every judged trace under a system, in their order."""
        ngram = ContinuingNgramDrafter(self.config.drafting.ngram)
        return [self._replay(item, contestant, costs, ngram) for item in self.judged]

    def _replay(
        self, item: JudgedTrace, contestant: Contestant, costs: CostTable, ngram: Drafter
    ) -> Replay:
        model = None
        if contestant.uses_head and self.head is not None:
            model = self.head.drafts(item.trace, seed=self.config.seed)
        drafters: Mapping[str, Drafter | None] = {
            "nothing": None,
            "ngram": ngram,
            "cache": RecordedDrafter(item.record_for(contestant.policy)),
        }
        drafter = drafters[contestant.drafts_from]
        if contestant.policy is None:
            assert drafter is not None
            return replay_oracle(item.trace, drafter=drafter, costs=costs, model=model)
        return replay(item.trace, contestant.policy, drafter=drafter, model=model)


def mean_rows(replays: Sequence[Replay]) -> float:
    """Rows of a target pass that a request brings, on average."""
    drafted = [step.drafted for run in replays for step in run.steps]
    return 1.0 + sum(drafted) / max(1, len(drafted))
