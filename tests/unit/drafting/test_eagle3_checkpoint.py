"""Both layouts people have load unchanged; what does not fit is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hvd_ray.drafting.eagle3 import Eagle3Config, Eagle3Head, rope_frequencies
from hvd_ray.drafting.eagle3_checkpoint import TargetShape, load_head, save_head
from hvd_ray.errors import UserError

from .eagle3_heads import SMALL, random_head

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
VARIANTS: dict[str, Callable[[Eagle3Config], Eagle3Config]] = {
    "plain": lambda config: config,
    "full_vocabulary": lambda config: replace(config, draft_vocab_size=config.vocab_size),
    "norm_before_residual": lambda config: replace(config, norm_before_residual=True),
    "bias": lambda config: replace(config, attention_bias=True),
    "qk_norm": lambda config: replace(config, has_qk_norm=True),
    "fc_norms": lambda config: replace(config, fc_norm=True, norm_before_fc=True),
    "own_embedding": lambda config: replace(config, target_hidden_size=24),
    "llama3_rope": lambda config: replace(
        config,
        rope_theta=500_000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
}


def target_of(head: Eagle3Head) -> TargetShape:
    return TargetShape(
        hidden_size=head.config.target_hidden_size,
        vocab_size=head.config.vocab_size,
        num_layers=4,
        embed_UH=head.weights.embed_UH,
    )


def saved(head: Eagle3Head, folder: Path) -> tuple[Config, Tensors]:
    save_head(head, folder, dtype=torch.float32)
    config = json.loads((folder / "config.json").read_text())
    return config, load_file(folder / "model.safetensors")


def rewrite(folder: Path, config: Config, tensors: Tensors) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors"
    )


def outputs(head: Eagle3Head) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(5)
    aux_TA = torch.randn(6, head.config.aux_size, generator=rng)
    tokens_T = torch.randint(head.config.vocab_size, (6,), generator=rng)
    normed_TH, feature_TH = head.extend(head.new_kv(), tokens_T, head.combine(aux_TA))
    return head.logits(normed_TH), feature_TH


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_saved_head_loads_as_it_was(variant: str, tmp_path: Path) -> None:
    head = random_head(variant=VARIANTS[variant])
    save_head(head, tmp_path, dtype=torch.float32)
    loaded = load_head(tmp_path, target=target_of(head))
    assert loaded.config == head.config
    torch.testing.assert_close(outputs(loaded), outputs(head))
    drafted = torch.arange(head.config.draft_vocab_size)
    if head.config.draft_vocab_size < head.config.vocab_size:
        assert loaded.target_ids(drafted).equal(head.target_ids(drafted))


def test_the_safeailab_layout_has_offsets_and_a_mask(tmp_path: Path) -> None:
    head = random_head()
    _, tensors = saved(head, tmp_path)
    ids = head.weights.draft_to_target_V
    assert (torch.arange(len(ids)) + tensors["d2t"]).equal(ids)
    assert tensors["t2d"].nonzero().flatten().equal(ids)
    assert "embed_tokens.weight" not in tensors
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (32, 64)


def test_the_speculators_layout_loads(tmp_path: Path) -> None:
    head = random_head(variant=VARIANTS["norm_before_residual"])
    config, tensors = saved(head, tmp_path)
    top = ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids")
    nested = {name: value for name, value in config.items() if name not in top}
    # Its default is norm_before_residual: true, unlike the other layout's.
    del nested["norm_before_residual"]
    wrapped = {name: config[name] for name in top} | {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": nested,
        "speculators_config": {"algorithm": "eagle3"},
    }
    renamed = {name.replace("midlayer.", "layers.0."): each for name, each in tensors.items()}
    renamed["embed_tokens.weight"] = head.weights.embed_UH
    rewrite(tmp_path, wrapped, renamed)
    target = replace(target_of(head), embed_UH=None)
    torch.testing.assert_close(outputs(load_head(tmp_path, target=target)), outputs(head))


def test_aux_layers_default_to_those_of_the_target(tmp_path: Path) -> None:
    head = random_head()
    config, tensors = saved(head, tmp_path)
    del config["eagle_aux_hidden_state_layer_ids"], config["eagle_config"]
    rewrite(tmp_path, config, tensors)
    target = replace(target_of(head), num_layers=30)
    assert load_head(tmp_path, target=target).config.aux_layer_ids == (2, 15, 27)


Damage = Callable[[Config, Tensors], object]
REFUSED: dict[str, tuple[Damage, str]] = {
    "no d2t": (lambda _c, t: t.pop("d2t"), "has no d2t map"),
    "d2t out of range": (lambda _c, t: t["d2t"].__setitem__(39, 60), "leads out of"),
    "d2t not unique": (lambda _c, t: t["d2t"].__setitem__(1, t["d2t"][0] - 1), "the same target"),
    "absolute d2t": (lambda _c, t: t["d2t"].add_(torch.arange(40)), "offsets"),
    "masks differ": (lambda _c, t: t["t2d"].logical_not_(), "different draft vocabularies"),
    "width": (lambda c, _t: c.update(target_hidden_size=48), "trained for another model"),
    "vocabulary": (lambda c, _t: c.update(vocab_size=65), "trained for another model"),
    "aux layers": (
        lambda c, _t: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 9]),
        r"reads layers \[9\]",
    ),
    "eagle-1": (lambda _c, t: t.pop("midlayer.hidden_norm.weight"), "EAGLE-1/2"),
    "medusa": (
        lambda c, _t: c.update(speculators_model_type="medusa"),
        "'medusa' speculator",
    ),
    "two layers": (
        lambda _c, t: t.update({"layers.1.mlp.up_proj.weight": torch.zeros(1)}),
        "more than one decoder layer",
    ),
    "missing tensor": (lambda _c, t: t.pop("norm.weight"), "lacks the tensor 'norm.weight'"),
    "odd tensor": (lambda _c, t: t.update(adapter=torch.zeros(1)), "no use for: adapter"),
    "shape": (lambda c, _t: c.update(intermediate_size=50), r"has shape \(48, 32\)"),
    "rope": (lambda c, _t: c.update(rope_parameters={"rope_type": "yarn"}), "'yarn'"),
}


@pytest.mark.parametrize("damage", REFUSED)
def test_what_does_not_fit_is_refused_by_name(damage: str, tmp_path: Path) -> None:
    change, message = REFUSED[damage]
    head = random_head()
    config, tensors = saved(head, tmp_path)
    change(config, tensors)
    rewrite(tmp_path, config, tensors)
    with pytest.raises(UserError, match=message):
        load_head(tmp_path, target=target_of(head))


def test_pickled_weights_are_refused_unread(tmp_path: Path) -> None:
    head = random_head()
    saved(head, tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pickled weights.*convert"):
        load_head(tmp_path, target=target_of(head))


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no EAGLE-3 head"):
        load_head(tmp_path, target=target_of(random_head()))


def test_llama3_rope_stretches_long_waves_only() -> None:
    config = VARIANTS["llama3_rope"](SMALL)
    plain, scaled = rope_frequencies(replace(config, rope_scaling=None)), rope_frequencies(config)
    assert scaled[0] == plain[0]
    assert scaled[-1] == pytest.approx(float(plain[-1]) / 8)
