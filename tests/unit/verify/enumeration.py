"""Runs a randomised procedure along every path of its choices, with the exact probability of each.

The procedure's own code runs; only its random numbers are replaced by choices to be tried in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch


@dataclass
class Chance:
    """One path: the first choices are prescribed, the later ones take the first possibility."""

    script: list[int]
    taken: list[int] = field(default_factory=list)
    options: list[list[int]] = field(default_factory=list)
    """The possibilities (of a probability above zero) at each choice."""
    prob: float = 1.0

    def choose(self, probs: Sequence[float]) -> int:
        possible = [index for index, prob in enumerate(probs) if prob > 0]
        step = len(self.taken)
        index = self.script[step] if step < len(self.script) else possible[0]
        self.taken.append(index)
        self.options.append(possible)
        self.prob *= probs[index] / sum(probs)
        return index

    def pick(self, probs_V: torch.Tensor, uniform: object) -> int:
        """Stands in for `randomness.pick`."""
        del uniform
        return self.choose(probs_V.tolist())

    def random(self) -> Uniform:
        """Stands in for a generator's `random`."""
        return Uniform(self)

    def sample(self, probs_V: torch.Tensor, position: int) -> int:
        """Stands in for `RandomStream.sample`."""
        del position
        return self.choose(probs_V.tolist())


@dataclass(frozen=True)
class Uniform:
    """A number of [0, 1) that is compared before it is known."""

    chance: Chance

    def __mul__(self, factor: float) -> _Scaled:
        return _Scaled(self.chance, factor)


@dataclass(frozen=True)
class _Scaled:
    chance: Chance
    factor: float

    def __ge__(self, bound: float) -> bool:
        below = min(1.0, bound / self.factor)
        return self.chance.choose([below, 1 - below]) == 1


def every_path(procedure: Callable[[Chance], object]) -> Iterator[tuple[object, float]]:
    """Each outcome and the probability of the path to it; the probabilities sum to one."""
    script: list[int] | None = []
    while script is not None:
        chance = Chance(script)
        yield procedure(chance), chance.prob
        script = _next(chance)


def _next(chance: Chance) -> list[int] | None:
    """The following path, the last choices turning first."""
    taken, options = list(chance.taken), list(chance.options)
    while taken:
        last, possible = taken.pop(), options.pop()
        later = [index for index in possible if index > last]
        if later:
            return [*taken, later[0]]
    return None
