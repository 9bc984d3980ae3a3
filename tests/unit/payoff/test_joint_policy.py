"""The joint decision on curves and costs that a test can work out by hand, and by trying all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hvd_ray.context import HISTORY_LENGTH, NUM_RECENT_CYCLES, DecodeContext, DraftOutcome
from hvd_ray.payoff.cost import RowCosts
from hvd_ray.payoff.joint_policy import Float64Array, JointCostPolicy, TableCosts
from hvd_ray.payoff.policy import Candidates
from hvd_ray.types import Draft, Float32Array, Source, Step, TokenBuffer
from tests.unit.payoff.joint_reference import decide_plainly


class Curves:
    """A draft's tokens are its survival in per cent."""

    def survival_all(
        self, drafts_B: Sequence[Draft], contexts_B: Sequence[DecodeContext]
    ) -> list[Float32Array]:
        assert len(drafts_B) == len(contexts_B)
        return [np.array(draft.token_ids, dtype=np.float32) / 100 for draft in drafts_B]


@dataclass(frozen=True)
class Lines:
    """Straight costs: a pass, a row, a token of the model drafter."""

    base: float = 10.0
    row: float = 1.0
    model: float = 1.0

    def verify_ms(self, num_rows: int) -> Float64Array:
        return self.base + self.row * np.arange(num_rows + 1.0)

    def model_ms(self, num_tokens: int) -> float:
        return self.model * num_tokens


def context(*cycles: Step) -> DecodeContext:
    made = DecodeContext(TokenBuffer([1, 2, 3]), 3, max_tokens=100, room=50)
    made.history.cycles.extend(cycles)
    return made


def cache(*percent: int) -> Candidates:
    return Candidates(Draft(Source.SUFFIX, percent))


def decide(costs: Lines, *candidates: Candidates) -> list[tuple[Source, int]]:
    contexts = [context() for _ in candidates]
    decisions = JointCostPolicy(Curves(), costs).decide_all(candidates, contexts)
    return [(decision.source, decision.length) for decision in decisions]


def test_no_request_no_decision() -> None:
    assert decide(Lines()) == []


def test_rows_of_all_requests_compete() -> None:
    # two plain rows reach 2 tokens in 12 ms, so a row must be worth 1/6
    got = decide(Lines(), cache(90, 60, 10), cache(15, 10), cache(20))
    assert got[0] == (Source.SUFFIX, 2)
    assert got[1] == (Source.NONE, 0)


def test_a_batch_raises_the_price_of_a_row() -> None:
    lone, crowd = cache(90, 30), [cache(90, 30)] * 20
    assert decide(Lines(), lone) == [(Source.SUFFIX, 2)]
    assert set(decide(Lines(), *crowd)) == {(Source.SUFFIX, 1)}


def test_the_models_pass_is_shared() -> None:
    wanting = Candidates(model_source=Source.EAGLE3, model_limit=1)
    dear = Lines(base=10.0, row=0.01, model=4.0)  # at the rate of four: too much for one of them
    assert decide(dear, wanting, *[Candidates()] * 3)[0] == (Source.NONE, 0)
    assert decide(dear, *[wanting] * 4) == [(Source.EAGLE3, 1)] * 4


def test_a_prompt_that_must_be_read_first_is_paid_by_the_cycles_that_are_left() -> None:
    wanting = Candidates(model_source=Source.EAGLE3, model_limit=1, model_entry_ms=20.0)
    policy = JointCostPolicy(Curves(), Lines(row=0.1, model=0.5))
    short, long = context(), context()
    short.max_tokens, long.max_tokens = 6, 500
    assert policy.decide_all([wanting], [short])[0].source == Source.NONE
    assert policy.decide_all([wanting], [long])[0].source == Source.EAGLE3
    from_cache = [Step(i, i, Source.SUFFIX, 4, 4, 5) for i in range(60)]
    fed = context(*from_cache)
    fed.max_tokens = 500
    assert policy.decide_all([wanting], [fed])[0].source == Source.NONE, "it seldom would be asked"


def test_each_request_takes_its_better_source() -> None:
    sure = Candidates(Draft(Source.SUFFIX, (95, 90, 90, 90)), Source.EAGLE3, 4)
    unsure = Candidates(Draft(Source.SUFFIX, (10,)), Source.EAGLE3, 4)
    got = decide(Lines(row=0.1, model=0.1), sure, unsure)
    assert [source for source, _ in got] == [Source.SUFFIX, Source.EAGLE3]


def test_a_head_that_keeps_failing_is_left_alone() -> None:
    failing = [Step(i, i, Source.EAGLE3, 4, 0, 1) for i in range(60)]
    candidates = Candidates(model_source=Source.EAGLE3, model_limit=4)
    policy = JointCostPolicy(Curves(), Lines(row=0.5, model=0.5))
    assert policy.decide_all([candidates], [context()])[0].source == Source.EAGLE3
    assert policy.decide_all([candidates], [context(*failing)])[0].source == Source.NONE


@dataclass(frozen=True)
class DearSecondRow(Lines):
    """As float32 on a CPU: the second row costs nearly a pass, those after it little."""

    def verify_ms(self, num_rows: int) -> Float64Array:
        return super().verify_ms(num_rows) + 8.0 * (np.arange(num_rows + 1) > 1)


def test_a_dear_second_row_is_worth_it_for_many_tokens_or_none() -> None:
    costs = DearSecondRow(row=0.1)
    assert decide(costs, cache(60)) == [(Source.NONE, 0)]
    assert decide(costs, cache(*[90] * 8)) == [(Source.SUFFIX, 8)]


def test_the_rate_counts_each_cycle_by_its_own_rows() -> None:
    # half the cycles are plain, so half of them do not pay for the second row
    cycles = [
        Step(i, i, Source.SUFFIX, 8 * (i % 2), 4 * (i % 2), 1 + 4 * (i % 2)) for i in range(8)
    ]
    policy = JointCostPolicy(Curves(), DearSecondRow(row=0.0))
    offers = policy._offers([Candidates()], [context(*cycles)])
    rate = policy._rate(offers, policy.costs.verify_ms(16))
    assert rate == (8 + 8 * 3) / (12 * 10 + 4 * 18)


def test_a_table_for_one_request_prices_rows_and_chains() -> None:
    table = RowCosts((1, 2), (10.0, 11.0), {Source.EAGLE3: 2.0}, {Source.EAGLE3: 0.5})
    costs = TableCosts(table)
    assert costs.verify_ms(3).tolist() == [10.0, 10.0, 11.0, 12.0]
    assert costs.model_ms(4) == 4.0


_CURVE = st.lists(st.integers(1, 99), max_size=3).map(lambda c: sorted(c, reverse=True))


@given(
    curves=st.lists(_CURVE, min_size=1, max_size=3),
    row_ms=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
)
def test_no_other_cut_of_the_caches_drafts_is_worth_more(
    curves: list[list[int]], row_ms: float
) -> None:
    costs = Lines(row=row_ms)
    lengths = [length for _, length in decide(costs, *[cache(*curve) for curve in curves])]
    num = len(curves)
    rate = num / costs.verify_ms(num)[num]

    def value(cuts: Sequence[int]) -> float:
        worth = sum(sum(curve[:cut]) / 100 for curve, cut in zip(curves, cuts, strict=True))
        return float(worth - rate * costs.verify_ms(num + sum(cuts))[-1])

    best = max(value(cuts) for cuts in product(*[range(len(curve) + 1) for curve in curves]))
    assert value(lengths) >= best - 1e-6


def history_of(random: Random) -> DecodeContext:
    """Any number of cycles and outcomes, more than are kept too."""
    made = context()
    made.max_tokens = random.choice([5, 60, 1000])
    for number in range(random.choice([0, 3, NUM_RECENT_CYCLES, 3 * NUM_RECENT_CYCLES])):
        source = random.choice([Source.NONE, Source.SUFFIX, Source.EAGLE3])
        drafted = 0 if source is Source.NONE else random.randint(1, 6)
        accepted = random.randint(0, drafted)
        made.history.cycles.append(Step(number, 0, source, drafted, accepted, accepted + 1))
    for _ in range(random.choice([0, 3, 3 * HISTORY_LENGTH])):
        predicted = random.choice([None, random.uniform(0, 6)])
        made.history.outcomes.append(DraftOutcome(6, random.randint(0, 6), predicted))
    return made


def any_candidates(random: Random) -> Candidates:
    percent = sorted((random.randint(1, 99) for _ in range(random.randint(0, 8))), reverse=True)
    source = random.choice([None, Source.EAGLE3])
    entry_ms = random.choice([0.0, 0.0, 30.0])
    draft = Draft(Source.SUFFIX, tuple(percent))
    return Candidates(draft, source, random.randint(0, 6), model_entry_ms=entry_ms)


@given(
    seed=st.integers(0, 2**32),
    num_requests=st.integers(1, 9),
    costs=st.sampled_from([Lines(), Lines(row=0.13, model=0.7), DearSecondRow(row=0.21)]),
)
def test_decides_as_the_plain_reference_does(seed: int, num_requests: int, costs: Lines) -> None:
    random = Random(seed)
    contexts = [history_of(random) for _ in range(num_requests)]
    candidates = [any_candidates(random) for _ in range(num_requests)]
    curves = [
        curve.tolist() for curve in Curves().survival_all([c.cache for c in candidates], contexts)
    ]
    decisions = JointCostPolicy(Curves(), costs).decide_all(candidates, contexts)
    got = [(decision.source, decision.length) for decision in decisions]
    assert got == decide_plainly(candidates, contexts, curves, costs)
