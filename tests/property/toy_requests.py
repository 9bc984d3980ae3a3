"""Strategies shared by the property tests: toy engines and every kind of request for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from hvd_ray.config import Config
from hvd_ray.context import DecodeContext
from hvd_ray.decode import Decoder
from hvd_ray.engines.toy import ToyCodec, ToyEngine
from hvd_ray.engines.toy_tiers import ToyTiers
from hvd_ray.payoff.cost import RowCosts
from hvd_ray.systems import NEEDS, SYSTEMS, Need, Parts, build_decoder
from hvd_ray.types import Draft, Float32Array, Request, SamplingParams

VOCAB = 12


class ScoreAsPayoff:
    """A payoff estimator that a test can predict: the draft's own score."""

    has_survival = True

    def expected_length(self, draft: Draft, context: DecodeContext) -> float:  # noqa: ARG002
        return draft.score

    def survival(self, draft: Draft, context: DecodeContext) -> Float32Array:  # noqa: ARG002
        return np.array(draft.probs, dtype=np.float32)


PARTS = Parts(ScoreAsPayoff(), RowCosts((1, 64), (10.0, 20.0)))
"""All that a system may need but a head and a slim model."""
NESTED_SYSTEMS = ("nested", "self_spec", "ngram+nested", "hvd_tau+nested", "hvd_cost+nested")
HEADLESS_SYSTEMS = tuple(s for s in SYSTEMS if Need.HEAD not in NEEDS.get(s, ()))


def decoder(system: str, engine: ToyEngine, config: Config | None = None) -> Decoder:
    """A cold decoder of any system over a toy engine; `hvd_tau` with a low threshold."""
    config = config or Config.model_validate({"policy": {"tau": 1.5}})
    parts = replace(PARTS, tiers=ToyTiers(engine))
    return build_decoder(system, engine=engine, codec=ToyCodec(), config=config, parts=parts)


systems = st.sampled_from(HEADLESS_SYSTEMS)
lossless_systems = st.sampled_from((*HEADLESS_SYSTEMS, *NESTED_SYSTEMS))
tokens = st.integers(1, VOCAB - 1)
prompts = st.lists(tokens, min_size=1, max_size=40).map(tuple)
engines = st.builds(
    ToyEngine,
    vocab_size=st.just(VOCAB),
    order=st.integers(1, 3),
    seed=st.integers(0, 1000),
    sharpness=st.sampled_from([0.5, 3.0, 8.0]),
    context_length=st.sampled_from([48, 128]),
)
stop_strings = st.lists(st.text("abcdefghijk", min_size=1, max_size=3), max_size=2).map(tuple)


@st.composite
def sampling(draw: Any, *, greedy: bool | None = None) -> SamplingParams:
    """Any mixture of the sampling parameters."""
    is_greedy = draw(st.booleans()) if greedy is None else greedy
    max_tokens = draw(st.integers(1, 60))
    return SamplingParams(
        temperature=0.0 if is_greedy else draw(st.sampled_from([0.3, 1.0, 1.7])),
        top_k=draw(st.sampled_from([0, 0, 1, 4])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.6])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.2])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.9])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, -0.7])),
        logit_bias=draw(st.sampled_from([{}, {}, {3: 4.0, 5: -100.0}])),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, min(10, max_tokens))),
        stop=draw(stop_strings),
        stop_token_ids=draw(st.sampled_from([(), (), (7,)])),
        ignore_eos=draw(st.booleans()),
        seed=draw(st.integers(-5, 10_000)),
        logprobs=draw(st.sampled_from([None, 0, 3])),
    )


@st.composite
def requests(draw: Any, *, greedy: bool | None = None) -> Request:
    return Request("r", draw(prompts), draw(sampling(greedy=greedy)))
