"""EAGLE-3 checkpoints: read as people have them, written as vLLM loads them.

Two layouts hold the same tensors. SafeAILab's names the layer `midlayer` and describes it at the
top of `config.json`; `speculators` names it `layers.0` and nests the description. In both, `d2t`
holds *offsets*: draft id i means target id i + d2t[i]. A head that does not fit its target would
load and draft nonsense, accepted length 1.00 without a word, so every mismatch is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvd_ray.drafting.eagle3 import Eagle3Config, Eagle3Head, Eagle3Weights
from hvd_ray.errors import UserError

ROPE_TYPES = ("default", "linear", "llama3")
IGNORED_TENSORS = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq")


@dataclass(frozen=True, kw_only=True)
class TargetShape:
    """What a head must fit; `embed_UH` is shared with heads that bring no embedding."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    embed_UH: Tensor | None = None


def load_head(
    folder: Path, *, target: TargetShape, dtype: torch.dtype = torch.float32
) -> Eagle3Head:
    """Read a head and check it against its target.

    Raises:
        UserError: no such checkpoint, pickled weights, not EAGLE-3, or a head that does not fit.
    """
    raw = _read_config(folder)
    tensors = _read_tensors(folder)
    _refuse_other_methods(folder, raw, tensors)
    with _readable(folder):
        config = _parse_config(folder, raw, target=target, tensors=tensors)
    weights = _assemble(folder, config, tensors, target=target)
    return Eagle3Head(config, weights.to(dtype))


def head_context_length(folder: Path) -> int:
    """The most tokens, prompt and output together, that a head drafts at.

    Raises:
        UserError: no such checkpoint.
    """
    with _readable(folder):
        return _context_length(_layer_config(_read_config(folder)))


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Turn what a configuration of another form raises into one line."""
    try:
        yield
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise UserError(f"{folder}/config.json is no EAGLE-3 head's ({cause})") from None


def save_head(head: Eagle3Head, folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write `config.json` and `model.safetensors`; the embedding stays with the target.

    A head whose embedding is narrower or wider than the target's own is written with it.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = _disassemble(head.config, head.weights.to(dtype))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(_config_json(head.config, dtype), indent=2)
    (folder / "config.json").write_text(text + "\n")


def target_shape(model: Any) -> TargetShape:
    """The shape of a transformers model."""
    return TargetShape(
        hidden_size=model.config.hidden_size,
        vocab_size=model.config.vocab_size,
        num_layers=model.config.num_hidden_layers,
        embed_UH=model.get_input_embeddings().weight.detach(),
    )


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"no EAGLE-3 head in {folder}: expected config.json and *.safetensors")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error})") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path} is no configuration: expected a JSON object")
    return raw


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    paths = sorted(folder.glob("*.safetensors"))
    if not paths and any(folder.glob("*.bin")):
        raise UserError(
            f"{folder} holds pickled weights (.bin), which can run code when read; convert them "
            f"once: hvd drafter convert {folder} --out DIR"
        )
    if not paths:
        raise UserError(f"no weights in {folder}: expected model.safetensors")
    tensors: dict[str, Tensor] = {}
    for path in paths:
        try:
            tensors.update(load_file(path))
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise UserError(f"{path} is no safetensors file ({error}); copy it again") from None
    return {_plain_name(name): tensor for name, tensor in tensors.items()}


def _plain_name(name: str) -> str:
    return name.removeprefix("model.").replace("midlayer.", "layers.0.")


def _refuse_other_methods(
    folder: Path, raw: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    method = raw.get("speculators_model_type", "eagle3")
    if method != "eagle3":
        raise UserError(f"{folder} is a {method!r} speculator: expected an EAGLE-3 head")
    if "layers.0.hidden_norm.weight" not in tensors:
        kind = "an EAGLE-1/2 head" if "fc.weight" in tensors else "no EAGLE head"
        raise UserError(
            f"{folder} holds {kind} (no midlayer.hidden_norm): expected EAGLE-3, trained on "
            "three hidden states of the target"
        )
    if any(name.startswith("layers.1.") for name in tensors):
        raise UserError(f"{folder} has more than one decoder layer: one is supported")


def _parse_config(
    folder: Path, raw: Mapping[str, Any], *, target: TargetShape, tensors: Mapping[str, Tensor]
) -> Eagle3Config:
    is_speculators = "speculators_model_type" in raw
    layer = _layer_config(raw)
    eagle: Mapping[str, Any] = raw.get("eagle_config") or {}
    hidden_size = int(layer["hidden_size"])
    theta, scaling = _rope(folder, layer)
    aux = raw.get("eagle_aux_hidden_state_layer_ids") or eagle.get(
        "eagle_aux_hidden_state_layer_ids"
    )
    num_layers = target.num_layers
    heads = int(layer["num_attention_heads"])
    config = Eagle3Config(
        hidden_size=hidden_size,
        intermediate_size=int(layer["intermediate_size"]),
        num_attention_heads=heads,
        num_key_value_heads=int(layer.get("num_key_value_heads") or heads),
        head_dim=int(layer.get("head_dim") or hidden_size // heads),
        vocab_size=int(layer["vocab_size"]),
        draft_vocab_size=int(raw.get("draft_vocab_size") or layer["vocab_size"]),
        target_hidden_size=int(raw.get("target_hidden_size") or hidden_size),
        aux_layer_ids=tuple(aux or (2, num_layers // 2, num_layers - 3)),
        rms_norm_eps=float(layer.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=_context_length(layer),
        norm_before_residual=bool(raw.get("norm_before_residual", is_speculators)),
        norm_before_fc=bool(eagle.get("norm_before_fc", raw.get("norm_before_fc", False))),
        fc_norm=bool(raw.get("fc_norm", False)),
        norm_output=bool(raw.get("norm_output", False)),
        attention_bias=bool(layer.get("attention_bias", False)),
        has_qk_norm="layers.0.self_attn.q_norm.weight" in tensors,
    )
    _check_fit(folder, config, target)
    return config


def _layer_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """What describes the decoder layer: a part of its own in the `speculators` layout."""
    layer: Mapping[str, Any] = raw.get("transformer_layer_config", raw)
    return layer


def _context_length(layer: Mapping[str, Any]) -> int:
    return int(layer.get("max_position_embeddings", 2048))


def _rope(folder: Path, layer: Mapping[str, Any]) -> tuple[float, Mapping[str, float] | None]:
    parameters = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ROPE_TYPES:
        known = ", ".join(ROPE_TYPES)
        raise UserError(f"{folder}: rotary scaling {kind!r} is not supported: expected {known}")
    theta = parameters.get("rope_theta") or layer.get("rope_theta") or 10_000.0
    scaling = {name: value for name, value in parameters.items() if name != "rope_theta"}
    return float(theta), None if kind == "default" else scaling


def _check_fit(folder: Path, config: Eagle3Config, target: TargetShape) -> None:
    if config.target_hidden_size != target.hidden_size:
        raise UserError(
            f"{folder} reads hidden states of width {config.target_hidden_size}, the target's are "
            f"{target.hidden_size} wide: this head was trained for another model"
        )
    if config.vocab_size != target.vocab_size:
        raise UserError(
            f"{folder} has a vocabulary of {config.vocab_size} tokens, the target "
            f"{target.vocab_size}: this head was trained for another model"
        )
    outside = [layer for layer in config.aux_layer_ids if not 0 <= layer <= target.num_layers]
    if outside:
        raise UserError(f"{folder} reads layers {outside} of a target of {target.num_layers}")


def _assemble(
    folder: Path, config: Eagle3Config, tensors: Mapping[str, Tensor], *, target: TargetShape
) -> Eagle3Weights:
    left = {name: t for name, t in tensors.items() if not name.endswith(IGNORED_TENSORS)}
    take = _Taker(folder, left)
    hidden, double = config.hidden_size, 2 * config.hidden_size
    inner, query, kv = config.intermediate_size, config.query_size, config.kv_size
    layer = "layers.0."
    qkv = [
        take(f"{layer}self_attn.{name}_proj.weight", (size, double))
        for name, size in (("q", query), ("k", kv), ("v", kv))
    ]
    gate_up = [take(f"{layer}mlp.{name}_proj.weight", (inner, hidden)) for name in ("gate", "up")]
    weights = Eagle3Weights(
        embed_UH=_embedding(take, config, target),
        fc_HA=take("fc.weight", (hidden, config.aux_size)),
        qkv_PI=torch.cat(qkv),
        o_HQ=take(f"{layer}self_attn.o_proj.weight", (hidden, query)),
        gate_up_GH=torch.cat(gate_up),
        down_HF=take(f"{layer}mlp.down_proj.weight", (hidden, inner)),
        input_norm_H=take(f"{layer}input_layernorm.weight", (hidden,)),
        hidden_norm_H=take(f"{layer}hidden_norm.weight", (hidden,)),
        post_attention_norm_H=take(f"{layer}post_attention_layernorm.weight", (hidden,)),
        norm_H=take("norm.weight", (hidden,)),
        lm_head_VH=take("lm_head.weight", (config.draft_vocab_size, hidden)),
        draft_to_target_V=_draft_to_target(folder, config, take),
    )
    weights = _optional_tensors(config, weights, take)
    take.refuse_rest()
    _check_mask(folder, weights.draft_to_target_V, tensors.get("t2d"))
    return weights


class _Taker:
    """Takes tensors by name, checking shapes; what is left at the end is refused."""

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        self._folder = folder
        self._left = dict(tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._left:
            raise UserError(f"{self._folder} lacks the tensor {name!r}")
        tensor = self._left.pop(name)
        if tuple(tensor.shape) != shape:
            raise UserError(
                f"{self._folder}: {name} has shape {tuple(tensor.shape)}, config.json asks for "
                f"{shape}"
            )
        return tensor

    def refuse_rest(self) -> None:
        if self._left:
            names = ", ".join(sorted(self._left)[:4])
            raise UserError(f"{self._folder} holds tensors this head has no use for: {names}")


def _optional_tensors(config: Eagle3Config, weights: Eagle3Weights, take: _Taker) -> Eagle3Weights:
    layer = "layers.0.self_attn."
    sizes = (("q", config.query_size), ("k", config.kv_size), ("v", config.kv_size))
    if config.attention_bias:
        bias = [take(f"{layer}{name}_proj.bias", (size,)) for name, size in sizes]
        weights = replace(weights, qkv_bias_P=torch.cat(bias))
    if config.has_qk_norm:
        weights = replace(
            weights,
            q_norm_D=take(f"{layer}q_norm.weight", (config.head_dim,)),
            k_norm_D=take(f"{layer}k_norm.weight", (config.head_dim,)),
        )
    if config.norm_before_fc:
        weights = replace(weights, input_norm_A=take("input_norm.weight", (config.aux_size,)))
    if config.fc_norm:
        shape = (config.target_hidden_size,)
        norms = [take(f"fc_norm.{i}.weight", shape) for i in range(len(config.aux_layer_ids))]
        weights = replace(weights, fc_norm_A=torch.cat(norms))
    return weights


def _embedding(take: _Taker, config: Eagle3Config, target: TargetShape) -> Tensor:
    name = "embed_tokens.weight"
    if name in take:
        return take(name, (config.vocab_size, config.hidden_size))
    if target.embed_UH is None or config.hidden_size != target.hidden_size:
        return take(name, (config.vocab_size, config.hidden_size))
    return target.embed_UH


def _draft_to_target(folder: Path, config: Eagle3Config, take: _Taker) -> Tensor:
    size = config.draft_vocab_size
    if "d2t" not in take:
        if size != config.vocab_size:
            raise UserError(
                f"{folder} drafts {size} of {config.vocab_size} tokens but has no d2t map"
            )
        return torch.arange(size)
    ids = torch.arange(size) + take("d2t", (size,)).long()
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise UserError(
            f"{folder}: d2t leads out of the target's {config.vocab_size} tokens "
            f"({int(ids.min())}..{int(ids.max())}); it must hold offsets, target id - draft id"
        )
    if len(set(ids.tolist())) != size:
        raise UserError(
            f"{folder}: d2t gives two draft tokens the same target token; it must hold offsets, "
            "target id - draft id"
        )
    return ids


def _check_mask(folder: Path, ids_V: Tensor, mask_U: Tensor | None) -> None:
    if mask_U is None:
        return
    if int(mask_U.bool().sum()) != len(ids_V) or not bool(mask_U.bool()[ids_V].all()):
        raise UserError(f"{folder}: t2d and d2t describe different draft vocabularies")


def _disassemble(config: Eagle3Config, weights: Eagle3Weights) -> dict[str, Tensor]:
    layer = "midlayer."
    sizes = (config.query_size, config.kv_size, config.kv_size)
    q, k, v = torch.split(weights.qkv_PI, list(sizes))
    gate, up = weights.gate_up_GH.chunk(2)
    ids_V = weights.draft_to_target_V
    tensors = {
        "fc.weight": weights.fc_HA,
        f"{layer}self_attn.q_proj.weight": q,
        f"{layer}self_attn.k_proj.weight": k,
        f"{layer}self_attn.v_proj.weight": v,
        f"{layer}self_attn.o_proj.weight": weights.o_HQ,
        f"{layer}mlp.gate_proj.weight": gate,
        f"{layer}mlp.up_proj.weight": up,
        f"{layer}mlp.down_proj.weight": weights.down_HF,
        f"{layer}input_layernorm.weight": weights.input_norm_H,
        f"{layer}hidden_norm.weight": weights.hidden_norm_H,
        f"{layer}post_attention_layernorm.weight": weights.post_attention_norm_H,
        "norm.weight": weights.norm_H,
        "lm_head.weight": weights.lm_head_VH,
    }
    if config.draft_vocab_size != config.vocab_size:
        tensors["d2t"] = ids_V - torch.arange(len(ids_V))
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
        tensors["t2d"][ids_V] = True
    tensors |= _disassemble_optional(config, weights)
    if config.hidden_size != config.target_hidden_size:
        tensors["embed_tokens.weight"] = weights.embed_UH
    return {name: tensor.contiguous().clone() for name, tensor in tensors.items()}


def _disassemble_optional(config: Eagle3Config, weights: Eagle3Weights) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    layer = "midlayer.self_attn."
    if weights.qkv_bias_P is not None:
        sizes = (config.query_size, config.kv_size, config.kv_size)
        parts = torch.split(weights.qkv_bias_P, list(sizes))
        tensors |= {f"{layer}{n}_proj.bias": part for n, part in zip("qkv", parts, strict=True)}
    if weights.q_norm_D is not None and weights.k_norm_D is not None:
        tensors[f"{layer}q_norm.weight"] = weights.q_norm_D
        tensors[f"{layer}k_norm.weight"] = weights.k_norm_D
    if weights.input_norm_A is not None:
        tensors["input_norm.weight"] = weights.input_norm_A
    if weights.fc_norm_A is not None:
        norms = torch.split(weights.fc_norm_A, config.target_hidden_size)
        tensors |= {f"fc_norm.{i}.weight": norm for i, norm in enumerate(norms)}
    return tensors


def _config_json(config: Eagle3Config, dtype: torch.dtype) -> dict[str, Any]:
    # vLLM builds query and key norms for the Qwen3 class alone.
    kind = ("Eagle3Qwen3ForCausalLM", "qwen3") if config.has_qk_norm else None
    architecture, model_type = kind or ("LlamaForCausalLMEagle3", "llama")
    rope = config.rope_scaling or {"rope_type": "default"}
    aux = list(config.aux_layer_ids)
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
        "attention_bias": config.attention_bias,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "eagle_aux_hidden_state_layer_ids": aux,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": aux, "use_aux_hidden_state": True},
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    }
