"""Model folders of others: no code of theirs runs, no pickle is read, what fails is one line."""

from __future__ import annotations

import ast
import builtins
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvd_ray.engines.torch_engine import TorchEngine
from hvd_ray.errors import UserError
from hvd_ray.fetch import resolve_model
from hvd_ray.targets.loading import load_tokenizer, read_model_config
from hvd_ray.text import HFTextCodec

ROOT = Path(__file__).parents[3]
EVIL = "from pathlib import Path\nPath({mark!r}).touch()\n"
CLASSES = (
    "from transformers import {base}, PretrainedConfig\n"
    "class EvilConfig(PretrainedConfig): model_type = 'evilmodel'\n"
    "class Evil({base}): config_class = EvilConfig\n"
)


@pytest.fixture
def folder(tiny_llama_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama_path, tmp_path / "copy"))


def changed(file: Path, **values: Any) -> None:
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, **values}))


def opened(folder: Path) -> None:
    """As every command does it."""
    path = resolve_model(str(folder)).path_or_id
    HFTextCodec(path)
    TorchEngine.load(path, dtype="float32")


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as refusal:
        opened(folder)
    said = str(refusal.value)
    assert "\n" not in said
    assert len(said) < 600
    return said


@pytest.fixture
def answers_yes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Somebody who says yes to everything, and what was asked."""
    asked: list[str] = []

    def answer(question: str = "") -> str:
        asked.append(question)
        return "y"

    monkeypatch.setattr(builtins, "input", answer)
    return asked


@pytest.mark.parametrize("part", ["config", "model", "tokenizer"])
def test_code_of_a_folder_is_never_run_nor_asked_about(
    part: str, folder: Path, tmp_path: Path, answers_yes: list[str]
) -> None:
    mark = tmp_path / "ran"
    base = "PreTrainedTokenizerFast" if part == "tokenizer" else "LlamaForCausalLM"
    (folder / "evil.py").write_text(EVIL.format(mark=str(mark)) + CLASSES.format(base=base))
    if part == "tokenizer":
        auto_map: dict[str, Any] = {"AutoTokenizer": [None, "evil.Evil"]}
        changed(folder / "tokenizer_config.json", tokenizer_class="Evil", auto_map=auto_map)
    else:
        auto_map = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.Evil"}
        kind = "evilmodel" if part == "config" else "vit"
        changed(folder / "config.json", model_type=kind, architectures=["Evil"], auto_map=auto_map)
    if part == "tokenizer":
        try:
            opened(folder)  # by transformers' own class for the model
        except UserError as error:
            assert "\n" not in str(error)  # noqa: PT017
    else:
        refused(folder)
    assert not mark.exists()
    assert answers_yes == []


def test_the_refusal_of_code_says_why(folder: Path) -> None:
    changed(
        folder / "config.json", model_type="evilmodel", auto_map={"AutoConfig": "evil.EvilConfig"}
    )
    assert "brings code of its own, which is never run" in refused(folder)


def _calls() -> list[tuple[str, ast.Call]]:
    """Every call in the product that lets a library open a model of others."""
    found = []
    files = [f for part in ("hvd_ray", "scripts", "jobs") for f in (ROOT / part).rglob("*.py")]
    for file in files:
        text = file.read_text(encoding="utf-8")
        if not any(name in text for name in (".from_pretrained(", ".from_config(", "LLM(")):
            continue  # parsing all of them takes seconds
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                if name.endswith((".from_pretrained", ".from_config")) or name == "LLM":
                    found.append((f"{file.relative_to(ROOT)}:{node.lineno} {name}", node))
    return found


def test_no_call_leaves_code_or_pickles_open() -> None:
    calls = _calls()
    assert len(calls) >= 8
    for where, call in calls:
        given = {word.arg: ast.unparse(word.value) for word in call.keywords}
        if None in given:  # `**arguments`: where they are made is tested with the plugin's
            assert given[None] in ("arguments", "where"), where
            if given[None] == "arguments":
                continue
        assert given.get("trust_remote_code") == "False", where
        if where.endswith(" LLM"):
            assert given.get("load_format") == "'safetensors'", where
        if "AutoModel" in where and "gguf" not in where and "from_config" not in where:
            assert given.get("use_safetensors") == "True", where


class _Touch:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("stray", ["adapter.safetensors", "model-00001-of-00002.safetensors"])
def test_a_stray_file_opens_no_way_to_a_pickle(folder: Path, tmp_path: Path, stray: str) -> None:
    (folder / "model.safetensors").rename(folder / stray)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Touch(tmp_path / "ran")))
    assert "must hold weights as model.safetensors" in refused(folder)
    with pytest.raises(UserError, match="cannot be loaded"):  # nor where nobody has looked before
        TorchEngine.load(folder, dtype="float32")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("weights", ["adapter_model.bin", "../model.safetensors"])
def test_a_configuration_cannot_name_other_weights(folder: Path, weights: str) -> None:
    changed(folder / "config.json", transformers_weights=weights)
    assert "names weights of its own" in refused(folder)


def test_an_adapter_is_no_model(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/other"}')
    assert "holds an adapter" in refused(folder)


def test_attention_from_elsewhere_is_refused(folder: Path) -> None:
    changed(folder / "config.json", attn_implementation="org/kernel")
    assert "attention code from elsewhere" in refused(folder)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/outside.safetensors", "a/b.safetensors", "w.bin"]
)
def test_an_index_stays_in_its_folder(folder: Path, name: str) -> None:
    shutil.copy(folder / "model.safetensors", folder.parent / "outside.safetensors")
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"lm_head.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "is no index of safetensors in its folder" in refused(folder)


def test_a_model_in_several_files_is_loaded(tiny_llama_path: Path, tmp_path: Path) -> None:
    model = TorchEngine.load(tiny_llama_path, dtype="float32").model
    shutil.copytree(tiny_llama_path, tmp_path / "sharded")
    (tmp_path / "sharded" / "model.safetensors").unlink()
    model.save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").is_file()
    opened(tmp_path / "sharded")
    next((tmp_path / "sharded").glob("model-*.safetensors")).unlink()
    assert "which its index names" in refused(tmp_path / "sharded")


ODD_CONFIGS: tuple[dict[str, Any], ...] = (
    {"num_attention_heads": 0},
    {"num_attention_heads": -1},
    {"num_hidden_layers": 0},
    {"num_hidden_layers": "two"},
    {"hidden_size": 0},
    {"vocab_size": 0},
    {"vocab_size": None},
    {"max_position_embeddings": 0},
    {"max_position_embeddings": "far"},
    {"rope_parameters": {"rope_type": "spiral"}},
    {"rope_parameters": 3},
    {"rope_scaling": {"rope_type": "spiral", "factor": 2}},
    {"model_type": ["llama"]},
    {"model_type": "no such model"},
    {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    {"quantization_config": {"quant_method": "nobody knows"}},
    {"quantization_config": 3},
    {"hidden_act": "nonsense"},
    {"layer_types": ["spiral", "spiral"]},
    {"attn_implementation": "nonsense"},
    {"dtype": "float7"},
    {"architectures": 3},
    {"eos_token_id": "end"},
    {"head_dim": 0},
)


@pytest.mark.parametrize("values", ODD_CONFIGS, ids=str)
def test_an_odd_configuration_is_a_model_or_one_line(folder: Path, values: dict[str, Any]) -> None:
    changed(folder / "config.json", **values)
    try:
        opened(folder)
    except UserError as error:
        assert "\n" not in str(error)  # noqa: PT017
        assert len(str(error)) < 600  # noqa: PT017


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "[]"),
        ("config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"tokenizer_class": 3}'),
        ("tokenizer_config.json", '{"auto_map": 3}'),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": 3}}'),
        ("model.safetensors", "nonsense"),
        ("generation_config.json", "[]"),
        ("generation_config.json", '{"eos_token_id": "x"}'),
    ],
)
def test_a_file_of_another_form_is_one_line(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    refused(folder)


@pytest.mark.parametrize("content", ['{"weight_map": 3}', "[]", "{", '{"weight_map": {"a": 3}}'])
def test_an_index_of_another_form_is_one_line(folder: Path, content: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content)
    refused(folder)


def test_what_is_whole_is_read(tiny_llama_path: Path) -> None:
    assert read_model_config(tiny_llama_path).model_type == "llama"
    assert load_tokenizer(tiny_llama_path).chat_template
    opened(tiny_llama_path)
