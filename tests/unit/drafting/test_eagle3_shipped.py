"""The head that ships: small enough, whole, and fitting its target."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import torch

from hvd_ray.drafting.eagle3_checkpoint import TargetShape, load_head

FOLDER = Path(str(files("hvd_ray") / "assets" / "smollm2-135m" / "eagle3"))


def test_the_shipped_head_fits_the_default_model() -> None:
    target = TargetShape(
        hidden_size=576, vocab_size=49_152, num_layers=30, embed_UH=torch.zeros(49_152, 576)
    )
    head = load_head(FOLDER, target=target, dtype=torch.bfloat16)
    assert head.config.draft_vocab_size == 16_384
    for name, tensor in head.weights.named().items():
        assert bool(tensor.isfinite().all()), name


def test_the_shipped_head_stays_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 30_000_000


def test_the_model_card_stands_beside_it() -> None:
    card = (FOLDER / "README.md").read_text()
    for heading in ("What it is worth", "Data", "Making it", "Limits"):
        assert f"## {heading}" in card
