"""What a head is worth on recorded responses: teacher-forced replay of its chain drafts.

From every position the head drafts K tokens fed by its own argmax; the accepted length is the
matching prefix of the recording. Walking the recording as decoding would (accept, advance) gives
emitted tokens per target pass, the first pass being the one that reads the prompt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from hvd_ray.drafting.eagle3 import Eagle3Head
from hvd_ray.drafting.eagle3_chain import accepted_lengths
from hvd_ray.drafting.eagle3_responses import Response
from hvd_ray.drafting.eagle3_states import ResponseStates


@dataclass
class DraftQuality:
    """Sums over responses; ratios are properties, so that families add up honestly."""

    num_steps: int
    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    """Cycles that drafted."""
    reached: list[int] = field(default_factory=list)
    """Cycles in which at least k draft tokens were accepted, k = 1..K."""
    positions: int = 0
    correct: list[int] = field(default_factory=list)
    """At all positions: draft token k right, all before it being right."""

    def __post_init__(self) -> None:
        self.reached = self.reached or [0] * self.num_steps
        self.correct = self.correct or [0] * self.num_steps

    @property
    def emitted_per_pass(self) -> float:
        return self.tokens / max(1, self.passes)

    @property
    def acceptance_by_position(self) -> list[float]:
        """P(at least k accepted) in cycles that decoding visits."""
        return [count / max(1, self.drafted) for count in self.reached]

    @property
    def accuracy_by_position(self) -> list[float]:
        """P(token k right | tokens before it right), over all positions of the recordings."""
        before = [self.positions, *self.correct[:-1]]
        return [right / max(1, base) for right, base in zip(self.correct, before, strict=True)]

    def add(self, other: DraftQuality) -> None:
        """Count another's responses too."""
        self.tokens += other.tokens
        self.passes += other.passes
        self.drafted += other.drafted
        self.positions += other.positions
        self.reached = [a + b for a, b in zip(self.reached, other.reached, strict=True)]
        self.correct = [a + b for a, b in zip(self.correct, other.correct, strict=True)]


def response_lengths(head: Eagle3Head, states: ResponseStates, *, num_steps: int) -> list[int]:
    """Accepted length of a K-token chain at every root of one response.

    Root r drafts the tokens after output token r; the list is one shorter than the output.
    """
    return accepted_lengths(
        head,
        states.token_ids_T,
        states.aux_TA,
        first_root=len(states.token_ids_T) - states.num_rows,
        num_roots=states.num_rows - 2,
        num_steps=num_steps,
    )


def walk(accepted: Sequence[int], *, num_steps: int) -> DraftQuality:
    """Replay one response: the prompt's pass emits one token, each cycle accepted + 1."""
    quality = DraftQuality(num_steps=num_steps, tokens=len(accepted) + 1, passes=1)
    root = 0
    while root < len(accepted):
        quality.passes += 1
        quality.drafted += 1
        for k in range(accepted[root]):
            quality.reached[k] += 1
        root += accepted[root] + 1
    quality.positions = len(accepted)
    quality.correct = [sum(length > k for length in accepted) for k in range(num_steps)]
    return quality


def by_workload(response: Response) -> str:
    return response.workload


def evaluate(
    head: Eagle3Head,
    responses: Iterable[ResponseStates],
    *,
    num_steps: int = 4,
    group: Callable[[Response], str] = by_workload,
) -> dict[str, DraftQuality]:
    """Draft quality by group, and over everything under "all"."""
    totals: dict[str, DraftQuality] = defaultdict(lambda: DraftQuality(num_steps=num_steps))
    for states in responses:
        if len(states.response.output_token_ids) < 3:
            continue
        one = walk(response_lengths(head, states, num_steps=num_steps), num_steps=num_steps)
        totals[group(states.response)].add(one)
        totals["all"].add(one)
    return dict(totals)
