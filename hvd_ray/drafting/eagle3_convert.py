"""Pickled weights of a head into safetensors: once, when asked for, and nowhere else.

The heads that were published with EAGLE-3 hold `pytorch_model.bin` alone. Loading a head never
reads such a file. Here PyTorch's restricted reader does (`weights_only`): it builds tensors and
plain containers, and refuses whatever else a pickle asks for.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import torch
from torch import Tensor

from hvd_ray.errors import UserError
from hvd_ray.home import atomic_dir

_log = logging.getLogger(__name__)


def convert_head(folder: Path, out: Path) -> dict[str, Tensor]:
    """Write the tensors of the folder's `.bin` files to `out/model.safetensors`, names unchanged.

    `config.json` is copied beside them. Returns the tensors.

    Raises:
        UserError: no such checkpoint, weights that are something else than tensors, a name in two
            files, or something stands at `out`.
    """
    from safetensors.torch import save_file

    paths, settings = sorted(folder.glob("*.bin")), folder / "config.json"
    if not settings.is_file():
        raise UserError(f"no head in {folder}: expected config.json and pytorch_model.bin")
    if not paths:
        raise UserError(f"{folder} holds no .bin file: there is nothing to convert")
    if out.exists():
        raise UserError(f"{out} exists: choose another --out")
    tensors: dict[str, Tensor] = {}
    for path in paths:
        found = _read(path)
        if twice := sorted(tensors.keys() & found):
            raise UserError(f"{path}: {twice[0]} stands in another file too; convert one head")
        tensors |= found
    with atomic_dir(out) as made:
        save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
        shutil.copyfile(settings, made / "config.json")
    return tensors


def _read(path: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - a hostile file raises what it likes
        _log.info("%s: %s", path, error)  # torch's words advise to read it without the safety
        raise UserError(
            f"{path} cannot be read as tensors alone ({type(error).__name__}): it is damaged, or "
            "holds code, which is never run"
        ) from None
    if not isinstance(found, dict) or not found:
        raise UserError(f"{path} holds a {type(found).__name__}: expected tensors by name")
    for name, value in found.items():
        if not (isinstance(name, str) and isinstance(value, Tensor)):
            raise UserError(f"{path}: {name!r} is a {type(value).__name__}: expected a tensor")
        if not _is_plain(value):
            raise UserError(
                f"{path}: {name!r} is sparse, quantised or empty space, not plain numbers"
            )
    # A copy of each: safetensors takes no two names for one memory.
    return {name: value.detach().clone().contiguous() for name, value in found.items()}


def _is_plain(tensor: Tensor) -> bool:
    """Whether all its numbers stand in the file: a view may claim any number of repetitions."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        return False
    return tensor.nbytes <= tensor.untyped_storage().nbytes()
