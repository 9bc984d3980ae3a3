"""Slim models on a tiny Llama: what they compute, and that the target never reads their states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hvd_ray.config import Config
from hvd_ray.engines.base import TieredEngine
from hvd_ray.engines.slim import SlimLayers
from hvd_ray.engines.torch_engine import TorchCache, TorchEngine
from hvd_ray.engines.torch_tiers import MaskCache, PrefixCache, torch_tiers
from hvd_ray.errors import NotSupportedError, UserError
from hvd_ray.systems import Parts, build_decoder
from hvd_ray.text import HFTextCodec
from hvd_ray.types import Request, SamplingParams

LAYERS = 4
SLIM = {
    "prefix": SlimLayers.prefix(2, num_layers=LAYERS),
    "layers": SlimLayers.without(frozenset({1, 2}), num_layers=LAYERS),
    "sublayers": SlimLayers(LAYERS, frozenset({0, 2}), frozenset({1})),
}


@pytest.fixture(scope="module")
def engine() -> TorchEngine:
    return TorchEngine.from_model(_llama(), hidden_layers=(1, 2, 3))


def _llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        tie_word_embeddings=False,
        **changes,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return LlamaForCausalLM(config).to(torch.float32)


def random_ids(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 200, count).astype(np.int32)


def close(one: torch.Tensor | None, other: torch.Tensor | None) -> None:
    assert one is not None
    assert other is not None
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def slim_reference(model: Any, slim: SlimLayers, token_ids: np.ndarray) -> torch.Tensor:
    """The model with the outputs of skipped sublayers replaced by nothing, by hooks."""
    hooks = []
    for index, layer in enumerate(model.model.layers):
        if index in slim.skipped_mlp:
            hooks.append(layer.mlp.register_forward_hook(lambda *a: torch.zeros_like(a[2])))
        if index in slim.skipped_attention:
            hooks.append(
                layer.self_attn.register_forward_hook(
                    lambda *a: (torch.zeros_like(a[2][0]), *a[2][1:])
                )
            )
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.from_numpy(token_ids.astype(np.int64))[None]).logits[0]
    for hook in hooks:
        hook.remove()
    return logits


@pytest.mark.parametrize("name", SLIM)
def test_the_slim_pass_leaves_out_what_it_says(engine: TorchEngine, name: str) -> None:
    tiers, token_ids = torch_tiers(engine, SLIM[name]), random_ids(30)
    wanted = slim_reference(engine.model, SLIM[name], token_ids)
    cache = tiers.new_cache()
    close(tiers.forward_slim(token_ids[:11], cache, num_logits=3).logits_TV, wanted[8:11])
    tiers.forward_slim(random_ids(7, seed=1), cache, num_logits=7)
    tiers.truncate(cache, 11)
    close(tiers.forward_slim(token_ids[11:], cache, num_logits=19).logits_TV, wanted[11:])


@pytest.mark.parametrize("name", SLIM)
def test_the_target_resumes_wherever_the_slim_model_stands(engine: TorchEngine, name: str) -> None:
    """Ahead, behind, rolled back: logits and hidden states are those of one plain pass."""
    tiers, token_ids = torch_tiers(engine, SLIM[name]), random_ids(40)
    plain = engine.forward(token_ids, engine.new_cache(), num_logits=40)
    cache = tiers.new_cache()
    first = tiers.forward(token_ids[:6], cache, num_logits=2)  # the target first
    close(first.logits_TV, plain.logits_TV[4:6])
    start = cache.slim_length  # type: ignore[attr-defined]
    tiers.forward_slim(token_ids[start:12], cache, num_logits=1)
    tiers.forward_slim(random_ids(5, seed=2), cache, num_logits=5)  # rejected rows
    tiers.truncate(cache, 12)
    assert cache.length == 6
    second = tiers.forward(token_ids[6:25], cache, num_logits=19)
    close(second.logits_TV, plain.logits_TV[6:25])
    tiers.truncate(cache, 20)
    third = tiers.forward(token_ids[20:], cache, num_logits=1)
    assert plain.hidden_TD is not None
    close(first.hidden_TD, plain.hidden_TD[:6])
    close(second.hidden_TD, plain.hidden_TD[6:25])
    close(third.hidden_TD, plain.hidden_TD[20:])
    close(third.logits_TV, plain.logits_TV[-1:])


def test_long_prompts_are_read_in_pieces(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_ids = random_ids(50)
    plain = engine.forward(token_ids, engine.new_cache(), num_logits=3)
    monkeypatch.setattr("hvd_ray.engines.torch_tiers.PIECE_ROWS", 16)
    for slim in SLIM.values():
        tiers = torch_tiers(engine, slim)
        cache = tiers.new_cache()
        wanted = slim_reference(engine.model, slim, token_ids)
        close(tiers.forward_slim(token_ids, cache, num_logits=3).logits_TV, wanted[-3:])
        got = tiers.forward(token_ids, cache, num_logits=3)
        close(got.logits_TV, plain.logits_TV)
        close(got.hidden_TD, plain.hidden_TD)


def target_states(cache: object) -> tuple[TorchCache, int]:
    if isinstance(cache, MaskCache):
        return cache.target, cache.length
    assert isinstance(cache, PrefixCache)
    return cache.shared, cache.length


@pytest.mark.parametrize("name", SLIM)
@pytest.mark.parametrize("system", ["nested", "tiered", "self_spec", "cascade_opt"])
def test_no_key_or_value_of_the_target_is_the_slim_models(
    engine: TorchEngine, tiny_llama_path: Path, name: str, system: str
) -> None:
    """Recomputed from the tokens alone, every cached position of the target comes out the same."""
    tiers = torch_tiers(engine, SLIM[name])
    settings = {"is_forced": True, "max_miss_rate": 1, "theta_accept": 0.2, "theta_escalate": 0.1}
    decoder = build_decoder(
        system,
        engine=engine,
        codec=HFTextCodec(tiny_llama_path),
        config=Config.model_validate({"tiers": settings | {"loss_budget": 1000}}),
        parts=Parts(tiers=tiers),
    )
    skipped = 0
    for seed in range(13):  # times four systems: 52 requests for each slim model
        request = looping_request(seed)
        generation = decoder.start(request)
        while not generation.is_finished:
            decoder.step(generation)
        compare_with_recomputation(engine, generation.state.cache, generation.context.token_ids)
        decoder.close(generation)
        skipped += sum(step.full_passes == 0 for step in generation.steps)
    assert (skipped > 0) == (system == "tiered")


def looping_request(seed: int) -> Request:
    prompt = tuple(np.tile(random_ids(6, seed), 3).tolist())
    sampling = SamplingParams(max_tokens=24, ignore_eos=True, seed=seed)
    return Request(f"r{seed}", prompt, sampling, allows_loss=True)


def compare_with_recomputation(engine: TorchEngine, cache: object, token_ids: Any) -> None:
    states, length = target_states(cache)
    assert length <= len(token_ids) - 1
    if length == 0:
        return
    fresh = engine.new_cache()
    engine.forward(token_ids.view()[:length].copy(), fresh, num_logits=1)
    for used, wanted in zip(states.growing, fresh.growing, strict=True):
        for which in ("_keys_HSD", "_values_HSD"):
            one, other = getattr(used, which), getattr(wanted, which)
            error = (one[..., :length, :] - other[..., :length, :]).abs().max()
            assert error < 1e-3 * other[..., :length, :].abs().max(), "float32 alone gives 1e-5"


@pytest.mark.parametrize("name", SLIM)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_nested_equals_plain_decoding(
    engine: TorchEngine, tiny_llama_path: Path, name: str, temperature: float
) -> None:
    codec, parts = HFTextCodec(tiny_llama_path), Parts(tiers=torch_tiers(engine, SLIM[name]))
    plain = build_decoder("greedy", engine=engine, codec=codec, config=Config())
    for system in ("suffix+nested", "ngram+nested", "greedy+nested"):
        tried = build_decoder(system, engine=engine, codec=codec, config=Config(), parts=parts)
        for seed in range(3):
            request = looping_request(seed)
            sampling = SamplingParams(
                temperature=temperature, max_tokens=24, seed=seed, ignore_eos=True, logprobs=1
            )
            request = Request(request.request_id, request.prompt_token_ids, sampling)
            wanted, got = plain.generate(request), tried.generate(request)
            assert got.token_ids == wanted.token_ids
            assert got.verification == "nested"
            assert got.logprobs is not None
            assert wanted.logprobs is not None
            for one, other in zip(got.logprobs, wanted.logprobs, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_a_slim_model_of_another_target_is_refused(engine: TorchEngine) -> None:
    with pytest.raises(UserError, match="made for 3 layers, the target has 4"):
        torch_tiers(engine, SlimLayers.prefix(1, num_layers=3))


def test_what_cannot_be_run_layer_by_layer_is_refused() -> None:
    eager = TorchEngine.from_model(_llama(attn_implementation="eager"))
    assert not eager.capabilities.can_slim
    with pytest.raises(NotSupportedError, match="slim models of a target of type 'llama'"):
        torch_tiers(eager, SLIM["prefix"])


@pytest.mark.parametrize(
    ("skipped", "message"),
    [
        (frozenset(), "must skip something"),
        (frozenset(range(LAYERS)), "leave something"),
        (frozenset({LAYERS}), "skips layer 4 of 4"),
    ],
)
def test_impossible_slim_models_are_refused(skipped: frozenset[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SlimLayers.without(skipped, num_layers=LAYERS)


def test_a_drafter_may_read_the_last_output_behind_a_prefix() -> None:
    """A head may name the number of layers; its states then come after all of them."""
    engine = TorchEngine.from_model(_llama(), hidden_layers=(1, 2, LAYERS))
    token_ids = random_ids(20)
    plain = engine.forward(token_ids, engine.new_cache(), num_logits=1)
    tiers = torch_tiers(engine, SLIM["prefix"])
    cache = tiers.new_cache()
    tiers.forward_slim(token_ids[:9], cache, num_logits=1)
    close(tiers.forward(token_ids, cache, num_logits=1).hidden_TD, plain.hidden_TD)


def test_only_the_first_layers_kept_whole_are_a_prefix() -> None:
    assert SLIM["prefix"].exit_layer == 2
    assert SLIM["layers"].exit_layer is None
    assert SLIM["sublayers"].exit_layer is None
    assert SLIM["prefix"].skip_ratio == 0.5


def test_every_tiered_engine_meets_the_seam(engine: TorchEngine) -> None:
    for slim in SLIM.values():
        tiers: TieredEngine = torch_tiers(engine, slim)
        assert tiers.capabilities.can_slim
