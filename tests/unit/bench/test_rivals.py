"""transformers' own speculative decoding in the bench: the same tokens, every pass counted."""

import pytest
import torch

from hvd_ray.bench.rivals import ASSISTED, PROMPT_LOOKUP, RIVALS, RivalDecoder, rival_facts
from hvd_ray.config import Config
from hvd_ray.engines.torch_engine import TorchEngine
from hvd_ray.errors import NotSupportedError
from hvd_ray.systems import build_decoder
from hvd_ray.text import HFTextCodec
from hvd_ray.types import Request, SamplingParams, Source


@pytest.fixture(scope="module")
def tiny(tiny_llama_path):
    engine = TorchEngine.load(tiny_llama_path, dtype="float32", num_threads=1)
    return engine, HFTextCodec(tiny_llama_path)


def request(codec, **sampling):
    prompt = codec.encode("say it to the name and say it to the name and say it to")
    return Request("r", tuple(prompt), SamplingParams(max_tokens=40, **sampling))


@pytest.mark.parametrize("name", RIVALS)
def test_greedy_tokens_are_ours_and_the_passes_add_up(tiny, name):
    engine, codec = tiny
    asked = request(codec)
    ours = build_decoder("greedy", engine=engine, codec=codec, config=Config()).generate(asked)
    theirs = RivalDecoder(name, engine, codec).generate(asked)
    assert theirs.token_ids == ours.token_ids
    assert theirs.finish_reason == ours.finish_reason
    assert theirs.text == ours.text
    assert sum(step.emitted for step in theirs.steps) == len(theirs.token_ids)
    assert 1 <= len(theirs.steps) <= len(theirs.token_ids)
    for step in theirs.steps:
        assert step.accepted <= step.drafted
        assert step.emitted == step.accepted + 1
        assert step.verify_us > 0


def test_rivals_draft_and_say_from_what(tiny):
    engine, codec = tiny
    sources = {
        name: {s.source for s in RivalDecoder(name, engine, codec).generate(request(codec)).steps}
        for name in RIVALS
    }
    assert Source.NGRAM in sources[PROMPT_LOOKUP]
    assert Source.SLIM in sources[ASSISTED]
    layers = engine.model.config.num_hidden_layers
    assert layers == 2, "the early exit leaves the model as it was"


def test_sampling_is_seeded(tiny):
    engine, codec = tiny
    asked = request(codec, temperature=0.9, seed=5)
    with torch.random.fork_rng(devices=[]):
        rival = RivalDecoder(PROMPT_LOOKUP, engine, codec)
        assert rival.generate(asked).token_ids == rival.generate(asked).token_ids


@pytest.mark.parametrize(
    "sampling", [{"stop": ("x",)}, {"min_tokens": 3}, {"repetition_penalty": 1.2}]
)
def test_what_cannot_be_told_alike_is_refused(tiny, sampling):
    engine, codec = tiny
    with pytest.raises(NotSupportedError, match="hf_prompt_lookup"):
        RivalDecoder(PROMPT_LOOKUP, engine, codec).generate(request(codec, **sampling))


def test_rivals_are_named_with_their_version():
    assert all("transformers 5" in facts for facts in rival_facts().values())
    assert set(rival_facts()) == set(RIVALS)
