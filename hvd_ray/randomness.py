"""Random numbers that belong to a place, and drawing from a distribution with them."""

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
    """One request's random numbers: a set for each output position, whatever was drafted there.

    Because position, not order of drawing, picks the numbers, a seeded request gives the same
    tokens with any drafter, or none (drafter invariance, 2408.07978).
    """

    def __init__(self, seed: int | None) -> None:
        entropy = None if seed is None else [seed % 2**64, 0]
        self._key = np.random.SeedSequence(entropy).generate_state(2, np.uint64)

    def sample(self, probs_V: torch.Tensor, position: int) -> int:
        """A token from `probs_V` (float64, need not sum to one) by the position's numbers.

        Each token runs a race of its own: the smallest of E_v / p_v wins, with E_v exponential
        (the Gumbel-max trick). A rounding of p decides only where two tokens arrive at the same
        time; the inverse of a cumulative distribution would move the bounds of all later tokens,
        and in the tail of thousands of rare ones that picks another.
        """
        numbers = np.random.Philox(key=self._key, counter=[0, 0, position, 0])
        race_V = np.random.Generator(numbers).standard_exponential(len(probs_V))
        weights_V = probs_V.cpu().numpy()
        running = np.flatnonzero(weights_V)
        return int(running[(race_V[running] / weights_V[running]).argmin()])


def pick(probs_V: torch.Tensor, uniform: float) -> int:
    """Inverse of the cumulative distribution at `uniform` (in [0, 1))."""
    cumulative_V = probs_V.cumsum(0)
    target = torch.tensor(uniform, dtype=probs_V.dtype) * cumulative_V[-1]
    index = int(torch.searchsorted(cumulative_V, target, right=True))
    if index >= len(probs_V) or probs_V[index] == 0:  # rounding at the very end of the support
        index = int(torch.nonzero(probs_V)[-1])
    return index
