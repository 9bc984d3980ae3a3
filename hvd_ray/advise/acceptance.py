"""How a model drafter would fare on traffic that it never saw: assumed, or measured elsewhere.

Replay cannot run a head. It needs, at every position, how many of the head's tokens the target
would have accepted; those are drawn from given chances of acceptance, position by position of the
draft. What rests on them is marked as assumed, wherever it is shown.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hvd_ray.errors import UserError
from hvd_ray.payoff.cost_policy import MODEL_ACCEPTANCE
from hvd_ray.traces.replay import ModelDrafts
from hvd_ray.traces.schema import Trace
from hvd_ray.types import Int32Array, Source, Step

NO_HEAD = "none"
MAX_CHAIN = 64
"""As `drafting.eagle3.num_tokens`."""
ASSUMED = MODEL_ACCEPTANCE
"""The prior of `hvd_cost`, 1.7 tokens a pass; the HVD paper's EAGLE-3 needs 571 passes for 1,000
tokens, 1.75 a pass (2606.01019, Llama-3.1-8B)."""


@dataclass(frozen=True, slots=True)
class HeadAcceptance:
    """P(draft token k accepted | those before it were), by position of the draft."""

    chances: tuple[float, ...]
    basis: str
    is_assumed: bool

    @property
    def emitted_per_pass(self) -> float:
        """What the head alone would reach."""
        return 1.0 + float(np.cumprod(self.chances).sum())

    def drafts(self, trace: Trace, *, seed: int) -> ModelDrafts:
        """Accepted lengths at every position of a trace; the same for the same trace and seed.

        Positions are drawn independently, which real heads are not: they do better in easy
        stretches and worse in hard ones.
        """
        stream = np.random.default_rng([seed, zlib.crc32(trace.trace_id.encode())])
        uniform_TK = stream.random((len(trace.output_token_ids), len(self.chances)))
        is_accepted_TK = uniform_TK < np.asarray(self.chances)
        accepted_T: Int32Array = np.cumprod(is_accepted_TK, axis=1).sum(axis=1).astype(np.int32)
        return ModelDrafts(Source.EAGLE3, accepted_T, len(self.chances))


def assumed_acceptance() -> HeadAcceptance:
    """What a modest head reaches."""
    return HeadAcceptance(ASSUMED, "assumed: what a modest head reaches", is_assumed=True)


def parse_acceptance(text: str) -> HeadAcceptance:
    """`0.6,0.5,0.4`: chances by position.

    Raises:
        UserError: they are no chances.
    """
    try:
        chances = tuple(float(part) for part in text.split(","))
    except ValueError:
        chances = ()
    is_usable = 1 <= len(chances) <= MAX_CHAIN and all(0 <= chance < 1 for chance in chances)
    if not is_usable:
        raise UserError(
            f"--eagle3 {text[:200]!r}: expected chances of acceptance by draft position such as "
            f"0.6,0.5,0.4, {MAX_CHAIN} at most, a folder of `hvd traces collect --policy eagle3`, "
            f"or {NO_HEAD}"
        )
    return HeadAcceptance(chances, f"assumed: --eagle3 {text}", is_assumed=True)


def measured_acceptance(steps: Iterable[Sequence[Step]], *, basis: str) -> HeadAcceptance:
    """The chances that a head had in recorded decoding.

    Raises:
        UserError: it never drafted.
    """
    cycles = [s for trace in steps for s in trace if s.source == Source.EAGLE3 and s.drafted]
    if not cycles:
        raise UserError(
            f"{basis}: no step there drafted with a head; collect with `--policy eagle3`"
        )
    longest = max(step.drafted for step in cycles)
    chances = tuple(_chance(cycles, index) for index in range(longest))
    return HeadAcceptance(chances, f"measured: {len(cycles):,} drafts in {basis}", is_assumed=False)


def _chance(cycles: Sequence[Step], index: int) -> float:
    tried = [step for step in cycles if step.drafted > index and step.accepted >= index]
    return sum(step.accepted > index for step in tried) / len(tried) if tried else 0.0
