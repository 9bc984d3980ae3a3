"""The invariants of the loop on a real transformer: a tiny Llama, any request, every system."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_ray.config import Config
from hvd_ray.engines.slim import SlimLayers
from hvd_ray.engines.torch_engine import TorchCache, TorchEngine
from hvd_ray.engines.torch_tiers import torch_tiers
from hvd_ray.systems import build_decoder
from hvd_ray.text import HFTextCodec
from hvd_ray.types import Completion, Request, SamplingParams
from tests.property.toy_requests import PARTS, lossless_systems, systems

CONFIG = Config.model_validate({"policy": {"tau": 1.0}})
SLIM = SlimLayers(2, frozenset({1}), frozenset({0}))
few_examples = settings(max_examples=25)


@pytest.fixture(scope="module")
def llama(tiny_llama_path: Path) -> tuple[TorchEngine, HFTextCodec]:
    return TorchEngine.load(tiny_llama_path, dtype="float32"), HFTextCodec(tiny_llama_path)


@st.composite
def requests(draw: Any) -> Request:
    """Repetitive prompts, so that drafts are found; any mixture of the common parameters."""
    stretch = draw(st.lists(st.integers(3, 299), min_size=2, max_size=8))
    prompt = tuple(stretch * draw(st.integers(1, 4)))
    max_tokens = draw(st.integers(1, 28))
    sampling = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.0, 0.4, 1.0])),
        top_k=draw(st.sampled_from([0, 3])),
        top_p=draw(st.sampled_from([1.0, 0.7])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.2])),
        frequency_penalty=draw(st.sampled_from([0.0, -1.0])),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, min(6, max_tokens))),
        stop=draw(st.sampled_from([(), ("e",), ("in",)])),
        ignore_eos=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
        logprobs=draw(st.sampled_from([None, 2])),
    )
    return Request("r", prompt, sampling)


def outcome(completion: Completion) -> tuple[object, ...]:
    """All but how it was reached; log-probabilities to what another number of rows may change."""
    chosen = completion.logprobs and [round(each.logprob, 3) for each in completion.logprobs]
    return (completion.token_ids, completion.text, completion.finish_reason, chosen)


@few_examples
@given(requests(), lossless_systems)
def test_every_system_gives_the_plain_answer_cold_and_warm(
    llama: tuple[TorchEngine, HFTextCodec], request: Request, system: str
) -> None:
    """Invariants 1, 3, 4 and 6."""
    engine, codec = llama
    plain = build_decoder("greedy", engine=engine, codec=codec, config=CONFIG).generate(request)
    parts = replace(PARTS, tiers=torch_tiers(engine, SLIM))
    tried = build_decoder(system, engine=engine, codec=codec, config=CONFIG, parts=parts)
    for number in range(2):
        generation = tried.start(replace(request, request_id=f"r{number}"))
        while not generation.is_finished:
            tried.step(generation)
            step = generation.steps[-1]
            assert step.emitted >= 1
            assert step.accepted <= step.drafted <= request.sampling.max_tokens - step.position - 1
            assert generation.state.cache.length == len(generation.context.token_ids) - 1
        tried.close(generation)
        assert outcome(generation.completion()) == outcome(plain)


@few_examples
@given(requests(), systems)
def test_the_cache_after_roll_backs_is_that_of_one_plain_pass(
    llama: tuple[TorchEngine, HFTextCodec], request: Request, system: str
) -> None:
    """Invariant 4 by value: keys of rejected rows leave no trace."""
    engine, codec = llama
    tried = build_decoder(system, engine=engine, codec=codec, config=CONFIG, parts=PARTS)
    tried.generate(request)
    generation = tried.start(replace(request, request_id="again"))
    while not generation.is_finished:
        tried.step(generation)
    tried.close(generation)
    committed = generation.context.token_ids.view()[:-1]
    fresh, used = engine.new_cache(), generation.state.cache
    assert isinstance(used, TorchCache)
    engine.forward(committed, fresh, num_logits=1)
    for one, other in zip(used.growing, fresh.growing, strict=True):
        kept = slice(0, len(committed))
        torch.testing.assert_close(
            one._keys_HSD[..., kept, :], other._keys_HSD[..., kept, :], rtol=1e-3, atol=1e-4
        )
