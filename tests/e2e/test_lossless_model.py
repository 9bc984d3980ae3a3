"""The default model in float32: over 2,000 greedy tokens, every system, 0 differing tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hvd_ray.bench.workloads import Prompt, load_shipped, shipped_workloads
from hvd_ray.config import Config
from hvd_ray.decode import Decoder
from hvd_ray.engines.slim import SlimLayers
from hvd_ray.engines.torch_engine import TorchEngine
from hvd_ray.engines.torch_tiers import torch_tiers
from hvd_ray.systems import build_decoder, load_head
from hvd_ray.text import HFTextCodec
from hvd_ray.types import Completion, Request, SamplingParams, Source, Step
from tests.property.toy_requests import HEADLESS_SYSTEMS, PARTS

NUM_PROMPTS = 20
MAX_TOKENS = 110
SAMPLED = {"open_chat": 0.7}
"""Sampled with a seed: the same tokens all the same, since the random number belongs to the
position."""


@pytest.fixture(scope="module")
def engine(default_model_path: Path) -> TorchEngine:
    return TorchEngine.load(default_model_path, dtype="float32")


@pytest.fixture(scope="module")
def codec(default_model_path: Path) -> HFTextCodec:
    return HFTextCodec(default_model_path)


@pytest.fixture(scope="module")
def requests(codec: HFTextCodec) -> list[Request]:
    """The shortest prompts of every shipped workload, so that the time goes into decoding."""
    chosen: list[Request] = []
    per_workload = -(-NUM_PROMPTS // len(shipped_workloads()))
    for name in shipped_workloads():
        encoded = [_request(prompt, codec) for prompt in load_shipped([name]).prompts]
        chosen += sorted(encoded, key=lambda request: len(request.prompt_token_ids))[:per_workload]
    return chosen


def _request(prompt: Prompt, codec: HFTextCodec) -> Request:
    messages = [{"role": m.role, "content": m.content} for m in prompt.messages]
    sampling = SamplingParams(
        temperature=SAMPLED.get(prompt.workload, 0.0), max_tokens=MAX_TOKENS, seed=1
    )
    return Request(f"{prompt.workload}-{prompt.id}", tuple(codec.encode_chat(messages)), sampling)


@pytest.fixture(scope="module")
def plain(engine: TorchEngine, codec: HFTextCodec, requests: list[Request]) -> list[Completion]:
    decoder = _decoder("greedy", engine, codec)
    return [decoder.generate(request) for request in requests]


def _decoder(system: str, engine: TorchEngine, codec: HFTextCodec) -> Decoder:
    config = Config.model_validate({"policy": {"tau": 2.0}})
    return build_decoder(system, engine=engine, codec=codec, config=config, parts=PARTS)


COLD = ("ngram", "suffix")
WARM = tuple(name for name in HEADLESS_SYSTEMS if name not in ("greedy", "ngram"))


@pytest.mark.model
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("system", "is_warm"), [*((s, False) for s in COLD), *((s, True) for s in WARM)]
)
def test_identical_to_plain_decoding(
    system: str,
    is_warm: bool,
    engine: TorchEngine,
    codec: HFTextCodec,
    requests: list[Request],
    plain: list[Completion],
) -> None:
    """Cold: as drafts come, many rejected. Warm: the answers are known, drafts are long."""
    decoder = _decoder(system, engine, codec)
    if is_warm:
        _fill(decoder, requests, plain)
    drafted = 0
    for request, wanted in zip(requests, plain, strict=True):
        got = decoder.generate(request)
        assert got.token_ids == wanted.token_ids, request.request_id
        assert (got.text, got.finish_reason) == (wanted.text, wanted.finish_reason)
        drafted += sum(step.drafted for step in got.steps)
    assert drafted > 100, "a comparison without drafts compares nothing"


def _fill(decoder: Decoder, requests: list[Request], outputs: list[Completion]) -> None:
    drafter = decoder.cache_drafter
    assert drafter is not None
    for request, output in zip(requests, outputs, strict=True):
        drafter.start(request)
        drafter.observe(request.request_id, output.token_ids, None)
        drafter.stop(request.request_id)


@pytest.mark.model
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("system", ["eagle3", "eagle3_tree", "hvd_cost"])
def test_identical_with_the_shipped_head(
    system: str,
    engine: TorchEngine,
    codec: HFTextCodec,
    requests: list[Request],
    plain: list[Completion],
) -> None:
    """Chains and trees of the head, chains between cache drafts; it must also be of some use."""
    head, reading = load_head(Config(), engine)
    parts = replace(PARTS, head=head)
    decoder = build_decoder(system, engine=reading, codec=codec, config=Config(), parts=parts)
    steps: list[Step] = []
    for request, wanted in list(zip(requests, plain, strict=True))[::3]:
        got = decoder.generate(request)
        assert got.token_ids == wanted.token_ids, request.request_id
        steps += [step for step in got.steps if step.source is Source.EAGLE3]
    assert len(steps) > 20
    assert sum(step.accepted for step in steps) > 0.2 * len(steps), "a dead drafter (case M06)"


SLIM = {
    "prefix": SlimLayers.prefix(20, num_layers=30),
    "mask": SlimLayers.without(frozenset({7, 12, 18, 23}), num_layers=30),
}


@pytest.mark.model
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("system", "slim"),
    [
        ("suffix+nested", "mask"),
        ("ngram+nested", "prefix"),
        ("greedy+nested", "mask"),
        ("eagle3+nested", "prefix"),
        ("hvd_cost+nested", "mask"),
    ],
)
def test_identical_behind_a_slim_model(
    system: str,
    slim: str,
    engine: TorchEngine,
    codec: HFTextCodec,
    requests: list[Request],
    plain: list[Completion],
) -> None:
    """Every source in front of a slim model; the slim model must be of some use."""
    head, reading = load_head(Config(), engine)
    parts = replace(PARTS, head=head, tiers=torch_tiers(reading, SLIM[slim]))
    decoder = build_decoder(system, engine=reading, codec=codec, config=Config(), parts=parts)
    for request, wanted in list(zip(requests, plain, strict=True))[::7]:
        got = decoder.generate(request)
        assert got.token_ids == wanted.token_ids, request.request_id
        assert got.verification == "nested"
        assert got.num_target_passes < len(got.token_ids)


@pytest.mark.model
@pytest.mark.timeout(3600)
def test_the_comparison_is_large_enough(plain: list[Completion]) -> None:
    greedy = [c for c in plain if not c.request_id.startswith(tuple(SAMPLED))]
    assert len(plain) >= NUM_PROMPTS
    assert sum(len(completion.token_ids) for completion in greedy) >= 1500
    assert sum(len(completion.token_ids) for completion in plain) >= 2000
