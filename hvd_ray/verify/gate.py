"""Gates: what becomes of a draft token that the slim model has seen and the target has not.

The signal is the slim model's, not the drafter's. `RatioGate` is VIA-SD's (2606.12243): r =
q'(v) / max q' against two thresholds. `LearnedGate` asks a small network how likely the target is
to choose the token, from features that need no pass of the target.

Shapes: K draft tokens, T = K + 1 rows of the slim model, V vocabulary, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hvd_ray.errors import UserError
from hvd_ray.payoff.network import Network
from hvd_ray.types import Draft, Float32Array


class Tier(StrEnum):
    """Who checks a token."""

    ACCEPT = "accept"
    """Nobody further: the draft token stands."""
    SLIM = "slim"
    """The slim model: its own token takes the draft token's place."""
    FULL = "full"


@dataclass(frozen=True, slots=True)
class GateRows:
    """A draft and what the slim model says of it."""

    draft: Draft
    probs_TV: torch.Tensor
    """The slim model's distribution at each row, before sampling makes it one-hot."""
    own_ids: tuple[int, ...]
    """The slim model's most likely token at each of the T rows; at a temperature too, since a
    gate that saw the token drawn would decide by it who draws."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a gate makes of a draft; losses are probabilities that the target chooses otherwise."""

    tiers: tuple[Tier, ...]
    """One for each draft token."""
    draft_loss: tuple[float, ...]
    """Of each draft token, if it stands."""
    own_loss: tuple[float, ...]
    """Of the slim model's own token at each of the T rows."""
    keeps_bonus: bool
    """Whether the slim model's token after a draft that stands whole may stand as well."""


class Gate(Protocol):
    """Sorts draft tokens into tiers."""

    def judge(self, rows: GateRows) -> Judgement: ...


@dataclass(frozen=True, slots=True)
class RatioGate:
    """Fixed thresholds on r = q'(v) / max q'.

    As published, (0.5, 0.3) on 1 - r, the middle band is empty; so `theta_accept` must exceed
    `theta_escalate`. The slim model's own token always has r = 1, so a bonus token stands only if
    its probability itself reaches `theta_accept`.

    Raises:
        UserError: thresholds out of order or range.
    """

    theta_accept: float = 0.9
    theta_escalate: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.theta_escalate < self.theta_accept <= 1:
            raise UserError(
                "tiers: theta_accept must exceed theta_escalate, both in [0, 1], got "
                f"{self.theta_accept} and {self.theta_escalate}"
            )

    def judge(self, rows: GateRows) -> Judgement:
        drafted, own, best = _probabilities(rows)
        ratio = drafted / best[: len(drafted)]
        return Judgement(
            tuple(self.tier(r) for r in ratio.tolist()),
            tuple((1 - drafted).tolist()),
            tuple((1 - own).tolist()),
            bool(own[-1] >= self.theta_accept),
        )

    def tier(self, ratio: float) -> Tier:
        if ratio >= self.theta_accept:
            return Tier.ACCEPT
        return Tier.SLIM if ratio >= self.theta_escalate else Tier.FULL


def _probabilities(rows: GateRows) -> tuple[NDArray[np.float64], ...]:
    """The slim model's probability of draft tokens, of its own tokens, and of its best."""
    probs_TV = rows.probs_TV.double().cpu()
    index_T = torch.arange(len(rows.own_ids))
    drafted_K = probs_TV[index_T[:-1], list(rows.draft.token_ids)]
    own_T = probs_TV[index_T, list(rows.own_ids)]
    return drafted_K.numpy(), own_T.numpy(), probs_TV.max(dim=-1).values.numpy()


FEATURE_NAMES = (
    "draft_prob",
    "draft_top_prob",
    "draft_margin",
    "draft_entropy",
    "slim_prob",
    "slim_top_prob",
    "slim_entropy",
    "ratio",
    "agrees",
    "divergence",
    "position",
    "draft_len",
)
"""The twelve of section 4's independent measurement. A cache proposes one token with an estimated
probability p: its distribution is read as p for the token and 1 - p for all others together."""


def gate_features(
    token_ids: Sequence[int], draft_probs: Sequence[float], probs_TV: torch.Tensor
) -> Float32Array:
    """[K, F] features of tokens at the first K rows of the slim model.

    Args:
        token_ids: the K candidates.
        draft_probs: the drafter's own estimates; empty: unknown, taken as one half.
        probs_TV: at least K rows.
    """
    count = len(token_ids)
    p = np.clip(np.array(draft_probs or [0.5] * count, np.float64)[:count], 1e-6, 1 - 1e-6)
    probs_KV = probs_TV[:count].double().cpu()
    slim = probs_KV[torch.arange(count), list(token_ids)].numpy()
    top, best = (part.numpy() for part in probs_KV.max(dim=-1))
    entropy = torch.special.entr(probs_KV).sum(dim=-1).numpy()
    draft_entropy = -(p * np.log(p) + (1 - p) * np.log1p(-p))
    rest = np.clip(1 - slim, 1e-9, 1)
    divergence = p * np.log(p / np.clip(slim, 1e-9, 1)) + (1 - p) * np.log((1 - p) / rest)
    columns = (
        *(p, np.maximum(p, 1 - p), 2 * p - 1, draft_entropy),
        *(slim, top, entropy, slim / top, best == np.array(token_ids), divergence),
        *(np.arange(count), np.full(count, count)),
    )
    return np.stack([np.asarray(column, np.float32) for column in columns], axis=1)


@dataclass(frozen=True, slots=True)
class LearnedGate:
    """A token stands if the network gives it `theta` or more; else the slim model's own, if that
    does; else the target is asked."""

    network: Network
    theta: float = 0.95

    def judge(self, rows: GateRows) -> Judgement:
        draft = rows.draft
        drafted = self.probs(gate_features(draft.token_ids, draft.probs, rows.probs_TV))
        chances_K = rows.probs_TV[torch.arange(len(draft)), list(draft.token_ids)].tolist()
        # What the request forbids (`min_tokens`) may not stand, whatever the network has learnt.
        drafted = [p if chance > 0 else 0.0 for p, chance in zip(drafted, chances_K, strict=True)]
        own = self.probs(gate_features(rows.own_ids, own_draft_probs(rows), rows.probs_TV))
        return Judgement(
            tuple(self._tier(*pair) for pair in zip(drafted, own, strict=False)),
            tuple(1 - p for p in drafted),
            tuple(1 - p for p in own),
            own[-1] >= self.theta,
        )

    def probs(self, features_KF: Float32Array) -> list[float]:
        """P(the target chooses the token): the network's one output through a logistic."""
        from hvd_ray.payoff.network_kernel import judge

        network, count = self.network, len(features_KF)
        chosen_K1, unused_K = np.empty((count, 1), np.float32), np.empty(count, np.float32)
        judge(
            np.ascontiguousarray(features_KF),
            network.low_F,
            network.high_F,
            network.params,
            network.widths,
            network.groups,
            FEATURE_NAMES.index("draft_len"),
            chosen_K1,
            unused_K,
        )
        return [float(p) for p in chosen_K1[:, 0]]

    def _tier(self, draft_prob: float, own_prob: float) -> Tier:
        if draft_prob >= self.theta:
            return Tier.ACCEPT
        return Tier.SLIM if own_prob >= self.theta else Tier.FULL


def own_draft_probs(rows: GateRows) -> list[float]:
    """The drafter's estimate of the slim model's own tokens: p where the two agree, else 1 - p."""
    probs = [*(rows.draft.probs or [0.5] * len(rows.draft)), 0.5]
    drafted = (*rows.draft.token_ids, -1)
    return [
        p if own == token else 1 - p
        for p, own, token in zip(probs, rows.own_ids, drafted, strict=True)
    ]
