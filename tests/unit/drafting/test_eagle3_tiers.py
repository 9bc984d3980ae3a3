"""EAGLE-3 beside skipped passes of the target: its states arrive at the back-fill, all of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hvd_ray.config import Config
from hvd_ray.decode import Decoder
from hvd_ray.drafting.eagle3 import Eagle3Config
from hvd_ray.drafting.eagle3_drafter import Eagle3Drafter
from hvd_ray.engines.slim import SlimLayers
from hvd_ray.engines.torch_engine import TorchEngine
from hvd_ray.engines.torch_tiers import torch_tiers
from hvd_ray.systems import Parts, build_decoder
from hvd_ray.text import HFTextCodec
from hvd_ray.types import Draft, Request, SamplingParams

from .eagle3_heads import random_head

SLIM = {
    "prefix": SlimLayers.prefix(1, num_layers=2),
    "mask": SlimLayers(2, frozenset({1}), frozenset({0})),
}


class Remembering(Eagle3Drafter):
    """Keeps the states it was given, and what it proposed."""

    def __init__(self, inner: Eagle3Drafter) -> None:
        super().__init__(inner.head, inner.target_vocab_size, inner.max_draft_tokens)
        self.states: list[torch.Tensor] = []
        self.proposals: dict[int, tuple[int, ...]] = {}

    def observe(self, request_id: str, token_ids: tuple[int, ...], hidden: object | None) -> None:
        active = self._active[request_id]
        before = active.num_known
        super().observe(request_id, token_ids, hidden)
        if hidden is not None:
            assert isinstance(hidden, torch.Tensor)
            self.states.append(hidden[: active.num_known - before])

    def propose(self, request_id: str, limit: int) -> Draft:
        draft = super().propose(request_id, limit)
        self.proposals[len(self._active[request_id].token_ids)] = draft.token_ids
        return draft


@pytest.mark.parametrize("name", SLIM)
def test_states_and_proposals_equal_those_of_a_run_that_never_skipped(
    tiny_llama_path: Path, name: str
) -> None:
    engine = TorchEngine.load(tiny_llama_path, dtype="float32", hidden_layers=(0, 1, 1))
    codec = HFTextCodec(tiny_llama_path)
    width, vocab_size = engine.model.config.hidden_size, engine.model.config.vocab_size

    def fit(base: Eagle3Config) -> Eagle3Config:
        return replace(
            base,
            vocab_size=vocab_size,
            draft_vocab_size=vocab_size,
            target_hidden_size=width,
            aux_layer_ids=(0, 1, 1),
            max_position_embeddings=256,
        )

    head = random_head(variant=fit)
    settings: dict[str, Any] = {"is_forced": True, "max_miss_rate": 1, "loss_budget": 1000}
    settings |= {"theta_accept": 0.3, "theta_escalate": 0.2}
    decoder = build_decoder(
        "rule_match+tiered",
        engine=engine,
        codec=codec,
        config=Config.model_validate({"tiers": settings, "policy": {"min_match": 1}}),
        parts=Parts(tiers=torch_tiers(engine, SLIM[name]), head=head),
    )
    drafter = remember(decoder)
    prompt = tuple(np.tile(np.arange(5, 12), 4).tolist())
    sampling = SamplingParams(max_tokens=80, ignore_eos=True)
    completion = decoder.generate(Request("r", prompt, sampling, allows_loss=True))
    assert any(step.full_passes == 0 for step in completion.steps), "nothing was skipped"
    states_TA = torch.cat(drafter.states)
    tokens = np.array([*prompt, *completion.token_ids], np.int32)[: len(states_TA)]
    whole = engine.forward(tokens, engine.new_cache(), num_logits=1).hidden_TD
    torch.testing.assert_close(states_TA, whole, rtol=1e-3, atol=1e-4)
    check_proposals(drafter, engine, prompt, completion.token_ids)


def remember(decoder: Decoder) -> Remembering:
    assert isinstance(decoder.model_drafter, Eagle3Drafter)
    drafter = Remembering(decoder.model_drafter)
    decoder.model_drafter = drafter
    return drafter


def check_proposals(
    drafter: Remembering,
    engine: TorchEngine,
    prompt: tuple[int, ...],
    output: tuple[int, ...],
) -> None:
    """Each against a drafter that is told everything in one piece."""
    made = {at: tokens for at, tokens in drafter.proposals.items() if tokens}
    assert made
    for at, proposed in list(made.items())[:12]:
        fresh = Eagle3Drafter(drafter.head, drafter.target_vocab_size, drafter.max_draft_tokens)
        fresh.start(Request("fresh", prompt))
        committed = (*prompt, *output)[:at]
        rows = np.array(committed[:-1], np.int32)
        hidden = engine.forward(rows, engine.new_cache(), num_logits=1).hidden_TD
        fresh.observe("fresh", committed[len(prompt) :], hidden)
        assert fresh.propose("fresh", len(proposed)).token_ids == proposed
