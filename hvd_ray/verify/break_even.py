"""Whether tiers can pay at all: a slim pass is paid for every block, a full one for some.

A block costs `slim + P(escalate) * full` instead of `full`, so tiers pay iff
`slim / full + P(escalate) < 1` (papers: VIA-SD's break-even). In a batch of B requests that are
verified together, the target is needed with probability `1 - (1 - P)^B`.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvd_ray.errors import UserError

BLOCK_ROWS = 6
"""Rows of a block: the paper's draft of five tokens and the committed one before it."""


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Measured costs of one block's passes, and how often the target is needed."""

    slim_ms: float
    full_ms: float
    escalated: float
    """Share of the blocks that need the target."""

    @property
    def cost_ratio(self) -> float:
        return self.slim_ms / self.full_ms

    def sum(self, *, batch_size: int = 1) -> float:
        """Below 1 tiers can pay."""
        return self.cost_ratio + 1 - (1 - self.escalated) ** batch_size

    def __str__(self) -> str:
        return (
            f"slim/full cost {self.slim_ms:.1f}/{self.full_ms:.1f} ms = {self.cost_ratio:.2f}, "
            f"P(escalate) {self.escalated:.2f}, sum {self.sum():.2f}"
        )


def refuse_unless_it_pays(measured: BreakEven | None, *, is_forced: bool, instead: str) -> None:
    """Stop a configuration that costs more than it saves.

    This is about cost alone; what is lost, the audit finds out. So what saves by never asking the
    target, whatever the slim model says, is stopped as well. `instead` is what to use then, in the
    words in which tiers were asked for.

    Raises:
        UserError: it cannot pay, nobody has measured whether it can, or it never asks.
    """
    if is_forced:
        return
    if measured is None:
        raise UserError(
            "tiers: whether they pay here was not measured; run `hvd calibrate`, or study them "
            "all the same with tiers.is_forced=true"
        )
    if measured.escalated == 0:
        raise UserError(
            f"tiers: at this threshold the target is never asked ({measured}), and costs do not "
            "say what that loses; raise it, or study it all the same with tiers.is_forced=true"
        )
    if measured.sum() >= 1:
        raise UserError(
            f"tiers cannot pay here: {measured} >= 1; use {instead}, or study them all the same "
            "with tiers.is_forced=true"
        )
