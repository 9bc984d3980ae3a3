"""The EAGLE-3 drafter in the loop: lossless, and right after cycles in which it was skipped."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hvd_ray.bench.calibrate import measure_model_draft
from hvd_ray.context import DecodeContext
from hvd_ray.decode import Decoder
from hvd_ray.drafting.eagle3 import Eagle3Config, Eagle3Head
from hvd_ray.drafting.eagle3_drafter import Eagle3Drafter
from hvd_ray.drafting.suffix import SuffixDrafter
from hvd_ray.engines.torch_engine import TorchEngine
from hvd_ray.payoff.policy import AlwaysModel, Candidates, NeverDraft
from hvd_ray.text import HFTextCodec
from hvd_ray.types import Decision, Request, SamplingParams, Source

from .eagle3_heads import random_head

NUM_DRAFT = 3


@pytest.fixture(scope="module")
def engine(tiny_llama_path: Path) -> TorchEngine:
    return TorchEngine.load(tiny_llama_path, dtype="float32", hidden_layers=(0, 1, 1))


@pytest.fixture(scope="module")
def codec(tiny_llama_path: Path) -> HFTextCodec:
    return HFTextCodec(tiny_llama_path)


@pytest.fixture(scope="module")
def head(engine: TorchEngine) -> Eagle3Head:
    """A random head of the tiny target's width, with the target's whole vocabulary."""
    config = engine.model.config

    def fit(base: Eagle3Config) -> Eagle3Config:
        return replace(
            base,
            vocab_size=config.vocab_size,
            draft_vocab_size=config.vocab_size,
            target_hidden_size=config.hidden_size,
            aux_layer_ids=(0, 1, 1),
        )

    return random_head(variant=fit)


@dataclass
class SometimesModel:
    """The model drafter in the cycles of a pattern, the cache in the others."""

    pattern: tuple[bool, ...]
    cycle: int = 0

    def decide(self, candidates: Candidates, context: DecodeContext) -> Decision:  # noqa: ARG002
        asks = self.pattern[self.cycle % len(self.pattern)]
        self.cycle += 1
        if asks:
            return Decision(Source.EAGLE3, min(NUM_DRAFT, candidates.model_limit))
        return Decision(candidates.cache.source, len(candidates.cache))


@dataclass
class Listening:
    """An EAGLE-3 drafter that also remembers what it proposed after how many tokens."""

    inner: Eagle3Drafter
    proposals: dict[int, tuple[int, ...]] = field(default_factory=dict)
    source: Source = Source.EAGLE3

    def room(self, request_id: str) -> int:
        return self.inner.room(request_id)

    def start(self, request: Request) -> None:
        self.inner.start(request)

    def observe(self, request_id: str, token_ids: tuple[int, ...], hidden: object | None) -> None:
        self.inner.observe(request_id, token_ids, hidden)

    def propose(self, request_id: str, limit: int):  # type: ignore[no-untyped-def]
        position = len(self.inner._active[request_id].token_ids)
        draft = self.inner.propose(request_id, limit)
        self.proposals[position] = draft.token_ids
        return draft

    def stop(self, request_id: str) -> None:
        self.inner.stop(request_id)


def prompt(seed: int = 0) -> tuple[int, ...]:
    ids = np.random.default_rng(seed).integers(1, 200, 7)
    return tuple(int(token) for token in np.tile(ids, 3))


def make(engine: TorchEngine, codec: HFTextCodec, policy: object, drafter: object) -> Decoder:
    return Decoder(engine, codec, policy, SuffixDrafter(), drafter)  # type: ignore[arg-type]


@pytest.mark.parametrize("pattern", [(False, True), (False, False, False, True), (True, False)])
def test_h01_proposals_after_skipped_cycles(
    engine: TorchEngine, codec: HFTextCodec, head: Eagle3Head, pattern: tuple[bool, ...]
) -> None:
    """Invariant 4: the same proposals as of a drafter that never skipped a cycle."""
    request = Request("r", prompt(), SamplingParams(max_tokens=50, ignore_eos=True))
    vocab = engine.capabilities.vocab_size
    skipping = Listening(Eagle3Drafter(head, vocab))
    make(engine, codec, SometimesModel(pattern), skipping).generate(request)
    assert len(skipping.proposals) > 5
    steady = Listening(Eagle3Drafter(head, vocab))
    reference = make(engine, codec, SteadyAt(steady), steady)
    reference.generate(request)
    for position, proposal in skipping.proposals.items():
        wanted = steady.proposals[position]
        assert proposal == wanted[: len(proposal)], position


@dataclass
class SteadyAt:
    """Asks the model drafter before every single token, so that every position has a proposal."""

    listening: Listening

    def decide(self, candidates: Candidates, context: DecodeContext) -> Decision:  # noqa: ARG002
        self.listening.propose("r", NUM_DRAFT)
        return Decision(Source.NONE, 0)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_chains_are_lossless(
    engine: TorchEngine, codec: HFTextCodec, head: Eagle3Head, temperature: float
) -> None:
    """Arg-max chains leave the tokens alone, greedy and with a seed."""
    vocab = engine.capabilities.vocab_size
    tried = make(engine, codec, SometimesModel((True,)), Eagle3Drafter(head, vocab))
    plain = make(engine, codec, NeverDraft(), Eagle3Drafter(head, vocab))
    for seed in range(3):
        sampling = SamplingParams(
            temperature=temperature, max_tokens=40, seed=seed, ignore_eos=True
        )
        request = Request("r", prompt(seed), sampling)
        got, wanted = tried.generate(request), plain.generate(request)
        assert got.token_ids == wanted.token_ids
        assert sum(step.drafted for step in got.steps) > 0


def test_sampled_chains_carry_their_distribution(
    engine: TorchEngine, codec: HFTextCodec, head: Eagle3Head
) -> None:
    drafter = Eagle3Drafter(head, engine.capabilities.vocab_size, is_sampled=True)
    decoder = make(engine, codec, AlwaysModel(), drafter)
    sampling = SamplingParams(temperature=1.0, max_tokens=30, seed=1, ignore_eos=True)
    generation = decoder.start(Request("r", prompt(), sampling))
    decoder.step(generation)
    draft = drafter.propose("r", 4)
    assert draft.is_sampled
    assert draft.proposal_probs_KV is not None
    np.testing.assert_allclose(draft.proposal_probs_KV.sum(axis=1), 1.0, atol=1e-6)
    for row, token in enumerate(draft.token_ids):
        assert draft.proposal_probs_KV[row, token] == pytest.approx(draft.probs[row], abs=1e-6)
    decoder.close(generation)


def test_t12_past_its_own_context_it_drafts_nothing(
    engine: TorchEngine, codec: HFTextCodec, head: Eagle3Head
) -> None:
    short = Eagle3Head(replace(head.config, max_position_embeddings=30), head.weights)
    drafter = Eagle3Drafter(short, engine.capabilities.vocab_size)
    request = Request("r", prompt(), SamplingParams(max_tokens=30, ignore_eos=True))
    completion = make(engine, codec, SometimesModel((True,)), drafter).generate(request)
    assert len(completion.token_ids) == 30
    late = [step for step in completion.steps if step.position + 21 >= 30]
    assert late
    assert all(step.drafted == 0 for step in late)
    assert any(step.drafted for step in completion.steps)


def test_proposing_twice_gives_the_same(
    engine: TorchEngine, codec: HFTextCodec, head: Eagle3Head
) -> None:
    drafter = Eagle3Drafter(head, engine.capabilities.vocab_size)
    decoder = make(engine, codec, NeverDraft(), drafter)
    generation = decoder.start(Request("r", prompt(), SamplingParams(max_tokens=9)))
    assert drafter.propose("r", 4).token_ids == (), "nothing before the prompt's pass"
    decoder.step(generation)
    with torch.inference_mode():
        first = drafter.propose("r", 4)
    assert len(first) == 4
    assert drafter.propose("r", 4) == first
    assert drafter.propose("r", 2).token_ids == first.token_ids[:2]


def test_a_chain_has_a_fixed_and_a_running_cost(engine: TorchEngine, head: Eagle3Head) -> None:
    drafter = Eagle3Drafter(head, engine.capabilities.vocab_size)
    fixed_ms, token_ms = measure_model_draft(engine, drafter, context_len=40, num_repeats=9)
    assert fixed_ms >= 0
    assert token_ms > 0
    assert not drafter._active, "the measurement leaves no request behind"


def test_the_drafter_keeps_to_its_own_length(
    engine: TorchEngine, codec: HFTextCodec, head: Eagle3Head
) -> None:
    drafter = Eagle3Drafter(head, engine.capabilities.vocab_size, max_draft_tokens=2)
    request = Request("r", prompt(), SamplingParams(max_tokens=12, ignore_eos=True))
    completion = make(engine, codec, AlwaysModel(), drafter).generate(request)
    assert max(step.drafted for step in completion.steps) == 2


def test_a_chain_grows_without_reading_a_tensor(head: Eagle3Head) -> None:
    """On a GPU each reading waits for all that is queued; `meta` refuses them."""
    away = Eagle3Head(head.config, head.weights.on(torch.device("meta")))
    drafter = Eagle3Drafter(away, head.config.vocab_size)
    kv, width = away.new_kv(), head.config.hidden_size
    normed_TH, feature_TH = away.extend(
        kv, torch.empty(5, dtype=torch.int64, device="meta"), torch.empty(5, width, device="meta")
    )
    drawn = drafter._likeliest(away.logits(normed_TH[-1:]))
    normed_1H, _ = away.extend(kv, drawn.token_1, feature_TH[-1:])
    assert drawn.token_1.shape == drawn.prob_1.shape == (1,)
    assert normed_1H.shape == (1, width)
