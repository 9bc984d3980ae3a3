"""Heads that were published as pickles: their tensors as they are, and nothing else of them."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hvd_ray.drafting.eagle3_checkpoint import load_head
from hvd_ray.drafting.eagle3_convert import convert_head
from hvd_ray.errors import UserError
from tests.unit.drafting.test_eagle3_checkpoint import random_head, saved, target_of


def published(folder: Path) -> Any:
    """A head in a folder with `pytorch_model.bin`, as they came out first; the head itself."""
    head = random_head()
    saved(head, folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return head


def test_a_converted_head_is_the_head(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    head = published(source)
    tensors = convert_head(source, out)
    assert {"d2t", "t2d"} <= tensors.keys()
    read = load_head(out, target=target_of(head), dtype=torch.float32)
    assert read.config == load_head(out, target=target_of(head)).config
    kept = torch.load(source / "pytorch_model.bin", weights_only=True)
    written = load_file(out / "model.safetensors")
    assert written.keys() == kept.keys()
    assert all(torch.equal(written[name], kept[name]) for name in kept)


class _Run:
    """What a hostile file asks its reader to call."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.mark),))


def test_what_a_pickle_would_run_is_not_run(tmp_path: Path) -> None:
    source, out, mark = tmp_path / "source", tmp_path / "out", tmp_path / "ran"
    source.mkdir()
    published(source)
    for write in (
        lambda: torch.save({"fc.weight": _Run(mark)}, source / "pytorch_model.bin"),
        lambda: (source / "pytorch_model.bin").write_bytes(pickle.dumps(_Run(mark))),
    ):
        write()
        with pytest.raises(UserError, match="cannot be read as tensors alone") as told:
            convert_head(source, out)
        assert "\n" not in str(told.value)
        assert "weights_only" not in str(told.value), "no advice to read it without the safety"
    assert not mark.exists()
    assert not out.exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([1, 2], "holds a list"),
        ({}, "holds a dict"),
        ({"a": torch.zeros(1), "step": 3}, "'step' is a int"),
        ({3: torch.zeros(1)}, "3 is a Tensor"),
        ({"w": torch.eye(3).to_sparse()}, "'w' is sparse"),
        ({"w": torch.zeros(2, device="meta")}, "'w' is sparse, quantised or empty"),
        ({"w": torch.zeros(1).expand(10**12)}, "'w' is sparse, quantised or empty"),
    ],
)
def test_what_is_no_head_is_refused(tmp_path: Path, content: Any, said: str) -> None:
    published(tmp_path)
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=said):
        convert_head(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten_and_nothing_guessed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no head in"):
        convert_head(tmp_path, tmp_path / "out")
    published(tmp_path)
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="exists: choose another --out"):
        convert_head(tmp_path, tmp_path / "out")
    torch.save({"fc.weight": torch.zeros(1)}, tmp_path / "second.bin")
    with pytest.raises(UserError, match=r"fc.weight stands in another file"):
        convert_head(tmp_path, tmp_path / "other")
    (tmp_path / "pytorch_model.bin").unlink()
    (tmp_path / "second.bin").unlink()
    with pytest.raises(UserError, match="nothing to convert"):
        convert_head(tmp_path, tmp_path / "other")
