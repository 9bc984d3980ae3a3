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
        drawn: list[tuple[int, float, np.ndarray | None]] = []
        while True:
            drawn.append(self._draw(normed_1H, active))
            if len(drawn) == limit:
                break
            token_T = torch.tensor([drawn[-1][0]], device=self.head.device)
            normed_1H, feature_1H = self.head.extend(active.kv, token_T, feature_1H)
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

    def _draw(self, normed_1H: Tensor, active: _Active) -> tuple[int, float, np.ndarray | None]:
        """Token, its probability under the head, and the proposal over the target's vocabulary."""
        logits_V = self.head.logits(normed_1H)[0].float()
        if not (self.is_sampled and active.temperature > 0):
            best = int(logits_V.argmax())
            prob = float(torch.exp(logits_V[best] - logits_V.logsumexp(0)))
            return int(self.head.target_ids(torch.tensor([best]))[0]), prob, None
        probs_V = torch.softmax(logits_V.double().cpu() / active.temperature, dim=0)
        token = pick(probs_V, active.random.random())
        proposal_U = torch.zeros(self.target_vocab_size, dtype=torch.float64)
        proposal_U[self.head.weights.draft_to_target_V.cpu()] = probs_V
        target_id = int(self.head.target_ids(torch.tensor([token]))[0])
        return target_id, float(probs_V[token]), proposal_U.numpy()


def _as_draft(drawn: list[tuple[int, float, np.ndarray | None]]) -> Draft:
    probs = tuple(prob for _, prob, _ in drawn)
    proposals = [proposal for _, _, proposal in drawn if proposal is not None]
    return Draft(
        Source.EAGLE3,
        tuple(token for token, _, _ in drawn),
        probs,
        sum(probs),
        proposal_probs_KV=np.stack(proposals) if proposals else None,
    )
