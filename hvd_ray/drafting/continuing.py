"""An n-gram drafter that reads a conversation once, for replaying logs.

In a log every turn repeats the whole conversation before it, and reading prompts is most of what a
replay does. A turn that begins with all that an earlier one ended with goes on from its index. The
drafts are those of the plain drafter, to the last token; `SuffixDrafter` does so by itself.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from hvd_ray.drafting.ngram import NgramDrafter, NgramIndex
from hvd_ray.types import Request

NUM_KEPT = 32
"""Conversations that may be told in turns; of the others only the latest go on."""


@dataclass(slots=True)
class ContinuingNgramDrafter(NgramDrafter):
    """An `NgramDrafter` whose requests take over the index of the turn before."""

    _ended: OrderedDict[int, NgramIndex] = field(default_factory=OrderedDict, init=False)

    def read_prompt(self, request: Request) -> NgramIndex:
        prompt = list(request.prompt_token_ids)
        for key in reversed(self._ended):
            known = self._ended[key].token_ids
            if known == prompt[: len(known)]:
                index = self._ended.pop(key)
                index.extend(request.prompt_token_ids[len(known) :])
                return index
        return NgramDrafter.read_prompt(self, request)

    def stop(self, request_id: str) -> None:
        index = self._active[request_id]
        NgramDrafter.stop(self, request_id)
        self._ended[id(index)] = index
        if len(self._ended) > NUM_KEPT:
            self._ended.popitem(last=False)
