"""What tokens that the target never saw may cost, and how it is found out what they did cost.

*Loss budget*: each request may spend so much probability of a wrong token; a block ends where it
might exceed what is left, and what follows is checked in full. *Audit*: the target reads, later,
what was committed without it. The share of tokens that it would not have chosen has an exact upper
confidence bound (Clopper and Pearson 1934); while the bound is above the target rate, no token goes
unchecked. It takes a stricter one to be trusted than to stay so.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

CONFIDENCE = 0.95
TRUST_CONFIDENCE = 0.995
"""Of the bound that gives trust. It is looked at after every block, and so many looks at a bound of
95 % would trust one in four slim models that are just as bad as the limit; with this, one in 25."""


@dataclass(slots=True)
class LossLedger:
    """One request's account."""

    is_audited: bool
    """Whether all its unchecked tokens are read by the target later."""
    spent: float = 0.0
    """Sum over unchecked tokens of the gate's probability that the token is wrong."""
    is_closed: bool = False
    """Whether a block has come of which not even one token fitted into what was left."""


class Trust(StrEnum):
    """Whether a slim model may commit tokens."""

    PROBATION = "probation"
    """The target checks everything; what the gate would have passed is counted."""
    TRUSTED = "trusted"
    WITHDRAWN = "withdrawn"
    """The bound passed the target rate; everything is checked in full from here on."""


@dataclass(slots=True)
class Audit:
    """Counts audited tokens and says whether they still allow unchecked ones."""

    max_miss_rate: float = 0.05
    """The target rate for the upper bound; 1: whatever is found, go on."""
    min_tokens: int = 200
    """Audited tokens before any trust: a bound from a few would be lost again by one miss."""
    max_probation: int = 2000
    """Audited tokens after which a probation that has not convinced ends."""
    num_tokens: int = 0
    num_missed: int = 0
    """Audited tokens that the target would not have chosen after the same prefix."""
    is_convinced: bool = False
    """Whether the probation has ended well."""
    is_withdrawn: bool = False

    def add(self, *, num_tokens: int, num_missed: int) -> None:
        """Count some audited tokens; trust once given is lost for good where they are too bad."""
        self.num_tokens += num_tokens
        self.num_missed += num_missed
        if self.trust is Trust.TRUSTED:
            self.is_withdrawn = self.upper_bound > self.max_miss_rate
        elif self.trust is Trust.PROBATION:
            bound = upper_bound(self.num_missed, self.num_tokens, confidence=TRUST_CONFIDENCE)
            is_known = self.num_tokens >= self.min_tokens
            self.is_convinced = is_known and bound <= self.max_miss_rate
            self.is_withdrawn = not self.is_convinced and self.num_tokens >= self.max_probation

    @property
    def trust(self) -> Trust:
        if self.is_withdrawn:
            return Trust.WITHDRAWN
        is_trusted = self.is_convinced or self.max_miss_rate == 1
        return Trust.TRUSTED if is_trusted else Trust.PROBATION

    @property
    def upper_bound(self) -> float:
        """Of the rate of missed tokens, at 95 % confidence."""
        return upper_bound(self.num_missed, self.num_tokens)


def upper_bound(num_missed: int, num_tokens: int, *, confidence: float = CONFIDENCE) -> float:
    """One-sided Clopper-Pearson bound on a rate; 1 where nothing is known."""
    from scipy.stats import beta

    if num_missed >= num_tokens:
        return 1.0
    return float(beta.ppf(confidence, num_missed + 1, num_tokens - num_missed))
