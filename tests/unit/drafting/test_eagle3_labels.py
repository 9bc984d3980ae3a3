"""Labels of a head's chains: what the live drafter gets, so that replay repeats live runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from hvd_ray.config import Config
from hvd_ray.context import DecodeContext
from hvd_ray.decode import Decoder
from hvd_ray.drafting.eagle3 import Eagle3Head
from hvd_ray.drafting.eagle3_drafter import Eagle3Drafter
from hvd_ray.drafting.eagle3_labels import ChainLabeller
from hvd_ray.engines.torch_engine import TorchEngine
from hvd_ray.payoff.cost import RowCosts
from hvd_ray.payoff.policy import AlwaysModel, NeverDraft
from hvd_ray.systems import Parts, build_cache_drafter, build_decoder, build_policy
from hvd_ray.text import HFTextCodec
from hvd_ray.traces.replay import ModelDrafts, replay
from hvd_ray.traces.schema import Trace
from hvd_ray.types import Completion, Draft, Float32Array, Request, SamplingParams, Source, Step

from .eagle3_heads import head_of_words

LAYERS = (0, 1, 2)
WORDS = (7, 31, 77)
"""All that the target may say: a random head of these words is right every third time."""
ONLY_WORDS = dict.fromkeys(WORDS, 60.0)
COSTS = RowCosts((1, 2, 4, 16), (10.0, 11.0, 13.0, 25.0), {Source.SUFFIX: 0.1, Source.EAGLE3: 0.2})


@dataclass(frozen=True)
class HistoryEstimator:
    """Believes that drafts go on as the last ones did; so any slip in the history shows."""

    has_survival: bool = True

    def expected_length(self, draft: Draft, context: DecodeContext) -> float:
        history = context.history
        recent = sum(outcome.accepted_len for outcome in history.outcomes)
        cycles = sum(cycle.accepted - cycle.drafted / 3 for cycle in history.cycles)
        return len(draft) / 3 + recent / 9 + cycles / 9 + sum(history.selections) / 5

    def survival(self, draft: Draft, context: DecodeContext) -> Float32Array:
        chance = 1 / (1 + 2.718 ** -(self.expected_length(draft, context) - 1))
        return np.cumprod(np.full(len(draft), chance, dtype=np.float32))


PARTS = Parts(HistoryEstimator(), COSTS)


@pytest.fixture(scope="module")
def engine(tiny_llama_path: Path) -> TorchEngine:
    return TorchEngine.load(tiny_llama_path, dtype="float32", hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def codec(tiny_llama_path: Path) -> HFTextCodec:
    return HFTextCodec(tiny_llama_path)


@pytest.fixture(scope="module")
def head(engine: TorchEngine) -> Eagle3Head:
    return head_of_words(engine, WORDS, layers=LAYERS, max_position_embeddings=90)


def _prompt(seed: int, length: int = 12) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).choice(WORDS, length).tolist())


def _sampling(**changes: object) -> SamplingParams:
    values: dict[str, object] = {"max_tokens": 40, "ignore_eos": True, "logit_bias": ONLY_WORDS}
    return SamplingParams(**values | changes)  # type: ignore[arg-type]


SAMPLINGS = {
    "greedy": _sampling(),
    "sampled": _sampling(temperature=1.0, seed=11),
    "stop string": _sampling(temperature=1.5, seed=4, stop=("zzzz",)),
    "past the head's context": _sampling(max_tokens=100, temperature=1.2, seed=7),
}


def _trace(request: Request, done: Completion, engine: TorchEngine) -> Trace:
    return Trace(
        trace_id=request.request_id,
        prompt_id=request.request_id,
        workload="w",
        family="f",
        scope=request.scope,
        session_id="s",
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        model="tiny",
        tokenizer_sha="",
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=done.token_ids,
        finish_reason=done.finish_reason,
        sampling=request.sampling,
        context_length=engine.capabilities.context_length,
    )


def _untimed(steps: tuple[Step, ...]) -> list[Step]:
    return [replace(step, draft_us=0.0, verify_us=0.0) for step in steps]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("system", ["eagle3", "rule_score", "hvd_tau", "hvd_cost"])
def test_replay_from_labels_repeats_a_live_run_with_the_head(
    system: str, sampling: str, engine: TorchEngine, codec: HFTextCodec, head: Eagle3Head
) -> None:
    """Invariant 5, with a model drafter: step for step, decisions and reasons included."""
    config = Config.model_validate(
        {"policy": {"tau": 2.5}, "drafting": {"suffix": {"max_spec_factor": 1.0}}}
    )
    parts = replace(PARTS, head=head)
    decoder = build_decoder(system, engine=engine, codec=codec, config=config, parts=parts)
    drafter, policy = build_cache_drafter(system, config), build_policy(system, config, parts)
    label = ChainLabeller(engine, head, num_tokens=4)
    sources: set[Source] = set()
    for number in range(4):
        request = Request(f"r{number}", _prompt(number), SAMPLINGS[sampling])
        done = decoder.generate(request)
        accepted_T = label(request.prompt_token_ids, done.token_ids)
        model = ModelDrafts(Source.EAGLE3, accepted_T, 4, head.config.max_position_embeddings)
        again = replay(_trace(request, done, engine), policy, drafter=drafter, model=model)
        assert _untimed(again.steps) == _untimed(done.steps)
        sources |= {step.source for step in done.steps if step.accepted}
    assert Source.EAGLE3 in sources, "no chain was ever right: a weak example"
    assert (Source.SUFFIX in sources) == (system != "eagle3")


@pytest.fixture
def recorded(
    engine: TorchEngine, codec: HFTextCodec, head: Eagle3Head
) -> tuple[Request, Completion]:
    decoder = Decoder(engine, codec, NeverDraft(), None, Eagle3Drafter(head, 300))
    request = Request("r", _prompt(9), _sampling(max_tokens=90, temperature=1.0, seed=12))
    return request, decoder.generate(request)


def _live_chains(
    engine: TorchEngine, codec: HFTextCodec, head: Eagle3Head, request: Request, *, length: int
) -> Iterator[tuple[int, ...]]:
    """What the live drafter proposes at every position, one token at a time."""
    drafter = Eagle3Drafter(head, engine.capabilities.vocab_size, length)
    decoder = Decoder(engine, codec, NeverDraft(), None, drafter)
    generation = decoder.start(request)
    while not generation.is_finished:
        yield drafter.propose("r", length).token_ids
        decoder.step(generation)
    decoder.close(generation)


@pytest.mark.parametrize("roots_at_once", [512, 7])
def test_labels_are_the_live_drafters_at_every_position(
    roots_at_once: int,
    engine: TorchEngine,
    codec: HFTextCodec,
    head: Eagle3Head,
    recorded: tuple[Request, Completion],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also past the head's own context, and however many roots are drafted at once."""
    monkeypatch.setattr("hvd_ray.drafting.eagle3_chain.ROOTS_AT_ONCE", roots_at_once)
    request, done = recorded
    output = done.token_ids
    expected = []
    for position, chain in enumerate(_live_chains(engine, codec, head, request, length=3)):
        ahead = output[position : position + len(chain)]
        matches = [guess == token for guess, token in zip(chain, ahead, strict=False)]
        expected.append((*matches, False).index(False))
    found = ChainLabeller(engine, head, 3)(request.prompt_token_ids, output)
    assert found.tolist() == expected
    assert set(found.tolist()) >= {0, 1, 3}
    assert found.dtype == np.int32
    assert found[90 - 12 :].tolist() == [0] * 12, "past the head's context"


@pytest.mark.parametrize("num_output", [0, 1, 2])
def test_the_shortest_outputs(num_output: int, engine: TorchEngine, head: Eagle3Head) -> None:
    found = ChainLabeller(engine, head, 4)(_prompt(1), WORDS[:num_output])
    assert len(found) == num_output
    assert not found[:1].any()


def test_a_prompt_past_the_heads_context_has_no_drafts(
    engine: TorchEngine, head: Eagle3Head
) -> None:
    assert ChainLabeller(engine, head, 4)(_prompt(1, 95), WORDS * 3).tolist() == [0] * 9


def test_the_example_drafts_enough_to_compare(
    engine: TorchEngine, codec: HFTextCodec, head: Eagle3Head
) -> None:
    drafter = Eagle3Drafter(head, engine.capabilities.vocab_size)
    done = Decoder(engine, codec, AlwaysModel(), None, drafter).generate(
        Request("r", _prompt(2), SAMPLINGS["sampled"])
    )
    assert done.emitted_per_pass > 1.2
