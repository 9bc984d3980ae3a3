"""The suffix cache (SuffixDecoding, 2411.04975) on arctic-inference's suffix trees.

A request drafts from two trees: its own (prompt and output) and its scope's (the outputs of all
requests of that scope, running ones included). The better score wins, ties go to its own. Trees
of different scopes share nothing, so no scope ever sees another's text.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from hvd_ray.config import SuffixConfig
from hvd_ray.drafting.evidence import evidence_of
from hvd_ray.drafting.ngram_table import MAX_ORDER, NgramTable
from hvd_ray.drafting.resting import OwnText, RestingTexts
from hvd_ray.types import NO_DRAFT, Draft, Int32Array, Request, Source, TokenBuffer

if TYPE_CHECKING:
    from arctic_inference.suffix_decoding._C import Draft as NativeDraft
    from arctic_inference.suffix_decoding._C import SuffixTree


_NOTHING = NgramTable()


def _nobody(scope: str) -> str:  # noqa: ARG001
    return ""


@dataclass(slots=True)
class _Scope:
    tree: SuffixTree
    counts: NgramTable = field(default_factory=NgramTable)
    num_outputs: int = 0


@dataclass(slots=True)
class _Output:
    """One request's output as its scope's tree holds it."""

    scope: str
    token_ids: TokenBuffer = field(default_factory=TokenBuffer)
    is_evicted: bool = False


@dataclass(slots=True)
class _Owner:
    """What one owner's scopes hold."""

    num_tokens: int = 0
    output_ids: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """The oldest first."""


@dataclass(slots=True)
class _Active:
    output_id: int
    output: _Output
    own: OwnText
    prompt_len: int


@dataclass(slots=True)
class SuffixDrafter:
    """Drafts the most frequent continuation of the longest suffix that was seen before.

    Outputs enter the scope's tree token by token as they are committed and stay after the request
    ends, the oldest leaving first once `max_cached_tokens` is reached over all scopes; where scopes
    have owners, an owner keeps a share that others cannot push out. Prompts
    stay in the request's own text; it rests for a while after the request, in case the same scope
    asks for that conversation's next turn, and is looked up by nobody else.
    """

    config: SuffixConfig = field(default_factory=SuffixConfig)
    owner_of: Callable[[str], str] = _nobody
    """Whose a scope is: half of the cap is shared out among the owners that hold something, and
    only the other half is anybody's. By default all scopes are one owner's."""
    source: Source = field(default=Source.SUFFIX, init=False)
    num_cached_tokens: int = field(default=0, init=False)
    """Output tokens in the scopes' trees; never above the cap."""
    num_evictions: int = field(default=0, init=False)
    """Outputs that left to make room, ever."""
    _active: dict[str, _Active] = field(default_factory=dict, init=False)
    _scopes: dict[str, _Scope] = field(default_factory=dict, init=False)
    _outputs: OrderedDict[int, _Output] = field(default_factory=OrderedDict, init=False)
    """Cached outputs, the oldest first."""
    _owners: dict[str, _Owner] = field(default_factory=dict, init=False)
    _resting: RestingTexts = field(default_factory=RestingTexts, init=False)
    _ids: count[int] = field(default_factory=count, init=False)

    def start(self, request: Request) -> None:
        """Begin a request: its prompt becomes its own text.

        Raises:
            ValueError: the request id is already active.
        """
        if request.request_id in self._active:
            raise ValueError(f"request {request.request_id!r} is already active")
        prompt = np.array(request.prompt_token_ids, dtype=np.int32)
        own = self._own_text(request.scope, prompt)
        output_id, output = next(self._ids) & 0x7FFFFFFF, _Output(request.scope)
        self._outputs[output_id] = output
        owner = self._owners.setdefault(self.owner_of(request.scope), _Owner())
        owner.output_ids[output_id] = None
        self._scopes.setdefault(request.scope, _Scope(self._new_tree())).num_outputs += 1
        self._active[request.request_id] = _Active(output_id, output, own, len(prompt))

    def observe(
        self,
        request_id: str,
        token_ids: tuple[int, ...],
        hidden: object | None = None,  # noqa: ARG002
    ) -> None:
        """Add committed output tokens to the request's and the scope's trees."""
        if not token_ids:
            return
        active = self._active[request_id]
        new_ids = np.asarray(token_ids, dtype=np.int32)
        active.own.extend(new_ids)
        self._remember(active, new_ids)

    def propose(self, request_id: str, limit: int) -> Draft:
        """The better of the two trees' drafts, at most `limit` tokens."""
        return self.propose_as(self.config, request_id, limit)

    def propose_as(self, config: SuffixConfig, request_id: str, limit: int) -> Draft:
        """The draft under other settings than the cache's own; they share what it knows."""
        limit = min(limit, config.max_draft_tokens)
        if limit <= 0:
            return NO_DRAFT
        active = self._active[request_id]
        own, output = active.own, active.output
        best, is_local = _look_up(own, own, len(own), config, limit), True
        scope = self._scopes.get(output.scope)
        if scope is not None:
            num_counted = 0 if output.is_evicted else len(output.token_ids)
            shared = _look_up(scope, own, num_counted, config, limit)
            if shared.score > best.score:
                best, is_local = shared, False
        tokens, probs = tuple(best.token_ids), tuple(best.probs)
        if not tokens:
            return NO_DRAFT
        evidence_E = evidence_of(
            tokens,
            token_ids=active.own.token_ids.view(),
            prompt_len=active.prompt_len,
            own=active.own.counts,
            scope=_NOTHING if scope is None else scope.counts,
        )
        score, match_len = best.score, best.match_len
        return Draft(
            Source.SUFFIX, tokens, probs, score, match_len, is_local, evidence_E=evidence_E
        )

    def stop(self, request_id: str) -> None:
        """Forget the request and its prompt; its output stays in the scope's tree."""
        active = self._active.pop(request_id)
        self._resting.put(active.output.scope, active.own)
        if len(active.output.token_ids) == 0 and not active.output.is_evicted:
            self._evict(active.output_id)

    def clear(self, scope: str | None = None) -> None:
        """Forget the outputs of one scope, or of all (after a change of weights, say)."""
        for output_id, output in list(self._outputs.items()):
            if scope is None or output.scope == scope:
                self._evict(output_id)
        self._resting.clear(scope)

    def _own_text(self, scope: str, prompt: Int32Array) -> OwnText:
        """The prompt as a text: the last turn's with the rest added, or a new one."""
        own = self._resting.take(scope, prompt) or OwnText(self._new_tree())
        own.extend(prompt[len(own) :])
        return own

    @property
    def num_scopes(self) -> int:
        """Scopes with outputs in the cache, those of running requests included."""
        return len(self._scopes)

    def _new_tree(self) -> SuffixTree:
        from arctic_inference.suffix_decoding._C import SuffixTree

        return SuffixTree(self.config.max_tree_depth)

    def _remember(self, active: _Active, new_ids: Int32Array) -> None:
        """Append to the scope's tree, the oldest outputs making room first.

        An output that was evicted while it was still growing is not cached any further: only its
        head would be missing, and a cache with holes drafts worse than none. Its own tree goes on
        to serve the request.
        """
        cap = self.config.max_cached_tokens
        while not active.output.is_evicted and self.num_cached_tokens + len(new_ids) > cap:
            self._evict(self._next_to_leave())
            self.num_evictions += 1
        if active.output.is_evicted:
            return
        scope, output = self._scopes[active.output.scope], active.output
        start = len(output.token_ids)
        output.token_ids.extend(new_ids)
        scope.tree.extend_ndarray(active.output_id, new_ids)
        scope.counts.extend(output.token_ids.view(), start)
        self.num_cached_tokens += len(new_ids)
        self._owners[self.owner_of(output.scope)].num_tokens += len(new_ids)

    def _next_to_leave(self) -> int:
        """The oldest output, but of owners that hold no more than their share."""
        oldest = next(iter(self._outputs))
        if len(self._owners) == 1:
            return oldest
        share = self.config.max_cached_tokens // (2 * len(self._owners))
        rich = [owner for owner in self._owners.values() if owner.num_tokens > share]
        return min((next(iter(owner.output_ids)) for owner in rich), default=oldest)

    def _evict(self, output_id: int) -> None:
        output = self._outputs.pop(output_id)
        output.is_evicted = True
        self.num_cached_tokens -= len(output.token_ids)
        owner = self._owners[name := self.owner_of(output.scope)]
        del owner.output_ids[output_id]
        owner.num_tokens -= len(output.token_ids)
        if not owner.output_ids:
            del self._owners[name]
        scope = self._scopes[output.scope]
        scope.num_outputs -= 1
        if scope.num_outputs == 0:
            del self._scopes[output.scope]
        elif len(output.token_ids):
            scope.tree.remove(output_id)
            scope.counts.remove(output.token_ids.view())


def _look_up(
    known: OwnText | _Scope, text: OwnText, num_counted: int, config: SuffixConfig, limit: int
) -> NativeDraft:
    """What a tree drafts behind `text`, whose last `num_counted` tokens are part of it.

    The tree is asked for every length of match, and the text's own end answers to all of them
    with nothing behind it; so it is only asked for those that stand elsewhere too.
    """
    context = text.token_ids.tail(config.max_tree_depth)
    longest = known.counts.longest_repeated(context, num_counted)
    if longest < MAX_ORDER:
        context = context[len(context) - min(len(context), longest + 1) :]
    factor, min_prob = config.max_spec_factor, config.min_token_prob
    return known.tree.speculate_ndarray(context, limit, factor, 0.0, min_prob, False)


@dataclass(slots=True)
class RuleDrafter:
    """Drafts of a shared cache for systems without a predictor (`SuffixConfig.for_rules`)."""

    cache: SuffixDrafter
    source: Source = field(default=Source.SUFFIX, init=False)
    _config: SuffixConfig = field(init=False)

    def __post_init__(self) -> None:
        self._config = self.cache.config.for_rules()

    def start(self, request: Request) -> None:
        """Begin a request in the cache.

        Raises:
            ValueError: the request id is already active.
        """
        self.cache.start(request)

    def observe(
        self, request_id: str, token_ids: tuple[int, ...], hidden: object | None = None
    ) -> None:
        """Add committed output tokens to the cache."""
        self.cache.observe(request_id, token_ids, hidden)

    def propose(self, request_id: str, limit: int) -> Draft:
        """The cache's draft as published, at most `limit` tokens."""
        return self.cache.propose_as(self._config, request_id, limit)

    def stop(self, request_id: str) -> None:
        """End a request in the cache."""
        self.cache.stop(request_id)
