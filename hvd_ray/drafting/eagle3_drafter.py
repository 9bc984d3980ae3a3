"""EAGLE-3 as a drafter: chains or trees of tokens from the target's hidden states (2503.01840).

The head reads one row for each committed token but the last: the target's states at a position and
the token after it. Rows are taken in lazily, all that are due in one pass, when a proposal is
asked for; so cycles drafted from a cache cost the head nothing, and its proposals afterwards are
those of a head that never skipped a cycle.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from hvd_ray.drafting.eagle3 import Eagle3Head, Eagle3KV
from hvd_ray.drafting.eagle3_tree import TreeShape, grow_tree
from hvd_ray.randomness import pick, seeded_generator
from hvd_ray.types import NO_DRAFT, Draft, Request, Source, TokenBuffer

# Shapes: T rows, A aux width, H head width, V draft vocabulary, U target vocabulary, K draft.


@dataclass(slots=True)
class _Active:
    kv: Eagle3KV
    token_ids: TokenBuffer
    temperature: float
    random: np.random.Generator
    num_known: int = 0
    """Positions whose target states have arrived."""
    due_aux: list[Tensor] = field(default_factory=list)
    """States that the head has not read yet; the first belongs to position `kv.length`."""
    last: tuple[Tensor, Tensor] | None = None
    """The head's outputs of the last row it read, from which a chain starts: (normed, feature)."""


@dataclass(frozen=True, slots=True)
class _Drawn:
    """One token of a chain, left on the head's device: asking for it would wait for a GPU."""

    token_1: Tensor
    """The target's id."""
    prob_1: Tensor
    """Under the head, given the tokens before it."""
    proposal_U: np.ndarray | None = None
    """What it was sampled from, over the target's vocabulary."""


@dataclass(slots=True)
class Eagle3Drafter:
    """Drafts chains, or with a `tree` shape trees, with an EAGLE-3 head.

    With `is_sampled`, a request with a temperature gets chains sampled from the head's own
    distribution, which is handed over for exact speculative sampling; otherwise drafts are the
    head's likeliest tokens, which keeps a seeded request's tokens independent of drafting. Trees
    are always of the likeliest tokens.
    """

    head: Eagle3Head
    target_vocab_size: int
    max_draft_tokens: int = 4
    is_sampled: bool = False
    tree: TreeShape | None = None
    source: Source = field(default=Source.EAGLE3, init=False)
    _active: dict[str, _Active] = field(default_factory=dict, init=False)

    def start(self, request: Request) -> None:
        """Begin a request; its prompt's states arrive with the first `observe`.

        Raises:
            ValueError: the request id is already active.
        """
        if request.request_id in self._active:
            raise ValueError(f"request {request.request_id!r} is already active")
        self._active[request.request_id] = _Active(
            self.head.new_kv(),
            TokenBuffer(request.prompt_token_ids),
            request.sampling.temperature,
            seeded_generator(request.sampling.seed, stream=2),
        )

    def observe(self, request_id: str, token_ids: tuple[int, ...], hidden: object | None) -> None:
        """Keep the states of committed positions for when they are needed.

        Args:
            request_id: an active request.
            token_ids: newly committed output tokens.
            hidden: Tensor [T, A] from the first position not known yet; rows of rejected tokens
                may follow. None where the target made no pass: its next one hands out the states
                of all positions that it had skipped.
        """
        active = self._active[request_id]
        active.token_ids.extend(token_ids)
        if hidden is None:
            return
        assert isinstance(hidden, Tensor), "the engine must hand out hidden states"
        num_rows = len(active.token_ids) - 1 - active.num_known
        active.due_aux.append(hidden[:num_rows])
        active.num_known += num_rows

    def room(self, request_id: str) -> int:
        """What is left of a chain: nothing past the head's context, nor from a position whose
        states have not arrived: before the prompt's pass, or after tokens the target skipped."""
        active = self._active[request_id]
        if active.num_known < max(1, len(active.token_ids) - 1):
            return 0
        left = self.head.config.max_position_embeddings - len(active.token_ids)
        longest = self.max_draft_tokens if self.tree is None else self.tree.depth
        return max(0, min(left, longest))

    @torch.inference_mode()
    def propose(self, request_id: str, limit: int) -> Draft:
        """A chain of at most `limit` tokens, or a tree of that depth, as far as there is room."""
        limit = min(limit, self.room(request_id))
        if limit <= 0:
            return NO_DRAFT
        active = self._active[request_id]
        if self.tree is not None:
            return self._tree_draft(active, replace(self.tree, depth=limit))
        return self._chain_draft(active, limit)

    def _tree_draft(self, active: _Active, shape: TreeShape) -> Draft:
        tree = grow_tree(self.head, active.kv, *self._catch_up(active), shape)
        return Draft(
            Source.EAGLE3, tree.token_ids, tree.probs, sum(tree.probs), parents=tree.parents
        )

    def _chain_draft(self, active: _Active, limit: int) -> Draft:
        normed_1H, feature_1H = self._catch_up(active)
        num_committed = active.kv.length
        is_sampled = self.is_sampled and active.temperature > 0
        drawn: list[_Drawn] = []
        while True:
            logits_1V = self.head.logits(normed_1H).float()
            drawn.append(
                self._sample(logits_1V, active) if is_sampled else self._likeliest(logits_1V)
            )
            if len(drawn) == limit:
                break
            normed_1H, feature_1H = self.head.extend(active.kv, drawn[-1].token_1, feature_1H)
        active.kv.truncate(num_committed)
        return _as_draft(drawn)

    def stop(self, request_id: str) -> None:
        """Forget the request."""
        del self._active[request_id]

    def _catch_up(self, active: _Active) -> tuple[Tensor, Tensor]:
        """Read all rows that are due in one pass; the last row's outputs start the chain."""
        if active.due_aux:
            aux_TA = torch.cat(active.due_aux) if len(active.due_aux) > 1 else active.due_aux[0]
            active.due_aux.clear()
            next_ids = active.token_ids.view(active.kv.length + 1).astype(np.int64)
            feature_TH = self.head.combine(aux_TA.to(self.head.dtype))
            normed_TH, feature_TH = self.head.extend(
                active.kv, torch.from_numpy(next_ids).to(self.head.device), feature_TH
            )
            active.last = (normed_TH[-1:], feature_TH[-1:])
        assert active.last is not None
        return active.last

    def _likeliest(self, logits_1V: Tensor) -> _Drawn:
        best_1 = logits_1V.argmax(-1)
        log_prob_1 = logits_1V[:, best_1][0] - logits_1V.logsumexp(-1)
        return _Drawn(self.head.target_ids(best_1), log_prob_1.exp())

    def _sample(self, logits_1V: Tensor, active: _Active) -> _Drawn:
        probs_V = torch.softmax(logits_1V[0].double().cpu() / active.temperature, dim=0)
        draft_id = pick(probs_V, active.random.random())
        proposal_U = torch.zeros(self.target_vocab_size, dtype=torch.float64)
        proposal_U[self.head.weights.draft_to_target_V.cpu()] = probs_V
        id_1 = torch.tensor([draft_id], device=self.head.device)
        return _Drawn(self.head.target_ids(id_1), probs_V[draft_id, None], proposal_U.numpy())


def _as_draft(drawn: list[_Drawn]) -> Draft:
    probs = tuple(torch.cat([each.prob_1 for each in drawn]).tolist())
    proposals = [each.proposal_U for each in drawn if each.proposal_U is not None]
    return Draft(
        Source.EAGLE3,
        tuple(torch.cat([each.token_1 for each in drawn]).tolist()),
        probs,
        sum(probs),
        proposal_probs_KV=np.stack(proposals) if proposals else None,
    )
