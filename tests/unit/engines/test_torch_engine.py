"""The torch engine on a tiny Llama built in the process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from hvd_ray.config import Config
from hvd_ray.engines.torch_engine import TorchEngine
from hvd_ray.errors import NotSupportedError, UserError
from hvd_ray.systems import build_decoder
from hvd_ray.text import HFTextCodec
from hvd_ray.types import Request, SamplingParams
from tests.property.toy_requests import HEADLESS_SYSTEMS, PARTS


@pytest.fixture(scope="module")
def engine(tiny_llama_path: Path) -> TorchEngine:
    return TorchEngine.load(tiny_llama_path, dtype="float32", hidden_layers=(0, 1))


def random_ids(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 200, count).astype(np.int32)


def test_pieces_with_roll_back_equal_one_pass(engine: TorchEngine) -> None:
    """Rejected rows leave no trace: the logits are those of a pass that never saw them."""
    token_ids = random_ids(60)
    whole = engine.forward(token_ids, engine.new_cache(), num_logits=60)
    cache = engine.new_cache()
    engine.forward(token_ids[:20], cache, num_logits=1)
    engine.forward(random_ids(17, seed=1), cache, num_logits=5)
    engine.truncate(cache, 20)
    assert cache.length == 20
    rest = engine.forward(token_ids[20:], cache, num_logits=40)
    torch.testing.assert_close(rest.logits_TV, whole.logits_TV[20:], rtol=1e-4, atol=1e-5)


def test_a_long_prompt_is_read_in_pieces(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_ids = random_ids(50)
    whole = engine.forward(token_ids, engine.new_cache(), num_logits=3)
    monkeypatch.setattr("hvd_ray.engines.torch_engine._PREFILL_ROWS", 16)
    for num_logits in (1, 3, 20):
        pieces = engine.forward(token_ids, engine.new_cache(), num_logits=num_logits)
        assert pieces.logits_TV.shape[0] == num_logits
        assert pieces.hidden_TD is not None
        assert whole.hidden_TD is not None
        torch.testing.assert_close(pieces.hidden_TD, whole.hidden_TD, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(pieces.logits_TV[-1], whole.logits_TV[-1], rtol=1e-4, atol=1e-5)


def test_hidden_states_are_the_inputs_of_the_layers(engine: TorchEngine) -> None:
    token_ids = random_ids(4)
    forward = engine.forward(token_ids, engine.new_cache(), num_logits=1)
    assert forward.hidden_TD is not None
    embedded_TD = engine.model.get_input_embeddings()(torch.from_numpy(token_ids.astype(np.int64)))
    width = embedded_TD.shape[-1]
    assert forward.hidden_TD.shape == (4, 2 * width)
    torch.testing.assert_close(forward.hidden_TD[:, :width], embedded_TD)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("system", HEADLESS_SYSTEMS)
def test_every_system_equals_plain_decoding(
    engine: TorchEngine, tiny_llama_path: Path, system: str, temperature: float
) -> None:
    codec, config = HFTextCodec(tiny_llama_path), Config.model_validate({"policy": {"tau": 1.0}})
    plain = build_decoder("greedy", engine=engine, codec=codec, config=config)
    tried = build_decoder(system, engine=engine, codec=codec, config=config, parts=PARTS)
    for seed in range(3):
        prompt = tuple(int(token) for token in np.tile(random_ids(6, seed), 3))
        sampling = SamplingParams(
            temperature=temperature, max_tokens=40, seed=seed, ignore_eos=True, logprobs=2
        )
        wanted = plain.generate(Request("plain", prompt, sampling))
        for _ in range(2):  # the second time from a warm cache
            got = tried.generate(Request("tried", prompt, sampling))
            assert got.token_ids == wanted.token_ids
            assert got.text == wanted.text
            assert got.logprobs is not None
            assert wanted.logprobs is not None
            for one, other in zip(got.logprobs, wanted.logprobs, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_bfloat16_runs(tiny_llama_path: Path) -> None:
    engine = TorchEngine.load(tiny_llama_path, dtype="bfloat16")
    assert engine.capabilities.dtype == "bfloat16"
    forward = engine.forward(random_ids(5), engine.new_cache(), num_logits=2)
    assert forward.logits_TV.dtype == torch.float32
    assert forward.hidden_TD is None


def test_a_sliding_window_model_is_refused_by_name() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=8,
    )
    with pytest.raises(NotSupportedError, match=r"mistral.*cannot forget a rejected draft"):
        TorchEngine.from_model(MistralForCausalLM(config))


def recurrent_folder(folder: Path) -> Path:
    """A tiny RWKV, which keeps a state and no keys and values."""
    from transformers import RwkvConfig, RwkvForCausalLM

    torch.manual_seed(0)
    config = RwkvConfig(
        vocab_size=64, hidden_size=16, attention_hidden_size=16, num_hidden_layers=2
    )
    config.max_position_embeddings = 64
    RwkvForCausalLM(config).save_pretrained(folder)
    return folder


def test_v10_a_recurrent_model_is_refused_by_name(tmp_path: Path) -> None:
    """It would take our cache, leave it empty and read each pass without its prefix, in silence."""
    folder = recurrent_folder(tmp_path / "rwkv")
    with pytest.raises(NotSupportedError, match=r"'rwkv'.*past its cache.*hold 0") as caught:
        TorchEngine.load(folder, dtype="float32")
    assert "\n" not in str(caught.value)


def test_v10_a_model_of_which_one_layer_keeps_nothing_is_refused(tiny_llama_path: Path) -> None:
    """A hybrid's attention fills its cache while the other layers hold their state elsewhere."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_llama_path, use_safetensors=True)
    model.model.layers[1].self_attn = _Stateful()
    with pytest.raises(NotSupportedError, match=r"'llama'.*hold 0, 3"):
        TorchEngine.from_model(model)


class _Stateful(torch.nn.Module):
    def forward(
        self, hidden_states: torch.Tensor, **_: object
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return hidden_states.cumsum(dim=1), None


def test_a_folder_without_a_model_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be used") as caught:
        TorchEngine.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_codec_streams_join_to_the_text(tiny_llama_path: Path) -> None:
    """Case L01: multi-byte characters spread over tokens, byte for byte."""
    codec = HFTextCodec(tiny_llama_path)
    for text in ("plain words", "naïve café – 東京 🙂🙃", "tabs\tand\nlines  spaces"):
        token_ids = codec.encode(text)
        stream = codec.stream()
        pieces = [stream.push(token) for token in token_ids]
        assert "".join(pieces) + stream.flush() == codec.decode(token_ids)


def test_codec_flushes_half_a_character(tiny_llama_path: Path) -> None:
    codec = HFTextCodec(tiny_llama_path)
    token_ids = codec.encode("🙂")[:-1]
    stream = codec.stream()
    text = "".join(stream.push(token) for token in token_ids) + stream.flush()
    assert text == codec.decode(token_ids)


def damaged(tiny_llama_path: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_llama_path, folder)
    return folder


def test_a_checkpoint_that_lacks_weights_is_refused(tiny_llama_path: Path, tmp_path: Path) -> None:
    """transformers would fill them with random numbers, and nothing would look broken."""
    folder = damaged(tiny_llama_path, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"weights are missing.*layers\.2"):
        TorchEngine.load(folder, dtype="float32")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("model.safetensors", "garbage"),
        ("config.json", '{"model_type": "nope"}'),
        ("config.json", '{"model_type": "llama", "hidden_size": "x"}'),
        ("config.json", "{"),
    ],
)
def test_a_damaged_folder_is_one_clear_line(
    tiny_llama_path: Path, tmp_path: Path, file: str, text: str
) -> None:
    folder = damaged(tiny_llama_path, tmp_path)
    (folder / file).write_text(text)
    with pytest.raises(UserError, match="cannot be") as caught:
        TorchEngine.load(folder)
    assert "\n" not in str(caught.value)


def test_a_tree_gives_each_path_what_the_path_alone_gives(engine: TorchEngine) -> None:
    """One pass over a tree, with a row before it; then the second branch is kept."""
    prefix, tree, parents = random_ids(10), random_ids(5, seed=2), (-1, -1, 1, 0, 2)
    cache = engine.new_cache()
    engine.forward(prefix[:-2], cache, num_logits=1)
    rows = np.concatenate([prefix[-2:], tree])
    found = engine.forward(rows, cache, num_logits=6, parents=parents)
    assert found.hidden_TD is not None
    for row, path in enumerate([[], [0], [1], [1, 2], [0, 3], [1, 2, 4]]):
        alone = engine.forward(
            np.concatenate([prefix, tree[path]]), engine.new_cache(), num_logits=1
        )
        torch.testing.assert_close(found.logits_TV[row], alone.logits_TV[0], rtol=1e-4, atol=1e-5)
        assert alone.hidden_TD is not None
        hidden_D = found.hidden_TD[1 + row]
        torch.testing.assert_close(hidden_D, alone.hidden_TD[-1], rtol=1e-4, atol=1e-5)
    engine.keep(cache, 10, [1, 2])
    assert cache.length == 12
    token_ids = np.concatenate([prefix, tree[[1, 2]], random_ids(3, seed=3)])
    rest = engine.forward(token_ids[12:], cache, num_logits=3)
    whole = engine.forward(token_ids, engine.new_cache(), num_logits=3)
    torch.testing.assert_close(rest.logits_TV, whole.logits_TV, rtol=1e-4, atol=1e-5)
