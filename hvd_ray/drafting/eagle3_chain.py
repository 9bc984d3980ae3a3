"""Chains of the head from every position at once: training-time test and teacher-forced drafts.

Every row from the last prompt token on is the *root* of a chain of its own. At step i a chain's
row stands at position root + i, sees the context up to its root and the chain's own earlier rows:
exactly what a draft of i + 1 tokens sees when decoding (EAGLE-3, section 3: training-time test).

Shapes: T context rows, R roots, K steps, H width, h query heads, n key-value heads, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from hvd_ray.drafting.eagle3 import Eagle3Head
from hvd_ray.drafting.eagle3_states import ResponseStates

ROOTS_AT_ONCE = 512
"""Bounds the scores of a long output's chains, each of which sees the whole context."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Where one sequence lies in the packed rows."""

    context: slice
    roots: slice

    @property
    def num_roots(self) -> int:
        return int(self.roots.stop - self.roots.start)

    @property
    def num_context(self) -> int:
        return int(self.context.stop - self.context.start)


@dataclass(frozen=True, kw_only=True)
class ChainRows:
    """Sequences laid end to end. Context row t pairs feature f_t with the token after it."""

    aux_TA: Tensor
    next_token_T: Tensor  # x_{t+1}
    position_T: Tensor  # within its sequence
    root_R: Tensor  # index into T
    spans: tuple[Span, ...]

    @property
    def num_roots(self) -> int:
        return len(self.root_R)

    def on(self, device: torch.device) -> Self:
        """The same rows on another device."""
        tensors = {
            field.name: getattr(self, field.name).to(device)
            for field in fields(self)
            if field.name != "spans"
        }
        return replace(self, **tensors)


@dataclass(frozen=True, kw_only=True)
class PackedRows(ChainRows):
    """Chain rows and what training holds them against."""

    final_RH: Tensor  # the target's state at the root's *next* position: what to predict
    label_R: Tensor  # the target's greedy token there
    forced_RK: Tensor  # the recorded token that chain step i is fed: x_{t+1+i}
    is_valid_RK: Tensor  # whether the recording reaches that far
    label_row_RK: Tensor  # which row of `final_RH` and `label_R` step i must predict


def pack(sequences: Sequence[ResponseStates], *, num_steps: int) -> PackedRows:
    """Lay sequences end to end; each gives one root per output token but the last."""
    spans: list[Span] = []
    root_R: list[Tensor] = []
    chains: list[tuple[Tensor, Tensor, Tensor]] = []
    num_context = num_roots = 0
    for states in sequences:
        roots = states.num_rows - 2
        context = len(states.token_ids_T) - 2
        span = Span(
            context=slice(num_context, num_context + context),
            roots=slice(num_roots, num_roots + roots),
        )
        spans.append(span)
        root_R.append(torch.arange(span.context.stop - roots, span.context.stop))
        chains.append(_chain_indices(states, num_roots, num_steps))
        num_context, num_roots = span.context.stop, span.roots.stop
    return PackedRows(
        aux_TA=torch.cat([each.aux_TA[:-2] for each in sequences]),
        next_token_T=torch.cat([each.token_ids_T[1:-1] for each in sequences]),
        position_T=torch.cat([torch.arange(span.num_context) for span in spans]),
        root_R=torch.cat(root_R),
        final_RH=torch.cat([each.final_RH[1:-1] for each in sequences]),
        label_R=torch.cat([each.greedy_R[1:-1] for each in sequences]),
        forced_RK=torch.cat([forced for forced, _, _ in chains]),
        is_valid_RK=torch.cat([valid for _, valid, _ in chains]),
        label_row_RK=torch.cat([rows for _, _, rows in chains]),
        spans=tuple(spans),
    )


def _chain_indices(
    states: ResponseStates, first_root: int, num_steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(forced, is_valid, label_row) of one sequence's roots; rows past the end are clamped."""
    num_roots = states.num_rows - 2
    step_RK = torch.arange(num_roots)[:, None] + torch.arange(num_steps)[None]
    is_valid_RK = step_RK < num_roots
    row_RK = step_RK.clamp(max=num_roots - 1)
    outputs = states.token_ids_T[-(num_roots + 1) :]
    return outputs[row_RK], is_valid_RK, row_RK + first_root


class ChainAttention:
    """Attention of all chains: context up to the root, then the chain's own rows."""

    def __init__(self, rows: ChainRows, k_TnD: Tensor, v_TnD: Tensor) -> None:
        self._rows = rows
        self._k_TnD, self._v_TnD = k_TnD, v_TnD
        self._chain: list[tuple[Tensor, Tensor]] = []
        self._hidden = [_future_mask(span, k_TnD.device) for span in rows.spans]

    def root(self, q_RhD: Tensor) -> Tensor:
        """Step 0: the roots' own keys are part of the context."""
        return self._attend(q_RhD)

    def __call__(self, q_RhD: Tensor, k_RnD: Tensor, v_RnD: Tensor) -> Tensor:
        self._chain.append((k_RnD, v_RnD))
        return self._attend(q_RhD)

    def _attend(self, q_RhD: Tensor) -> Tensor:
        parts = [
            self._attend_span(q_RhD[span.roots], span, hidden)
            for span, hidden in zip(self._rows.spans, self._hidden, strict=True)
        ]
        return torch.cat(parts)

    def _attend_span(self, q_RhD: Tensor, span: Span, hidden_RT: Tensor) -> Tensor:
        k_nTD = self._k_TnD[span.context].transpose(0, 1)
        v_nTD = self._v_TnD[span.context].transpose(0, 1)
        num_groups, num_context, head_dim = k_nTD.shape
        num_rows = q_RhD.shape[0]
        shape = (num_groups, -1, num_rows)
        q_ngRD = q_RhD.view(num_rows, num_groups, -1, head_dim).permute(1, 2, 0, 3)
        q_ngRD = q_ngRD * math.pow(head_dim, -0.5)
        scores = (q_ngRD.flatten(1, 2) @ k_nTD.transpose(1, 2)).view(*shape, num_context)
        scores = scores.float().masked_fill(hidden_RT, float("-inf"))
        own = [(q_ngRD * k[span.roots].transpose(0, 1)[:, None]).sum(-1) for k, _ in self._chain]
        if own:
            scores = torch.cat((scores, torch.stack(own, dim=-1).float()), dim=-1)
        probs = scores.softmax(-1).to(q_RhD.dtype)
        context = (probs[..., :num_context].flatten(1, 2) @ v_nTD).view(*shape, head_dim)
        for index, (_, v) in enumerate(self._chain):
            v_n1RD = v[span.roots].transpose(0, 1)[:, None]
            context = context + probs[..., num_context + index, None] * v_n1RD
        return context.permute(2, 0, 1, 3).reshape(num_rows, -1)


def _future_mask(span: Span, device: torch.device) -> Tensor:
    """True where a root may not look: context rows after it."""
    row_T = torch.arange(span.num_context, device=device)
    return row_T[None, :] > row_T[-span.num_roots :, None]


def chain_steps(
    head: Eagle3Head, rows: ChainRows, *, num_steps: int, feed: Callable[[int], Tensor]
) -> Iterator[Tensor]:
    """Yield normed_RH of step 0 .. num_steps-1 for all roots.

    `feed(i)` gives the R tokens that step i >= 1 is fed, asked for once step i-1 was yielded:
    recorded ones (training) or what that step drafted (decoding).
    """
    feature_TH = head.combine(rows.aux_TA.to(head.dtype))
    input_TI, residual_TH = head.layer_input(head.embed(rows.next_token_T), feature_TH)
    q_ThD, k_TnD, v_TnD = head.project(input_TI, rows.position_T)
    attention = ChainAttention(rows, k_TnD, v_TnD)
    context_RQ = attention.root(q_ThD[rows.root_R])
    normed_RH, feature_RH = head.layer_output(context_RQ, residual_TH[rows.root_R])
    position_R = rows.position_T[rows.root_R]
    yield normed_RH
    for step in range(1, num_steps):
        embed_RH = head.embed(feed(step))
        normed_RH, feature_RH = head.layer(embed_RH, feature_RH, position_R + step, attention)
        yield normed_RH


@torch.inference_mode()
def accepted_lengths(
    head: Eagle3Head,
    token_ids_T: Tensor,
    aux_TA: Tensor,
    *,
    first_root: int,
    num_roots: int,
    num_steps: int,
) -> list[int]:
    """How much of its root's arg-max chain the sequence repeats, for some roots in a row.

    Args:
        head: of the target whose states these are.
        token_ids_T: the sequence; what of a chain reaches past its end does not count.
        aux_TA: the target's states, at least up to the last root.
        first_root: position whose states and whose next token start the first chain; it predicts
            the token after that.
        num_roots: roots, all within the sequence less its last two tokens.
        num_steps: K, the length of a chain.
    """
    ahead_RK = _ahead(token_ids_T[first_root + 2 :], num_roots, num_steps).to(head.device)
    lengths: list[int] = []
    for start in range(0, num_roots, ROOTS_AT_ONCE):
        end = min(start + ROOTS_AT_ONCE, num_roots)
        next_token_T = token_ids_T[1 : first_root + end + 1]
        rows = _last_roots(next_token_T, aux_TA, num_roots=end - start)
        draft_RK = _greedy_chains(head, rows.on(head.device), num_steps=num_steps)
        is_right_RK = draft_RK == ahead_RK[start:end]
        lengths += is_right_RK.long().cumprod(-1).sum(-1).tolist()
    return lengths


def _greedy_chains(head: Eagle3Head, rows: ChainRows, *, num_steps: int) -> Tensor:
    """The K target tokens that every root drafts, fed its own arg max, RK."""
    drafted: list[Tensor] = []
    for normed_RH in chain_steps(
        head, rows, num_steps=num_steps, feed=lambda step: drafted[step - 1]
    ):
        drafted.append(head.target_ids(head.logits(normed_RH).argmax(-1)))
    return torch.stack(drafted, dim=-1)


def _ahead(predicted_T: Tensor, num_roots: int, num_steps: int) -> Tensor:
    """The K tokens that each root should predict, RK; -1, which is no token, past the end."""
    padded = F.pad(predicted_T, (0, num_steps - 1), value=-1)
    return padded.unfold(0, num_steps, 1)[:num_roots]


def _last_roots(next_token_T: Tensor, aux_TA: Tensor, *, num_roots: int) -> ChainRows:
    """One sequence whose last `num_roots` rows are roots."""
    num_rows = len(next_token_T)
    span = Span(context=slice(0, num_rows), roots=slice(0, num_roots))
    return ChainRows(
        aux_TA=aux_TA[:num_rows],
        next_token_T=next_token_T,
        position_T=torch.arange(num_rows),
        root_R=torch.arange(num_rows - num_roots, num_rows),
        spans=(span,),
    )
