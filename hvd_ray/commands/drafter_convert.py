"""`hvd drafter convert`: a head that was published as a pickle, as safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

CONVERT_EXAMPLE = (
    "Example: `hvd drafter convert EAGLE3-LLaMA3.1-Instruct-8B --out head`, then "
    "`drafting.eagle3.head=head`"
)


def convert(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="With config.json and pytorch_model.bin.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder to write; must not exist.")],
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON on stdout.")] = False,
) -> None:
    """Turn a head's pickled weights (.bin) into safetensors, names and numbers unchanged.

    Only here is a pickle read, by PyTorch's reader that builds nothing but tensors.
    """
    from hvd_ray.drafting.eagle3_convert import convert_head

    tensors = convert_head(folder, out)
    size_mb = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
    if as_json:
        print(json.dumps({"out": str(out), "tensors": len(tensors), "size_mb": round(size_mb, 1)}))
        return
    print(f"written: {out} ({len(tensors)} tensors, {size_mb:.1f} MB)")
    print(f"use it with drafting.eagle3.head={out}")
