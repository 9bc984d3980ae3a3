"""Invariants 1 and 6 on a GPU: every system gives the plain answer, whatever a request asks for.

Without a GPU one system is tried on the CPU, and what no other test runs through the real engine.
float32 and a tiny Llama whose best logit stands clear of the second, so that a kernel's order of
additions flips nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hvd_ray.config import Config
from hvd_ray.drafting.eagle3 import Eagle3Head
from hvd_ray.engines.slim import SlimLayers
from hvd_ray.engines.torch_engine import TorchEngine
from hvd_ray.engines.torch_tiers import torch_tiers
from hvd_ray.systems import Parts, build_decoder
from hvd_ray.text import HFTextCodec
from hvd_ray.types import Completion, Request, SamplingParams
from tests.property.toy_requests import PARTS
from tests.unit.drafting.eagle3_heads import head_of_words

LAYERS = (0, 1, 2)
WORDS = (7, 31, 77, 120)
ONLY_WORDS = dict.fromkeys(WORDS, 60.0)
"""All that the target may say in some requests, so that a random head is often right."""
CONFIG = Config.model_validate({"policy": {"tau": 1.0}})


@dataclass(frozen=True)
class Target:
    engine: TorchEngine
    codec: HFTextCodec
    parts: Parts


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def target(request: pytest.FixtureRequest, tiny_llama_path: Path) -> Target:
    from transformers import AutoModelForCausalLM

    device = torch.device(request.param)
    if device.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    model = AutoModelForCausalLM.from_pretrained(str(tiny_llama_path), dtype=torch.float32)
    engine = TorchEngine.from_model(model.to(device), hidden_layers=LAYERS)
    head = head_of_words(engine, WORDS, layers=LAYERS)
    head = Eagle3Head(head.config, head.weights.on(device))
    tiers = torch_tiers(engine, SlimLayers(2, skipped_mlp=frozenset({1})))
    return Target(engine, HFTextCodec(tiny_llama_path), replace(PARTS, head=head, tiers=tiers))


def _requests(**sampling_fields: Any) -> list[Request]:
    """Repetitive prompts, greedy and seeded, of any token and of a few."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(8):
        prompt = np.tile(rng.integers(3, 299, 7), 3) if number % 2 else rng.choice(WORDS, 20)
        sampling = SamplingParams(
            temperature=(0.0, 0.0, 0.8, 0.8)[number % 4],
            max_tokens=24,
            seed=number,
            ignore_eos=True,
            logit_bias={} if number % 2 else ONLY_WORDS,
            **sampling_fields,
        )
        request = Request(f"r{number}", tuple(prompt.tolist()), sampling, allows_loss=True)
        found.append(request)
    return found


def _answers(
    target: Target, system: str, config: Config = CONFIG, **sampling_fields: Any
) -> list[Completion]:
    decoder = build_decoder(
        system, engine=target.engine, codec=target.codec, config=config, parts=target.parts
    )
    return [decoder.generate(request) for request in _requests(**sampling_fields)]


@pytest.mark.parametrize(
    "system",
    ["ngram", "suffix", "eagle3", "eagle3_tree", "rule_score", "rule_match", "hvd_tau", "hvd_cost"],
)
def test_every_system_gives_the_plain_answer(target: Target, system: str) -> None:
    if target.engine.model.device.type == "cpu" and system != "eagle3_tree":
        pytest.skip("the property tests hold this one on the CPU")
    if system not in ("ngram", "eagle3", "eagle3_tree"):
        pytest.importorskip("arctic_inference")
    plain, tried = _answers(target, "greedy"), _answers(target, system)
    assert [each.token_ids for each in tried] == [each.token_ids for each in plain]
    passes = sum(len(each.steps) for each in tried)
    assert passes < sum(len(each.steps) for each in plain), "nothing was ever drafted"


@pytest.mark.parametrize(
    "asked",
    [
        {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
        {"min_tokens": 12, "logprobs": 3},
        {"top_k": 9, "top_p": 0.8, "min_p": 0.01},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_a_request_asks_for_is_kept(target: Target, asked: dict[str, Any]) -> None:
    plain, tried = _answers(target, "greedy", **asked), _answers(target, "eagle3", **asked)
    assert [each.token_ids for each in tried] == [each.token_ids for each in plain]


def test_a_slim_model_between_draft_and_target_changes_nothing(target: Target) -> None:
    plain, tried = _answers(target, "greedy"), _answers(target, "ngram+nested")
    assert [each.token_ids for each in tried] == [each.token_ids for each in plain]


@pytest.mark.parametrize(
    ("system", "settings"),
    [
        ("eagle3", {"drafting": {"eagle3": {"is_sampled": True}}}),
        ("ngram+nested", {"tiers": {"is_sampled": True}}),
        ("ngram+tiered", {"tiers": {"is_forced": True, "theta_accept": 0.5, "theta_escalate": 0}}),
        ("ngram+cascade_opt", {}),
    ],
)
def test_what_is_exact_in_law_alone_runs(
    target: Target, system: str, settings: dict[str, Any]
) -> None:
    """Their laws are enumerated on the CPU; here it shows that nothing is mixed across devices."""
    answers = _answers(target, system, Config.model_validate(settings))
    assert [len(each.token_ids) for each in answers] == [24] * len(answers)
    if "sampled" in str(settings):
        assert sum(len(each.steps) for each in answers) < 24 * len(answers), "nothing was accepted"
