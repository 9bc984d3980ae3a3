"""What the plugin's tests leave out for time: adapters, shared prefixes, grammars, long prompts.

    make vllm

Each needs one or two engines of its own, half a minute to two minutes each.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_vllm_plugin import HEAD, QUESTIONS, SCHEMA, serve

pytestmark = [pytest.mark.model]
pytest.importorskip("vllm")

HYBRID: dict[str, Any] = {
    "speculative_config": {
        "method": "eagle3",
        "model": str(HEAD),
        "num_speculative_tokens": 12,
    },
    "additional_config": {"hvd": {"policy": "cost", "payoff": "own"}},
}
ADAPTED = ("q_proj", "v_proj", "o_proj")


def save_adapter(folder: Path, model: Path, *, seed: int, rank: int = 8) -> Path:
    """A random adapter that is strong enough to change what the model says."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    width = config["hidden_size"]
    head = config["head_dim"]
    sizes = {
        "q_proj": config["num_attention_heads"] * head,
        "v_proj": config["num_key_value_heads"] * head,
        "o_proj": width,
    }
    rng = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name in ADAPTED:
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            read = config["num_attention_heads"] * head if name == "o_proj" else width
            tensors[f"{place}.lora_A.weight"] = torch.randn(rank, read, generator=rng) * 0.02
            tensors[f"{place}.lora_B.weight"] = torch.randn(sizes[name], rank, generator=rng) * 0.4
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(ADAPTED),
        "base_model_name_or_path": str(model),
    }
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder


def accepted_of(results: list[dict[str, Any]], source: str) -> list[float]:
    """What each call had accepted from a source."""
    name = f"hvd_accepted_tokens_total {source}"
    sums = [0.0, *(result["counts"].get(name, 0.0) for result in results)]
    return [after - before for before, after in pairwise(sums)]


def test_adapters_say_what_they_say_without_us_and_share_no_cache(
    tmp_path: Path, default_model_path: Path
) -> None:
    adapters = [
        [f"a{seed}", seed, str(save_adapter(tmp_path / f"a{seed}", default_model_path, seed=seed))]
        for seed in (1, 2)
    ]
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    order = (None, 0, 1, None, 0, 0)
    calls: list[dict[str, Any]] = [
        {"questions": [QUESTIONS[0]], "adapter": None if i is None else adapters[i]} for i in order
    ]
    plain = serve(tmp_path, default_model_path, lora, calls)["results"]
    cached = [call | {"hvd": "cache"} for call in calls]
    found = serve(tmp_path, default_model_path, lora | HYBRID, cached + calls)["results"]
    expected = [result["tokens"] for result in plain]
    assert [result["tokens"] for result in found] == expected * 2
    base, first, second = expected[:3]
    assert base != first != second != base, "adapters that change nothing show nothing"
    assert found[2]["counts"]["hvd_cache_scopes"] == 3
    cold, again = accepted_of(found, "suffix")[:3], accepted_of(found, "suffix")[3:6]
    assert again[0] > cold[0] + 10, "the base model knows its own outputs"
    assert again[1] > cold[1] + 10, "and so does the adapter"


def test_a_shared_prefix_leaves_the_head_what_it_needs(
    tmp_path: Path, default_model_path: Path
) -> None:
    text = "The quick brown fox jumps over the lazy dog near the river. " * 12 + QUESTIONS[1]
    engine = HYBRID | {
        "enable_prefix_caching": True,
        "block_size": 32,
        "max_num_batched_tokens": 160,
    }
    words = ("eagle3", "eagle3", "off", "cache", "eagle3")
    calls: list[dict[str, Any]] = [
        {"questions": [text], "hvd": word, "salt": "s"} for word in words
    ]
    # another prompt behind the same blocks, after steps that the head had no part in
    calls += [{"questions": [text + " Be brief."], "hvd": "eagle3", "salt": "s"}]
    calls += [{"questions": [text + " Be brief."], "hvd": "eagle3", "salt": "other"}]
    found = serve(tmp_path, default_model_path, engine, calls)["results"]
    tokens = [result["tokens"] for result in found]
    assert all(said == tokens[0] for said in tokens[: len(words)])
    assert tokens[5] == tokens[6]
    reused = [result["reused"][0] for result in found]
    assert reused[0] == reused[6] == 0, "a salt of its own shares nothing"
    assert min(reused[1:6]) >= 160
    accepted = accepted_of(found, "eagle3")
    assert accepted[0] == accepted[1] == accepted[4] > 5, "blocks hold the head's part, too"
    assert accepted[5] == accepted[6]


def test_a_draft_is_cut_where_the_grammar_ends_it(tmp_path: Path, default_model_path: Path) -> None:
    free = {"questions": [QUESTIONS[0]], "salt": "s", "hvd": "cache"}
    bound = free | {"schema": SCHEMA}
    plain = serve(tmp_path, default_model_path, {}, [free, bound])["results"]
    # the free answer is in the cache when the bound one is asked for, and leads astray
    calls = [free, free, bound, bound, bound | {"hvd": "eagle3"}]
    found = serve(tmp_path, default_model_path, HYBRID, calls)["results"]
    tokens = [result["tokens"] for result in found]
    assert tokens[0] == tokens[1] == plain[0]["tokens"]
    assert tokens[2] == tokens[3] == tokens[4] == plain[1]["tokens"]
    assert plain[0]["tokens"] != plain[1]["tokens"]
    dropped = [result["counts"].get("hvd_skipped_total dropped", 0) for result in found]
    assert dropped[1] == 0
    assert dropped[4] > 0, "some draft began with what the grammar forbids"


def test_several_answers_to_one_prompt_are_each_the_prompts_own(
    tmp_path: Path, default_model_path: Path
) -> None:
    sampling = {"temperature": 1.0, "top_k": 1, "n": 3, "seed": 5}
    calls = [{"questions": list(QUESTIONS), **sampling, "salt": "s"}] * 2
    plain = serve(tmp_path, default_model_path, {}, calls)["results"]
    found = serve(tmp_path, default_model_path, HYBRID, calls)["results"]
    assert [result["all"] for result in found] == [result["all"] for result in plain]
    assert [len(answers) for answers in found[0]["all"]] == [3] * len(QUESTIONS)
    assert accepted_of(found, "suffix")[1] > 20
