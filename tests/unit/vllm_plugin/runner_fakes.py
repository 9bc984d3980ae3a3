"""A stand-in for vLLM's model runner: its input batch and its request states, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

MAX_LEN = 64


@dataclass(eq=False)
class FakeState:
    """As `CachedRequestState`: what profile_of reads."""

    req_id: str
    prompt_token_ids: list[int] | None
    sampling_params: Any
    lora_request: Any = None
    prompt_embeds: Any = None


def params(**given: Any) -> Any:
    kind = "RANDOM_SEED" if given.pop("is_seeded", False) else "GREEDY"
    defaults = {"extra_args": {"hvd_scope": ""}, "stop_token_ids": [], "eos_token_id": None}
    sampling_type = SimpleNamespace(name=kind)
    return SimpleNamespace(
        **{**defaults, "max_tokens": 32, "sampling_type": sampling_type, **given}
    )


@dataclass
class FakeRunner:
    """Follows vLLM's order of things: sampled tokens are written before the proposer is called."""

    max_model_len: int = MAX_LEN
    num_spec_tokens: int = 16
    effective_drafter_max_model_len: int = MAX_LEN
    requests: dict[str, FakeState] = field(default_factory=dict)
    _tokens: dict[str, list[int]] = field(default_factory=dict)
    input_batch: Any = None
    num_decode_draft_tokens: Any = None

    def add(self, request_id: str, prompt: Sequence[int], **given: Any) -> None:
        state = FakeState(request_id, list(prompt), params(**given))
        self.requests[request_id] = state
        self._tokens[request_id] = list(prompt)

    def remove(self, request_id: str) -> None:
        del self.requests[request_id], self._tokens[request_id]

    def take_back(self, request_id: str, count: int) -> None:
        """vLLM discards output tokens that it had sampled."""
        del self._tokens[request_id][-count:]

    def sample(
        self, sampled: dict[str, list[int]], *, drafted: dict[str, int] | None = None
    ) -> list[list[int]]:
        """One step: the batch holds these requests; an empty list is a prefill chunk."""
        ids = list(sampled)
        table = np.zeros((len(ids), self.max_model_len), dtype=np.int32)
        for index, request_id in enumerate(ids):
            self._tokens[request_id] += sampled[request_id]
            tokens = self._tokens[request_id]
            table[index, : len(tokens)] = tokens
        states = [self.requests[request_id] for request_id in ids]
        self.input_batch = SimpleNamespace(
            req_ids=ids,
            token_ids_cpu=table,
            num_tokens_no_spec=np.array([len(self._tokens[i]) for i in ids]),
            num_prompt_tokens=np.array([len(s.prompt_token_ids or ()) for s in states]),
        )
        drafts = [(drafted or {}).get(i, -1) for i in ids]
        self.num_decode_draft_tokens = SimpleNamespace(np=np.array(drafts))
        return [sampled[i] for i in ids]
