"""Replay does what decoding would do, and the oracle does no worse than any policy."""

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest

from hvd_ray.config import Config, SuffixConfig
from hvd_ray.context import DecodeContext
from hvd_ray.drafting.suffix import SuffixDrafter
from hvd_ray.engines.toy import ToyCodec, ToyEngine
from hvd_ray.payoff.cost import PassCost, RowCosts
from hvd_ray.payoff.policy import AlwaysCache, AlwaysModel, MatchRule, NeverDraft, ThresholdPolicy
from hvd_ray.systems import Parts, build_cache_drafter, build_decoder, build_policy
from hvd_ray.traces.oracle import replay_oracle
from hvd_ray.traces.replay import ModelDrafts, replay, summarize
from hvd_ray.types import Decision, Draft, Float32Array, Request, SamplingParams, Source
from tests.property.toy_requests import HEADLESS_SYSTEMS

PHRASE = (3, 1, 4, 1, 5, 9, 2, 6)
COSTS = RowCosts((1, 2, 4, 16), (10.0, 11.0, 13.0, 25.0), {Source.SUFFIX: 0.1})
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=60),
    "sampled": SamplingParams(max_tokens=60, temperature=1.0, seed=3),
    "stop token": SamplingParams(max_tokens=60, temperature=1.3, seed=4, stop_token_ids=(1, 2)),
    "stop string": SamplingParams(max_tokens=60, temperature=1.3, seed=5, stop=("ab", "q")),
    "context": SamplingParams(max_tokens=400),
}


@dataclass(frozen=True)
class HistoryEstimator:
    """Believes that drafts go on as the last ones did; so any slip in the history shows."""

    has_survival: bool = True

    def expected_length(self, draft: Draft, context: DecodeContext) -> float:
        history = context.history
        recent = sum(outcome.accepted_len for outcome in history.outcomes)
        bonus = history.num_since_mismatch / 7 + sum(history.selections) / 5
        return len(draft) / 3 + recent / 4 + bonus - context.room / 100 - context.max_tokens / 60

    def survival(self, draft: Draft, context: DecodeContext) -> Float32Array:
        chance = 1 / (1 + 2.718 ** -(self.expected_length(draft, context) - 2))
        return np.cumprod(np.full(len(draft), chance, dtype=np.float32))


def _untimed(steps):
    return [replace(step, draft_us=0.0, verify_us=0.0) for step in steps]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("system", HEADLESS_SYSTEMS)
def test_replay_gives_the_steps_of_the_live_run(system, sampling, decode_trace):
    config = Config()
    engine = ToyEngine(order=1, vocab_size=18, sharpness=4.0, context_length=90)
    parts = Parts(HistoryEstimator(), COSTS)
    decoder = build_decoder(system, engine=engine, codec=ToyCodec(), config=config, parts=parts)
    drafter = build_cache_drafter(system, config)
    policy = build_policy(system, config, parts)
    for number in range(4):
        scope = f"scope-{number % 2}"
        prompt = (number + 1, 5, *PHRASE)
        request = Request(f"r{number}", prompt, SAMPLINGS[sampling], scope)
        trace, live = decode_trace(decoder, request)
        assert len(trace.output_token_ids) > 0
        again = replay(trace, policy, drafter=drafter)
        assert _untimed(again.steps) == _untimed(live)


def test_the_examples_above_draft_and_are_stopped_in_the_midst_of_a_run(decode_trace):
    engine = ToyEngine(order=1, vocab_size=18, sharpness=4.0, context_length=90)
    decoder = build_decoder("suffix", engine=engine, codec=ToyCodec(), config=Config())
    ends, cut_runs = set(), 0
    for number, sampling in product(range(4), SAMPLINGS.values()):
        request = Request(f"{number}-{sampling}", (number + 1, 5, *PHRASE), sampling)
        trace, steps = decode_trace(decoder, request)
        ends.add(trace.finish_reason)
        cut_runs += steps[-1].emitted < steps[-1].accepted + 1
    assert ends == {"stop", "length"}
    assert cut_runs >= 1


def test_plain_decoding_takes_a_pass_for_each_token(make_trace):
    run = replay(make_trace(output=PHRASE), NeverDraft())
    assert [step.position for step in run.steps] == list(range(len(PHRASE)))
    assert {step.source for step in run.steps} == {Source.NONE}
    assert (run.num_tokens, run.payoffs, run.cost_ms) == (8, (), None)


def test_the_same_output_again_is_drafted_from_the_first(make_trace):
    drafter = SuffixDrafter(SuffixConfig(max_tree_depth=32))
    first = make_trace("first", prompt=(7, 8), output=PHRASE * 2 + (9,))
    second = replace(first, trace_id="second")
    runs = [replay(trace, AlwaysCache(), drafter=drafter) for trace in (first, second)]
    assert len(runs[1].steps) < len(runs[0].steps)
    summary = summarize(runs)
    assert summary.num_tokens == 34
    assert summary.num_cycles == sum(len(run.steps) for run in runs)
    assert summary.emitted_per_pass == summary.num_tokens / summary.num_cycles
    assert sum(summary.source_share.values()) == pytest.approx(1)
    assert summary.accepted == sum(step.accepted for run in runs for step in run.steps)


def test_costs_are_added_up_and_give_a_throughput(make_trace):
    trace = make_trace(prompt=PHRASE * 2, output=PHRASE)
    run = replay(trace, AlwaysCache(), drafter=SuffixDrafter(), costs=COSTS)
    expected = sum(COSTS.cost_ms(step.source, step.drafted + 1) for step in run.steps)
    assert run.cost_ms == pytest.approx(expected)
    assert summarize([run]).tokens_per_second == pytest.approx(8 / expected * 1e3)
    assert summarize([run, replay(trace, NeverDraft())]).tokens_per_second is None


def test_precision_and_recall_are_those_of_high_payoffs(make_trace):
    class Guess:
        def __init__(self, *values):
            self.values = iter(values)

        def expected_length(self, draft, context):  # noqa: ARG002
            return next(self.values)

    drafter = SuffixDrafter(SuffixConfig(max_spec_factor=8.0))
    long = tuple(range(1, 18))
    replay(make_trace("before", prompt=(20,), output=long), NeverDraft(), drafter=drafter)
    trace = make_trace("now", prompt=(21,), output=(1, *long[1:10], 19, 7, 8, 18))
    policy = ThresholdPolicy(Guess(7.0, 6.5, 0.0), tau=6.0)
    run = replay(trace, policy, drafter=drafter)
    outcomes = [(p.position, p.accepted_len, p.predicted) for p in run.payoffs]
    assert [(accepted >= 6, predicted) for _, accepted, predicted in outcomes[:3]] == [
        (True, 7.0), (False, 6.5), (False, 0.0),
    ]  # fmt: skip
    summary = summarize([run])
    assert (summary.num_high_payoffs, summary.precision, summary.recall) == (1, 0.5, 1.0)


def test_what_was_skipped_is_still_scored(make_trace):
    drafter = SuffixDrafter()
    trace = make_trace(prompt=PHRASE * 2, output=PHRASE)
    run = replay(trace, MatchRule(min_match=99), drafter=drafter)
    assert len(run.steps) == len(PHRASE)
    assert max(payoff.accepted_len for payoff in run.payoffs) >= 2
    assert {payoff.predicted for payoff in run.payoffs} == {None}
    assert summarize([run]).precision is None


def test_a_decision_may_cut_the_draft(make_trace):
    class FirstTwo:
        def decide(self, candidates, context):  # noqa: ARG002
            draft = candidates.cache
            return Decision(draft.source, min(2, len(draft)))

    trace = make_trace(prompt=PHRASE * 2, output=PHRASE)
    run = replay(trace, FirstTwo(), drafter=SuffixDrafter())
    assert max(step.drafted for step in run.steps) == 2
    assert all(step.emitted == step.accepted + 1 for step in run.steps[:-1])


def test_a_model_drafter_is_replayed_from_its_labels(make_trace):
    trace = make_trace(output=tuple(range(1, 11)))
    model = ModelDrafts(Source.EAGLE3, np.array([0, 3, 0, 0, 1, 0, 9, 9, 9, 9], np.int32))
    run = replay(trace, AlwaysModel(), model=model)
    moves = [(step.position, step.drafted, step.accepted, step.emitted) for step in run.steps]
    assert moves == [(0, 0, 0, 1), (1, 8, 3, 4), (5, 4, 0, 1), (6, 3, 3, 4)]
    assert [step.source for step in run.steps] == [Source.NONE, *[Source.EAGLE3] * 3]


def test_a_model_drafter_drafts_no_more_than_its_own_length(make_trace):
    trace = make_trace(output=tuple(range(1, 11)))
    accepted_T = np.array([9, 3, 0, 0, 1, 0, 9, 9, 9, 9], np.int32)
    run = replay(trace, AlwaysModel(), model=ModelDrafts(Source.EAGLE3, accepted_T, 2))
    moves = [(step.position, step.drafted, step.accepted) for step in run.steps]
    assert moves == [(0, 0, 0), (1, 2, 2), (4, 2, 1), (6, 2, 2), (9, 0, 0)]


def test_a_model_drafter_drafts_nothing_past_its_own_context(make_trace):
    trace = make_trace(prompt=(1, 2, 3), output=tuple(range(1, 11)))
    model = ModelDrafts(Source.EAGLE3, np.zeros(10, np.int32), 4, context_length=8)
    run = replay(trace, AlwaysModel(), model=model)
    assert [step.drafted for step in run.steps] == [0, 4, 3, 2, 1, 0, 0, 0, 0, 0]


def _every_way(trace, costs, depth):
    """The least cost over every sequence of draft lengths, by brute force on fresh caches."""

    @dataclass
    class Script:
        lengths: tuple
        used: int = 0

        def decide(self, candidates, context):  # noqa: ARG002
            length = self.lengths[self.used] if self.used < len(self.lengths) else 0
            self.used += 1
            return Decision(candidates.cache.source, min(length, len(candidates.cache)))

    runs = (
        replay(trace, Script(lengths), drafter=SuffixDrafter(), costs=costs)
        for lengths in product(range(4), repeat=depth)
    )
    return min(run.cost_ms for run in runs)


def test_the_oracle_finds_the_cheapest_way(make_trace):
    trace = make_trace(prompt=(*PHRASE[:4], 9, *PHRASE), output=(*PHRASE[:3], 9))
    for costs in (PassCost(), COSTS, RowCosts((1, 2), (1.0, 1.9))):
        oracle = replay_oracle(trace, drafter=SuffixDrafter(), costs=costs)
        assert oracle.cost_ms == pytest.approx(_every_way(trace, costs, depth=4))


def test_the_oracle_keeps_the_cache_as_replay_does(make_trace):
    traces = [make_trace(f"t{i}", prompt=(i, 3), output=(*PHRASE, i)) for i in range(3)]
    by_policy, by_oracle = SuffixDrafter(), SuffixDrafter()
    for trace in traces:
        plain = replay(trace, AlwaysCache(), drafter=by_policy, costs=COSTS)
        oracle = replay_oracle(trace, drafter=by_oracle, costs=COSTS)
        assert oracle.cost_ms <= plain.cost_ms
        assert oracle.num_tokens == plain.num_tokens == len(trace.output_token_ids)
        assert len(oracle.steps) <= len(plain.steps)
    assert by_policy.num_cached_tokens == by_oracle.num_cached_tokens


def test_the_oracle_drafts_only_what_is_accepted_and_uses_the_model(make_trace):
    trace = make_trace(prompt=(1, 2), output=tuple(range(5, 15)))
    model = ModelDrafts(Source.EAGLE3, np.array([4] * 10, np.int32))
    run = replay_oracle(trace, drafter=SuffixDrafter(), model=model)
    assert [step.emitted for step in run.steps] == [1, 5, 4]
    assert [step.source for step in run.steps] == [Source.NONE, Source.EAGLE3, Source.EAGLE3]


def test_the_oracle_asks_no_more_of_the_model_than_it_drafts(make_trace):
    """Chains may be shorter than those labelled, and end with the head's own context."""
    trace = make_trace(prompt=(1, 2), output=tuple(range(5, 15)))
    labels = np.array([4] * 10, np.int32)
    short = ModelDrafts(Source.EAGLE3, labels, max_draft_tokens=2)
    run = replay_oracle(trace, drafter=SuffixDrafter(), model=short)
    assert [step.emitted for step in run.steps] == [1, 3, 3, 3]
    small = ModelDrafts(Source.EAGLE3, labels, context_length=5)
    run = replay_oracle(trace, drafter=SuffixDrafter(), model=small)
    assert [step.drafted for step in run.steps if step.drafted] == [2]


@pytest.mark.parametrize(
    ("rows", "times"),
    [
        ((), ()),
        ((1, 2), (1.0,)),
        ((2, 1), (1.0, 2.0)),
        ((0, 1), (1.0, 2.0)),
        ((1, 2), (2.0, 1.0)),
        ((1,), (0.0,)),
        ((1,), (float("nan"),)),
    ],
)
def test_an_impossible_cost_table_is_refused(rows, times):
    with pytest.raises(ValueError, match="cost table"):
        RowCosts(rows, times)


def test_costs_are_linear_between_the_measured_rows_and_beyond_them():
    assert COSTS.cost_ms(Source.NONE, 1) == 10
    assert COSTS.cost_ms(Source.NGRAM, 3) == pytest.approx(12)
    assert COSTS.cost_ms(Source.SUFFIX, 16) == pytest.approx(25.1)
    assert COSTS.cost_ms(Source.NONE, 28) == pytest.approx(37)
