"""Trees of the head: the most likely continuations, grown level by level (EAGLE-2, 2406.16858).

At each level the `width` best nodes are expanded, each by its `width` likeliest tokens; of all
nodes the `total` most likely ones are kept. A node's value is its path's probability under the
head, so a kept node's ancestors are kept too.

Shapes: W rows of a level, S rows in the head's KV cache, V draft vocabulary, H width of the head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hvd_ray.drafting.eagle3 import Eagle3Head, Eagle3KV


@dataclass(frozen=True, slots=True)
class TreeShape:
    """How large a tree may grow."""

    depth: int
    """The most tokens on a path."""
    width: int
    """Nodes expanded at each level, and children of each."""
    total: int
    """Nodes in all."""


@dataclass(slots=True)
class _Nodes:
    """Nodes in the order in which they were found; a parent stands before its children."""

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Of the whole path."""

    def add(self, token_ids: list[int], parents: list[int], log_probs: list[float]) -> range:
        first = len(self.token_ids)
        self.token_ids += token_ids
        self.parents += parents
        self.log_probs += log_probs
        return range(first, len(self.token_ids))

    def best(self, among: range, count: int) -> list[int]:
        """The most likely ones, ties to the earlier, in the order in which they were found."""
        return sorted(sorted(among, key=lambda node: -self.log_probs[node])[:count])


@dataclass(frozen=True, slots=True)
class Tree:
    """Draft tokens as a tree; -1 is the parent of those that follow the prefix."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    probs: tuple[float, ...]
    """P(this token and those before it on its path), under the head."""


def grow_tree(
    head: Eagle3Head, kv: Eagle3KV, normed_1H: Tensor, feature_1H: Tensor, shape: TreeShape
) -> Tree:
    """Grow a tree from the head's outputs at the last committed row; `kv` is left as it was."""
    num_committed = kv.length
    nodes = _Nodes()
    frontier = list(_expand(head, nodes, [-1], normed_1H, shape.width))
    feature_WH = feature_1H.expand(len(frontier), -1)
    mask_WS = torch.ones(len(frontier), num_committed, dtype=torch.bool, device=head.device)
    for level in range(1, shape.depth):
        own = torch.eye(len(frontier), dtype=torch.bool, device=head.device)
        mask_WS = torch.cat((mask_WS, own), dim=1)
        normed_WH, feature_WH = head.extend(
            kv,
            torch.tensor([nodes.token_ids[node] for node in frontier], device=head.device),
            feature_WH,
            positions_T=torch.full((len(frontier),), num_committed + level - 1, device=head.device),
            mask_TS=mask_WS,
        )
        found = _expand(head, nodes, frontier, normed_WH, shape.width)
        kept = nodes.best(found, shape.width)
        rows = torch.tensor([frontier.index(nodes.parents[node]) for node in kept])
        feature_WH, mask_WS = feature_WH[rows], mask_WS[rows]
        frontier = kept
    kv.truncate(num_committed)
    return _pruned(nodes, shape.total)


def _expand(
    head: Eagle3Head, nodes: _Nodes, parents: list[int], normed_WH: Tensor, width: int
) -> range:
    """Add the likeliest tokens after each parent, whose row of the head is `normed_WH[i]`."""
    log_probs_WV = head.logits(normed_WH).float().log_softmax(-1)
    top = log_probs_WV.topk(min(width, log_probs_WV.shape[-1]), dim=-1)
    before = [nodes.log_probs[parent] if parent >= 0 else 0.0 for parent in parents]
    values = [b + v for b, row in zip(before, top.values.tolist(), strict=True) for v in row]
    token_ids = head.target_ids(top.indices).flatten().tolist()
    num_children = top.indices.shape[1]
    return nodes.add(token_ids, [p for p in parents for _ in range(num_children)], values)


def _pruned(nodes: _Nodes, total: int) -> Tree:
    kept = nodes.best(range(len(nodes.token_ids)), total)
    index_of = {-1: -1} | {node: index for index, node in enumerate(kept)}
    return Tree(
        tuple(nodes.token_ids[node] for node in kept),
        tuple(index_of[nodes.parents[node]] for node in kept),
        tuple(math.exp(nodes.log_probs[node]) for node in kept),
    )
