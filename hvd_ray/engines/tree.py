"""Tree attention: what each row of a verified tree may see, and where it stands.

Shapes: N tree rows, T rows of the pass (those before the tree and N), S cached positions and T.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def tree_depths(parents: Sequence[int]) -> list[int]:
    """How many tree rows each row follows; parents stand before their children, -1: none."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def tree_attention(
    parents: Sequence[int], *, num_rows: int, num_cached: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(mask_TS, positions_T)` of a pass whose last N rows are a tree.

    The rows before the tree see all that is cached and each other causally; a tree row sees all of
    those, its ancestors and itself, and stands where it would in a chain of them.

    Args:
        parents: of each tree row, its index among the tree rows, -1 for the row before the tree.
        num_rows: T.
        num_cached: positions cached before the pass.
    """
    num_before = num_rows - len(parents)
    assert num_before >= 1, "a tree follows a row of the pass"
    mask_TS = torch.ones(num_rows, num_cached + num_rows, dtype=torch.bool)
    mask_TS[:num_before] = mask_TS[:num_before].tril(num_cached)
    first = num_cached + num_before
    mask_TS[num_before:, first:] = _ancestors(parents)
    after = [num_before + depth for depth in tree_depths(parents)]
    return mask_TS, num_cached + torch.tensor([*range(num_before), *after])


def _ancestors(parents: Sequence[int]) -> torch.Tensor:
    """Boolean NN: itself and those it follows."""
    mask_NN = torch.eye(len(parents), dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            mask_NN[row] |= mask_NN[parent]
    return mask_NN
