"""Replay: walking a trace under a policy as if decoding it, without the target.

One judge for reports, for sweeps and for advice. Under the policy that made a trace, with the
drafter in the state it was in then, replay gives the very steps of the live run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hvd_ray.context import DecodeContext
from hvd_ray.drafting.base import Drafter
from hvd_ray.payoff.cost import CostTable
from hvd_ray.payoff.features import HIGH_PAYOFF
from hvd_ray.payoff.policy import Candidates, Policy
from hvd_ray.traces.schema import Trace
from hvd_ray.traces.walk import Walk, accepted_len, walking
from hvd_ray.types import MAX_COUNT, Decision, Draft, Int32Array, Source, Step


class PayoffOutcome(NamedTuple):
    """A cache draft at a visited position: what was predicted and what it was worth."""

    position: int
    draft_len: int
    accepted_len: int
    """The true payoff, whether the draft was verified or not."""
    predicted: float | None
    tau: float | None = None
    """The threshold that the prediction was held against."""

    @property
    def is_high(self) -> bool:
        return self.accepted_len >= HIGH_PAYOFF

    @property
    def is_called_high(self) -> bool:
        """Whether the prediction exceeds tau or, where there is none, says high itself."""
        if self.predicted is None:
            return False
        return self.predicted >= HIGH_PAYOFF if self.tau is None else self.predicted > self.tau


@dataclass(frozen=True, slots=True)
class ModelDrafts:
    """How a model drafter would have fared, from the labels: replay cannot run it.

    It says what `ModelDrafter.room` says live.
    """

    source: Source
    accepted_len_T: Int32Array
    """Draft tokens that the target would have accepted at each position of the output."""
    max_draft_tokens: int = MAX_COUNT
    """Length of its drafts, where the room allows."""
    context_length: int = MAX_COUNT
    """Prompt and output tokens past which it drafts no more."""

    def room(self, context: DecodeContext) -> int:
        """The most tokens that it could draft now: none before the prompt's own pass."""
        if context.num_generated == 0:
            return 0
        return max(0, min(self.max_draft_tokens, self.context_length - len(context.token_ids)))


@dataclass(frozen=True, slots=True)
class Replay:
    """A trace, decoded again in thought."""

    trace_id: str
    steps: tuple[Step, ...]
    payoffs: tuple[PayoffOutcome, ...]
    """One for each visited position with a cache draft."""
    cost_ms: float | None = None
    """Under the cost table, if one was given."""

    @property
    def num_tokens(self) -> int:
        return sum(step.emitted for step in self.steps)


@dataclass(frozen=True, slots=True)
class Tally:
    """What a replay adds up to, without its steps."""

    num_tokens: int
    cycles: Mapping[Source, int]
    """Cycles that verified a draft of each source, or none."""
    drafted: int
    accepted: int
    num_high_payoffs: int
    num_called: int
    """Payoffs that were called high."""
    num_hits: int
    """Those of them that were."""
    num_foretold: int
    """High payoffs that a prediction was made for."""
    cost_ms: float | None

    @classmethod
    def of(cls, run: Replay) -> Tally:
        called = [payoff.is_high for payoff in run.payoffs if payoff.is_called_high]
        high = [payoff.predicted for payoff in run.payoffs if payoff.is_high]
        return cls(
            num_tokens=run.num_tokens,
            cycles=Counter(step.source for step in run.steps),
            drafted=sum(step.drafted for step in run.steps),
            accepted=sum(step.accepted for step in run.steps),
            num_high_payoffs=len(high),
            num_called=len(called),
            num_hits=sum(called),
            num_foretold=sum(predicted is not None for predicted in high),
            cost_ms=run.cost_ms,
        )


@dataclass(frozen=True, slots=True)
class ReplaySummary:
    """Many replays taken together; every ratio is a ratio of sums."""

    num_traces: int
    num_tokens: int
    num_cycles: int
    drafted: int
    accepted: int
    source_share: Mapping[Source, float]
    """Share of the cycles that verified a draft of each source, or none."""
    num_high_payoffs: int
    precision: float | None
    """Of the payoffs called high, the share that were; None where none was."""
    recall: float | None
    """Of the high payoffs, the share that was called so; None where there were none."""
    cost_ms: float | None

    @property
    def emitted_per_pass(self) -> float:
        return self.num_tokens / max(1, self.num_cycles)

    @property
    def tokens_per_second(self) -> float | None:
        return None if not self.cost_ms else 1e3 * self.num_tokens / self.cost_ms


def replay(
    trace: Trace,
    policy: Policy,
    *,
    drafter: Drafter | None = None,
    costs: CostTable | None = None,
    model: ModelDrafts | None = None,
) -> Replay:
    """Visit the positions that decoding under `policy` would visit.

    Args:
        trace: a trace with an output.
        policy: decides each cycle from what the live policy would see.
        drafter: the cache; it keeps the outputs of the traces replayed with it before, so
            traces go through it in the order in which they were decoded.
        costs: prices the cycles.
        model: stands in for the model drafter that the policy may ask for.
    """
    output = trace.output_token_ids
    steps: list[Step] = []
    payoffs: list[PayoffOutcome] = []
    with walking(trace, drafter) as walk:
        while (position := walk.context.num_generated) < len(output):
            cache = walk.look_up()
            candidates = _candidates(cache, walk, model)
            decision = policy.decide(candidates, walk.context)
            payoff = accepted_len(cache, output, position)
            draft_len, accepted = _verify(decision, candidates, payoff, position, model)
            step = _step(len(steps), position, decision, cache, draft_len, accepted, len(output))
            steps.append(step)
            if cache.token_ids:
                predicted, tau = decision.predicted_payoff, decision.tau
                payoffs.append(PayoffOutcome(position, len(cache), payoff, predicted, tau))
            is_selected = step.drafted > 0 and step.source == cache.source
            history, predicted = walk.context.history, decision.predicted_payoff
            history.note(cache, is_selected=is_selected, predicted=predicted)
            walk.commit(output[position : position + step.emitted])
            history.cycles.append(step)
    return Replay(trace.trace_id, tuple(steps), tuple(payoffs), _cost_ms(steps, costs))


def summarize(replays: Iterable[Replay]) -> ReplaySummary:
    """Sums and ratios of sums over many replays."""
    return add_up(map(Tally.of, replays))


def add_up(tallies: Iterable[Tally]) -> ReplaySummary:
    """`summarize` of the replays that were tallied."""
    runs = list(tallies)
    cycles: Counter[Source] = Counter()
    for run in runs:
        cycles.update(run.cycles)
    num_cycles = cycles.total()
    num_hits = sum(run.num_hits for run in runs)
    costs = [run.cost_ms for run in runs if run.cost_ms is not None]
    return ReplaySummary(
        num_traces=len(runs),
        num_tokens=sum(run.num_tokens for run in runs),
        num_cycles=num_cycles,
        drafted=sum(run.drafted for run in runs),
        accepted=sum(run.accepted for run in runs),
        source_share={source: count / num_cycles for source, count in cycles.items()},
        num_high_payoffs=sum(run.num_high_payoffs for run in runs),
        precision=_share(num_hits, sum(run.num_called for run in runs)),
        recall=_share(num_hits, sum(run.num_foretold for run in runs)),
        cost_ms=sum(costs) if costs and len(costs) == len(runs) else None,
    )


def _candidates(cache: Draft, walk: Walk, model: ModelDrafts | None) -> Candidates:
    if model is None:
        return Candidates(cache)
    limit = min(walk.context.room, model.room(walk.context))
    return Candidates(cache, model.source, limit)


def _verify(
    decision: Decision,
    candidates: Candidates,
    payoff: int,
    position: int,
    model: ModelDrafts | None,
) -> tuple[int, int]:
    """`(drafted, accepted)` of what the policy chose."""
    if decision.source == candidates.cache.source and decision.length > 0:
        drafted = min(decision.length, len(candidates.cache))
        return drafted, min(payoff, drafted)
    if model is not None and decision.source == model.source:
        drafted = min(decision.length, candidates.model_limit)
        return drafted, min(int(model.accepted_len_T[position]), drafted)
    return 0, 0


def _step(
    cycle: int,
    position: int,
    decision: Decision,
    cache: Draft,
    drafted: int,
    accepted: int,
    num_tokens: int,
) -> Step:
    return Step(
        cycle=cycle,
        position=position,
        source=decision.source if drafted else Source.NONE,
        drafted=drafted,
        accepted=accepted,
        emitted=min(accepted + 1, num_tokens - position),
        match_len=cache.match_len,
        score=cache.score,
        cache_draft_len=len(cache),
        predicted_payoff=decision.predicted_payoff,
        tau=decision.tau,
        reason=decision.reason,
    )


def _cost_ms(steps: Iterable[Step], costs: CostTable | None) -> float | None:
    if costs is None:
        return None
    return sum(costs.cost_ms(step.source, step.drafted + 1) for step in steps)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
