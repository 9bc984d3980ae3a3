"""Which model is in a folder, and is it one that we can load."""

import json
import shutil
from pathlib import Path

import pytest

from hvd_ray.errors import UserError
from hvd_ray.targets.identity import check_model_folder, model_fingerprint, tokenizer_sha


@pytest.fixture
def folder(tiny_llama_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama_path, tmp_path / "copy"))


def test_a_copy_is_the_same_model(folder: Path, tiny_llama_path: Path) -> None:
    check_model_folder(folder)
    assert model_fingerprint(folder) == model_fingerprint(str(tiny_llama_path))
    assert tokenizer_sha(folder) == tokenizer_sha(tiny_llama_path)
    assert len(model_fingerprint(folder)) == len(tokenizer_sha(folder)) == 64


def test_a_fine_tune_of_equal_shape_is_another_model(folder: Path, tiny_llama_path: Path) -> None:
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    tuned = bytes(byte ^ 1 for byte in content[header:])
    weights.write_bytes(content[:header] + tuned)
    assert model_fingerprint(folder) != model_fingerprint(tiny_llama_path)
    assert tokenizer_sha(folder) == tokenizer_sha(tiny_llama_path)


def test_configuration_and_vocabulary_are_part_of_the_model(
    folder: Path, tiny_llama_path: Path
) -> None:
    original = model_fingerprint(tiny_llama_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    assert model_fingerprint(folder) != original
    (folder / "config.json").write_text(json.dumps(dict(reversed(config.items()))))
    assert model_fingerprint(folder) == original, "the order of keys means nothing"
    with (folder / "tokenizer.json").open("a") as handle:
        handle.write(" ")
    assert model_fingerprint(folder) != original
    assert tokenizer_sha(folder) != tokenizer_sha(tiny_llama_path)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "config.json is missing"),
        ("tokenizer.json", "holds no tokenizer"),
        ("model.safetensors", r"weights as \*\.safetensors, found none"),
    ],
)
def test_what_is_missing_is_named(folder: Path, missing: str, message: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(UserError, match=message):
        check_model_folder(folder)


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"only pytorch_model\.bin, and pickles are not loaded"):
        check_model_folder(folder)


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b"\xff\xfe"])
def test_a_config_that_is_none_is_refused(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=r"config\.json"):
        check_model_folder(folder)


@pytest.mark.parametrize("content", [b"", b"\xff" * 7, b"\xff" * 100])
def test_damaged_weights_still_have_a_fingerprint(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    assert len(model_fingerprint(folder)) == 64
