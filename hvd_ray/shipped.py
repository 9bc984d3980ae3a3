"""What ships with the package for a target: a head, a payoff predictor, a slim model."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def shipped_folder(model: str, part: str) -> Path | None:
    """The folder of a shipped part, or None; only a target named as shipped has any.

    Args:
        model: as the configuration names it; a path or a hub id is another target.
        part: `eagle3`, `payoff` or `slim`.
    """
    if Path(model).name != model:
        return None
    folder = Path(str(files("hvd_ray"))) / "assets" / model / part
    return folder if folder.is_dir() else None
