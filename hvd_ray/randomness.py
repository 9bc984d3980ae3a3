"""Random numbers that belong to a place, and drawing from a distribution with one of them."""

from __future__ import annotations

import numpy as np
import torch

# Shapes: V vocabulary.


def seeded_generator(seed: int | None, *, stream: int = 0) -> np.random.Generator:
    """A generator for any integer seed; None draws one from the system.

    Streams of one seed, and seeds of one stream, are independent of one another.
    """
    entropy = None if seed is None else [seed % 2**64, stream]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))


class RandomStream:
    """One request's uniform numbers: one for each output position, whatever was drafted there.

    Because position, not order of drawing, picks the number, a seeded request gives the same
    tokens with any drafter, or none.
    """

    def __init__(self, seed: int | None) -> None:
        self._generator = seeded_generator(seed)
        self._drawn: list[float] = []

    def uniform(self, position: int) -> float:
        """The number in [0, 1) that belongs to an output position."""
        while len(self._drawn) <= position:
            self._drawn.extend(self._generator.random(64).tolist())
        return self._drawn[position]


def pick(probs_V: torch.Tensor, uniform: float) -> int:
    """Inverse of the cumulative distribution at `uniform` (in [0, 1))."""
    cumulative_V = probs_V.cumsum(0)
    target = torch.tensor(uniform, dtype=probs_V.dtype) * cumulative_V[-1]
    index = int(torch.searchsorted(cumulative_V, target, right=True))
    if index >= len(probs_V) or probs_V[index] == 0:  # rounding at the very end of the support
        index = int(torch.nonzero(probs_V)[-1])
    return index
