"""vLLM's proposers, subclassed: each request's draft from the cache, from the head, or none.

The EAGLE proposer is called with the target's hidden states after the sampled tokens are known on
the CPU (`disable_padded_drafter_batch`), and may answer with a list of drafts of any lengths. The
suffix proposer is the same without a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

from hvd_ray.types import NO_DRAFT, Draft, Source
from hvd_ray.vllm_plugin import compat_runner
from hvd_ray.vllm_plugin.backlog import Backlog, in_batches
from hvd_ray.vllm_plugin.router import Choice
from hvd_ray.vllm_plugin.session import HybridSession

_TYPICAL_ROWS = 64
"""The most rows of a request that the head reads between two prompts."""
Chains = dict[int, list[int]]
"""The head's tokens for requests of a step, by their place in it."""


class HybridEagleProposer(EagleProposer):  # type: ignore[misc]
    """Cache and head. The head runs only in steps in which some request needs it."""

    def bind(self, runner: Any) -> None:
        """Take the runner's requests in view; called once, when it is made."""
        self._session = HybridSession.open(runner)
        self._backlog = Backlog(compat_runner.shared_block_size(runner.vllm_config))
        self._sampled: Sequence[Sequence[int]] = ()
        self._session.hybrid.router.entry_ms_of = self._entry_ms

    def prepare_next_token_ids_cpu(
        self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any
    ) -> Any:
        """vLLM's call that hands over the sampled tokens, just before `propose`."""
        self._sampled = sampled_token_ids
        return super().prepare_next_token_ids_cpu(sampled_token_ids, *args, **kwargs)

    def propose(self, num_speculative_tokens: int, **step: Any) -> list[list[int]]:
        """A draft for each request, of its own length."""
        choices = self._session.choose(self._sampled, num_speculative_tokens)
        wanted = max((c.num_model_tokens for c in choices if c is not None), default=0)
        chains = self._run_head(choices, wanted, step)
        drafts = [_draft(c, chains.get(index, [])) for index, c in enumerate(choices)]
        return self._session.give(choices, drafts)

    def _run_head(
        self, choices: Sequence[Choice | None], wanted: int, step: dict[str, Any]
    ) -> Chains:
        """Have the head read what it must, and draft `wanted` tokens for those it read."""
        rows = compat_runner.rows_for_head(step)
        if rows is None:  # embeddings or several positions a token: read everything at once
            return _as_chains(range(len(choices)), super().propose(wanted, **step))
        requests, ids = self._session.runner.requests, self._session.runner.input_batch.req_ids
        self._backlog.forget_absent(requests)
        for request_id, part in zip(ids, rows, strict=True):
            self._backlog.add(request_id, requests[request_id], part)
        due = [index for index, choice in enumerate(choices) if self._is_due(ids[index], choice)]
        taken = self._backlog.take(ids[index] for index in due)
        started = perf_counter()
        chains: Chains = {}
        for group in in_batches([len(part) for part in taken], self.max_num_tokens):
            indices = [due[member] for member in group]
            some = compat_runner.step_of_rows(step, indices, [taken[member] for member in group])
            chains |= _as_chains(indices, super().propose(wanted, **some))
        # A GPU is waited for by asking it for tokens; what it only read is not done yet.
        if taken and (wanted or self.device.type == "cpu"):
            is_typical = max(len(part) for part in taken) <= _TYPICAL_ROWS
            num_rows, ms = sum(map(len, taken)), (perf_counter() - started) * 1e3
            self._session.observe_head(wanted, num_rows, ms, is_typical=is_typical)
        return chains

    def _entry_ms(self, request_id: str) -> float:
        """What reading a request's prompt will cost, where the head has not done it yet."""
        learnt = self._session.hybrid.learnt
        num_rows = self._backlog.num_waiting(request_id)
        if learnt is None or num_rows <= _TYPICAL_ROWS:
            return 0.0
        return learnt.reading_ms * num_rows

    def _is_due(self, request_id: str, choice: Choice | None) -> bool:
        """Whether the head reads a request's rows in this step; drops them if it never will."""
        if choice is not None and choice.num_model_tokens:
            return True
        if choice is not None and not choice.may_use_model and not self._backlog.block_size:
            self._backlog.drop(request_id)
            return False
        return self._backlog.is_due(request_id)


class HybridSuffixProposer(SuffixDecodingProposer):  # type: ignore[misc]
    """The cache or nothing, where there is no head."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        del self.suffix_cache  # ours has scopes and a cap in tokens

    def bind(self, runner: Any) -> None:
        """Take the runner's requests in view; called once, when it is made."""
        self._session = HybridSession.open(runner)

    def propose(
        self,
        num_speculative_tokens: int,
        input_batch: Any,  # noqa: ARG002
        sampled_token_ids: list[list[int]],
        slot_mappings: Any = None,  # noqa: ARG002
    ) -> list[list[int]]:
        """A draft for each request, of its own length."""
        choices = self._session.choose(sampled_token_ids, num_speculative_tokens)
        return self._session.give(choices, [_draft(choice, []) for choice in choices])


def _as_chains(indices: Sequence[int], drafted_BK: Any) -> Chains:
    return dict(zip(indices, drafted_BK.tolist(), strict=True))


def _draft(choice: Choice | None, chain: list[int]) -> Draft:
    if choice is None:
        return NO_DRAFT
    if choice.num_model_tokens:
        return Draft(Source.EAGLE3, tuple(chain[: choice.num_model_tokens]))
    return choice.cache_tokens
