"""Tiers: the gate's order, opt-in, budget, audit and fall-back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch

from hvd_ray.config import Config
from hvd_ray.decode import Decoder
from hvd_ray.engines.toy import ToyCodec, ToyEngine
from hvd_ray.engines.toy_tiers import ToyTieredCache, ToyTiers
from hvd_ray.errors import UserError
from hvd_ray.systems import Parts, build_decoder
from hvd_ray.types import Completion, Draft, Request, SamplingParams, Source, Step, Verdict
from hvd_ray.verify.audit import Audit, Trust, upper_bound
from hvd_ray.verify.break_even import BreakEven
from hvd_ray.verify.exact import VerifyState, own_token
from hvd_ray.verify.gate import GateRows, Judgement, RatioGate, Tier
from hvd_ray.verify.tiers import TieredVerifier

FORCED = {"is_forced": True, "max_miss_rate": 1, "loss_budget": 1000}


def engine(*, closeness: float = 0.6, sharpness: float = 3.0) -> ToyTiers:
    target = ToyEngine(vocab_size=8, order=1, seed=4, sharpness=sharpness)
    return ToyTiers(target, closeness)


def make(system: str = "tiered", tried: ToyTiers | None = None, **settings: object) -> Decoder:
    tried = tried or engine()
    config = Config.model_validate({"tiers": FORCED | settings})
    parts = Parts(tiers=tried)
    return build_decoder(system, engine=tried, codec=ToyCodec(), config=config, parts=parts)


def request(seed: int = 0, **changes: object) -> Request:
    values = {"max_tokens": 60, "ignore_eos": True, "seed": seed, **changes}
    prompt = (1, 2, 3, 1, 2, 3)
    sampling = SamplingParams(**values)  # type: ignore[arg-type]
    return Request(f"r{seed}", prompt, sampling, allows_loss=True)


def plainly(wanted: Request) -> Completion:
    return make("greedy").generate(wanted)


@pytest.mark.parametrize(("accept", "escalate"), [(0.5, 0.7), (0.5, 0.5), (1.2, 0.1)])
def test_thresholds_without_a_middle_band_are_refused(accept: float, escalate: float) -> None:
    with pytest.raises(UserError, match="theta_accept"):
        RatioGate(accept, escalate)


def test_the_ratio_sorts_tokens_into_tiers() -> None:
    gate = RatioGate(0.8, 0.4)
    assert [gate.tier(ratio) for ratio in (1.0, 0.8, 0.79, 0.4, 0.39)] == [
        *(Tier.ACCEPT, Tier.ACCEPT, Tier.SLIM, Tier.SLIM, Tier.FULL)
    ]
    probs_TV = torch.tensor([[0.5, 0.5, 0.0], [0.7, 0.25, 0.05], [0.1, 0.9, 0.0]])
    rows = GateRows(Draft(Source.SUFFIX, (1, 1)), probs_TV, own_ids=(0, 0, 1))
    judged = gate.judge(rows)
    assert judged.tiers == (Tier.ACCEPT, Tier.FULL)
    assert judged.draft_loss == pytest.approx((0.5, 0.75))
    assert judged.own_loss == pytest.approx((0.5, 0.3, 0.1))
    assert judged.keeps_bonus


@dataclass(frozen=True)
class Scripted:
    """A gate that says what it is told."""

    tiers: tuple[Tier, ...]
    keeps_bonus: bool = False

    def judge(self, rows: GateRows) -> Judgement:
        count = len(rows.draft)
        return Judgement(
            self.tiers[:count], (0.25,) * count, (0.125,) * (count + 1), self.keeps_bonus
        )


def verify_once(
    gate: Scripted, draft_ids: tuple[int, ...], tried: ToyTiers, *, budget: float = 9
) -> tuple[Verdict, VerifyState]:
    decoder = make(tried=tried)
    generation = decoder.start(request())
    state = generation.state
    state.context.room = 9
    verifier = TieredVerifier(tried, gate, Audit(max_miss_rate=1), loss_budget=budget)
    return verifier.verify(Draft(Source.SUFFIX, draft_ids), state), state


def slim_choice(tried: ToyTiers, prefix: tuple[int, ...]) -> int:
    return int(tried.slim_logits_after(prefix).argmax())


def test_accept_rewrite_escalate() -> None:
    tried = engine()
    prompt = request().prompt_token_ids
    verdict, state = verify_once(Scripted((Tier.ACCEPT, Tier.ACCEPT)), (5, 6), tried)
    assert verdict.token_ids == (5, 6)
    assert (verdict.accepted, verdict.full_passes, verdict.slim_passes) == (2, 0, 1)
    assert state.ledger is not None
    assert state.ledger.spent == 0.5
    assert state.verification == "tiered"

    verdict, _ = verify_once(Scripted((Tier.ACCEPT, Tier.SLIM, Tier.ACCEPT)), (5, 6, 7), tried)
    assert verdict.token_ids == (5, slim_choice(tried, (*prompt, 5)))

    gate = Scripted((Tier.ACCEPT,), keeps_bonus=True)
    verdict, _ = verify_once(gate, (5,), tried)
    assert verdict.token_ids == (5, slim_choice(tried, (*prompt, 5)))

    verdict, state = verify_once(Scripted((Tier.ACCEPT, Tier.FULL)), (5, 6), tried)
    own = int(tried.target.logits_after(prompt).argmax())
    assert own != 5
    assert verdict.token_ids == (own,), "an escalated block is checked from its first token"
    assert (verdict.full_passes, verdict.slim_passes) == (1, 1)
    assert state.verification == "full"


def test_tokens_are_committed_without_the_target_and_back_filled() -> None:
    tried = engine(closeness=0.9)
    decoder = make(tried=tried, theta_accept=0.3, theta_escalate=0.2)
    generation = decoder.start(request())
    lagged = False
    while not generation.is_finished:
        decoder.step(generation)
        cache = generation.state.cache
        assert isinstance(cache, ToyTieredCache)
        committed = generation.context.token_ids.view().tolist()
        assert cache.target.token_ids == committed[: cache.length]
        assert cache.slim.token_ids == committed[: cache.slim_length]
        lagged |= cache.length < len(committed) - 1
    decoder.close(generation)
    completion = generation.completion()
    assert lagged
    assert completion.verification == "tiered"
    assert completion.num_target_passes < len(completion.steps)


def test_without_the_requests_leave_the_answer_is_exact() -> None:
    for system in ("tiered", "cascade_token_v3"):
        for seed in range(3):
            wanted = replace(request(seed, temperature=0.9), allows_loss=False)
            got = make(system, theta_accept=0.3, theta_escalate=0.2).generate(wanted)
            assert got.token_ids == plainly(wanted).token_ids
            assert got.verification == "full"


def test_a_spent_budget_ends_the_loss() -> None:
    decoder = make(theta_accept=0.3, theta_escalate=0.2, loss_budget=0.5)
    generation = decoder.start(request(max_tokens=100))
    num_after = 0
    while not generation.is_finished:
        ledger = generation.state.ledger
        is_spent = ledger is not None and ledger.is_closed
        decoder.step(generation)
        assert not (is_spent and generation.steps[-1].slim_passes)
        num_after += is_spent
    decoder.close(generation)
    assert any(step.full_passes == 0 for step in generation.steps)
    assert num_after > 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("budget", [0.001, 0.05, 0.5, 2.0])
def test_no_block_exceeds_the_budget(temperature: float, budget: float) -> None:
    decoder, spent = make(theta_accept=0.3, theta_escalate=0.2, loss_budget=budget), 0.0
    for seed in range(8):
        generation = decoder.start(request(seed, max_tokens=100, temperature=temperature))
        while not generation.is_finished:
            decoder.step(generation)
        assert generation.state.ledger is not None
        spent = max(spent, generation.state.ledger.spent)
        decoder.close(generation)
    assert spent <= budget
    assert spent > 0 or budget < 2


def test_a_block_ends_where_it_might_exceed_the_budget() -> None:
    tried, gate = engine(), Scripted((Tier.ACCEPT, Tier.ACCEPT))
    verdict, _ = verify_once(gate, (5, 6), tried, budget=0.5)
    assert (verdict.token_ids, verdict.full_passes) == ((5, 6), 0)

    verdict, state = verify_once(gate, (5, 6), tried, budget=0.4)
    assert (verdict.token_ids, verdict.full_passes) == ((5,), 0)
    assert state.ledger is not None
    assert (state.ledger.spent, state.ledger.is_closed) == (0.25, False)

    verdict, state = verify_once(gate, (5, 6), tried, budget=0.2)
    assert (verdict.full_passes, verdict.slim_passes) == (1, 1)
    assert state.ledger is not None
    assert (state.ledger.spent, state.ledger.is_closed) == (0, True)


def test_the_bound_is_clopper_and_pearsons() -> None:
    assert upper_bound(0, 3000) == pytest.approx(0.001, abs=5e-6), "papers: 0 of 3,000"
    assert upper_bound(0, 0) == upper_bound(5, 5) == 1.0
    assert upper_bound(3, 100) == pytest.approx(0.0757, abs=2e-4)


def test_trust_is_earned_and_lost_for_good() -> None:
    audit = Audit(max_miss_rate=0.05, min_tokens=100)
    audit.add(num_tokens=80, num_missed=0)
    assert audit.trust is Trust.PROBATION
    audit.add(num_tokens=40, num_missed=0)
    assert audit.trust is Trust.TRUSTED
    audit.add(num_tokens=10, num_missed=6)
    assert audit.trust is Trust.WITHDRAWN
    audit.add(num_tokens=10_000, num_missed=0)
    assert audit.trust is Trust.WITHDRAWN


def test_a_probation_that_does_not_convince_ends() -> None:
    audit = Audit(max_miss_rate=0.05, max_probation=300)
    audit.add(num_tokens=300, num_missed=100)
    assert audit.trust is Trust.WITHDRAWN


def test_many_looks_do_not_trust_what_is_as_bad_as_the_limit() -> None:
    """The bound is looked at after every block; a slim model at the limit is seldom let through."""
    limit, block, num_runs = 0.05, 5, 200
    sizes = np.random.default_rng(0).binomial(block, limit, size=(num_runs, 400))
    num_trusted = 0
    for missed in sizes.cumsum(axis=1):
        looks = zip(range(block, 2001, block), missed.tolist(), strict=True)
        num_trusted += any(_convinces(size, missed, limit) for size, missed in looks)
    assert num_trusted / num_runs < 0.08, "about 0.23 with a bound of 95 %"


@cache
def _convinces(num_tokens: int, num_missed: int, limit: float) -> bool:
    audit = Audit(max_miss_rate=limit)
    audit.add(num_tokens=num_tokens, num_missed=num_missed)
    return audit.trust is Trust.TRUSTED


def test_trust_is_not_lost_where_it_is_won() -> None:
    """It takes more to be trusted than to stay so: a miss right after it is no end."""
    audit = Audit(max_miss_rate=0.05)
    while audit.trust is Trust.PROBATION:
        audit.add(num_tokens=50, num_missed=1)
    assert audit.trust is Trust.TRUSTED
    audit.add(num_tokens=1, num_missed=1)
    assert audit.trust is Trust.TRUSTED


def test_a_poor_slim_model_is_never_trusted() -> None:
    """On probation the target decides everything, so the answers stay exact."""
    tried = engine(closeness=0.2)
    decoder = make(tried=tried, theta_accept=0.2, theta_escalate=0.1, max_miss_rate=0.05)
    for seed in range(8):
        wanted = request(seed)
        completion = decoder.generate(wanted)
        assert completion.token_ids == plainly(wanted).token_ids
        assert completion.verification == "full"
    verifier = decoder.verifier
    assert isinstance(verifier, TieredVerifier)
    assert verifier.audit.num_missed > 0
    assert verifier.audit.trust is not Trust.TRUSTED


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lost_trust_ends_unchecked_tokens_at_once_and_for_good(temperature: float) -> None:
    """A slim model that was the target's equal becomes a bad one, as other traffic may make it."""
    tried = engine(closeness=1.0)
    decoder = make(tried=tried, theta_accept=0.3, theta_escalate=0, max_miss_rate=0.05)
    verifier = decoder.verifier
    assert isinstance(verifier, TieredVerifier)
    for seed in range(8):
        decoder.generate(request(seed, temperature=temperature))
    assert verifier.audit.trust is Trust.TRUSTED

    tried.closeness = 0.0
    before, after = steps_until_and_after_withdrawal(decoder, tried, temperature)
    assert verifier.audit.upper_bound > verifier.audit.max_miss_rate
    assert any(step.full_passes == 0 for step in before), "nothing was unchecked while trusted"
    assert len(after) > 40
    assert all((step.full_passes, step.slim_passes) == (1, 0) for step in after)

    for seed in range(100, 104):
        wanted = request(seed, temperature=temperature)
        completion = decoder.generate(wanted)
        assert completion.token_ids == plainly(wanted).token_ids
        assert completion.verification == "full"
        assert completion.num_target_passes == len(completion.steps)


def steps_until_and_after_withdrawal(
    decoder: Decoder, tried: ToyTiers, temperature: float
) -> tuple[list[Step], list[Step]]:
    """Steps of some requests; in those after it every token is the target's for its prefix."""
    verifier, before, after = decoder.verifier, list[Step](), list[Step]()
    assert isinstance(verifier, TieredVerifier)
    for seed in range(20, 30):
        generation = decoder.start(request(seed, temperature=temperature))
        while not generation.is_finished:
            is_withdrawn = verifier.audit.trust is Trust.WITHDRAWN
            passes, length = tried.target.num_passes, len(generation.context.token_ids)
            decoder.step(generation)
            (after if is_withdrawn else before).append(generation.steps[-1])
            if is_withdrawn:
                assert tried.target.num_passes == passes + 1, "the target did not look"
                assert_the_targets(generation.state, tried, length)
        decoder.close(generation)
    return before, after


def assert_the_targets(state: VerifyState, tried: ToyTiers, length: int) -> None:
    """Every committed token from `length` on is what the target takes after those before it."""
    committed, prompt_len = state.context.token_ids.view(), state.context.prompt_len
    for end in range(length, len(committed)):
        logits_V = tried.target.logits_after(committed[:end].tolist())
        assert own_token(logits_V, committed[prompt_len:end], state) == committed[end]


def test_the_audit_counts_every_unchecked_token_of_an_audited_request() -> None:
    """Those read at a back-fill and those left at the end: against a count by hand."""
    tried = engine(closeness=0.2)
    decoder = make(tried=tried, theta_accept=0.3, theta_escalate=0.2)
    num_tokens = num_missed = 0
    for seed in range(4):
        completion = decoder.generate(request(seed, temperature=0.0, min_tokens=seed))
        prefix = list(request().prompt_token_ids)
        for step in completion.steps:
            emitted = completion.token_ids[step.position : step.position + step.emitted]
            for token in emitted:
                if step.full_passes == 0:
                    num_tokens += 1
                    num_missed += int(tried.target.logits_after(prefix).argmax()) != token
                prefix.append(token)
    verifier = decoder.verifier
    assert isinstance(verifier, TieredVerifier)
    assert num_tokens > 20
    assert num_missed > 0
    assert (verifier.audit.num_tokens, verifier.audit.num_missed) == (num_tokens, num_missed)


def test_an_audit_share_of_zero_reads_nothing() -> None:
    decoder = make(theta_accept=0.3, theta_escalate=0.2, audit_share=0)
    decoder.generate(request())
    verifier = decoder.verifier
    assert isinstance(verifier, TieredVerifier)
    assert verifier.audit.num_tokens == 0


@pytest.mark.parametrize(
    ("break_even", "message"),
    [
        (None, "was not measured; run `hvd calibrate`"),
        (BreakEven(10.0, 25.0, 0.0), r"never asked .*P.escalate. 0.00, sum 0.40., and costs do"),
        (BreakEven(19.0, 25.0, 0.4), "cost 19.0/25.0 ms = 0.76, P.escalate. 0.40, sum 1.16 >= 1"),
    ],
)
def test_what_cannot_pay_is_refused_with_its_figures(
    break_even: BreakEven | None, message: str
) -> None:
    tried = engine()
    known = {} if break_even is None else {"tiered": break_even}
    parts = Parts(tiers=tried, break_even=known)
    with pytest.raises(UserError, match=message):
        build_decoder("tiered", engine=tried, codec=ToyCodec(), config=Config(), parts=parts)


def test_what_can_pay_is_built() -> None:
    tried = engine()
    parts = Parts(tiers=tried, break_even={"tiered": BreakEven(10.0, 25.0, 0.4)})
    assert build_decoder("tiered", engine=tried, codec=ToyCodec(), config=Config(), parts=parts)
    assert BreakEven(10.0, 25.0, 0.4).sum(batch_size=4) == pytest.approx(0.4 + 1 - 0.6**4)


def test_sampled_drafts_are_refused() -> None:
    tried = engine()
    config = Config.model_validate({"tiers": FORCED, "drafting": {"eagle3": {"is_sampled": True}}})
    parts = Parts(tiers=tried, head=object())  # type: ignore[arg-type]
    with pytest.raises(UserError, match="biases tiers"):
        build_decoder("tiered", engine=tried, codec=ToyCodec(), config=config, parts=parts)
