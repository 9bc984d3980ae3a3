"""A drafter of trees over the toy engine: some nodes right, some wrong, in any shape."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hvd_ray.engines.toy import ToyEngine
from hvd_ray.types import NO_DRAFT, Draft, Request, Source, TokenBuffer


@dataclass(slots=True)
class ToyTreeDrafter:
    """Hangs each new node under a random earlier one: its likely next token, or any other."""

    engine: ToyEngine
    num_nodes: int
    depth: int
    seed: int = 0
    source: Source = field(default=Source.EAGLE3, init=False)
    _active: dict[str, TokenBuffer] = field(default_factory=dict, init=False)

    def start(self, request: Request) -> None:
        self._active[request.request_id] = TokenBuffer(request.prompt_token_ids)

    def observe(self, request_id: str, token_ids: tuple[int, ...], hidden: object | None) -> None:  # noqa: ARG002
        self._active[request_id].extend(token_ids)

    def stop(self, request_id: str) -> None:
        del self._active[request_id]

    def room(self, request_id: str) -> int:  # noqa: ARG002
        return self.depth

    def propose(self, request_id: str, limit: int) -> Draft:
        if limit == 0:
            return NO_DRAFT
        prefix = self._active[request_id].view().tolist()
        rng = np.random.default_rng([self.seed, len(prefix)])
        paths: list[list[int]] = [[]]
        parents: list[int] = []
        for _ in range(self.num_nodes):
            open_ = [i for i, path in enumerate(paths) if len(path) < limit]
            parent = int(rng.choice(open_))
            best = self.engine.logits_after(prefix + paths[parent]).argsort(descending=True)
            token = int(best[0] if rng.random() < 0.7 else rng.integers(self.engine.vocab_size))
            if [*paths[parent], token] not in paths:
                paths.append([*paths[parent], token])
                parents.append(parent - 1)
        tokens = tuple(path[-1] for path in paths[1:])
        return Draft(Source.EAGLE3, tokens, parents=tuple(parents))
