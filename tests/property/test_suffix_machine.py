"""Invariants 7 and 8 under any order of events: the suffix cache against texts kept as lists."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from itertools import count
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from hvd_ray.config import SuffixConfig
from hvd_ray.drafting.suffix import SuffixDrafter
from hvd_ray.types import Draft, Request

CAP = 60
DEPTH = 6
SCOPES = ("ann", "bob")
texts = st.lists(st.integers(0, 3), max_size=12).map(tuple)
Tokens = tuple[int, ...]


@dataclass
class Asked:
    """A request as the model remembers it."""

    scope: str
    number: int
    prompt: Tokens
    output: Tokens = ()

    @property
    def text(self) -> Tokens:
        return self.prompt + self.output


@dataclass
class Model:
    """Texts in lists; a look-up reads all of them."""

    running: dict[str, Asked] = field(default_factory=dict)
    outputs: OrderedDict[int, Asked] = field(default_factory=OrderedDict)
    """What the scopes remember, the oldest first."""
    cached: dict[int, int] = field(default_factory=dict)
    """How many tokens of each output are remembered."""

    @property
    def num_cached(self) -> int:
        return sum(self.cached.values())

    def remember(self, asked: Asked, num_new: int) -> None:
        """The oldest make room; an output that had to go is not remembered any further."""
        while asked.number in self.outputs and self.num_cached + num_new > CAP:
            self.forget(next(iter(self.outputs)))
        if asked.number in self.outputs:
            self.cached[asked.number] += num_new

    def forget(self, number: int) -> None:
        del self.outputs[number], self.cached[number]

    def shared(self, scope: str) -> list[Tokens]:
        return [
            asked.output[: self.cached[number]]
            for number, asked in self.outputs.items()
            if asked.scope == scope
        ]


def count_of(piece: Tokens, within: list[Tokens]) -> int:
    """In how many places the piece stands."""
    size = len(piece)
    return sum(
        text[start : start + size] == piece
        for text in within
        for start in range(len(text) - size + 1)
    )


def followers(piece: Tokens, within: list[Tokens]) -> Counter[int]:
    """What stands after the piece, and how often."""
    size = len(piece)
    return Counter(
        text[start + size]
        for text in within
        for start in range(len(text) - size)
        if text[start : start + size] == piece
    )


class SuffixMachine(RuleBasedStateMachine):
    """Starts, grows, ends, aborts and clears in any order."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.drafter = SuffixDrafter(SuffixConfig(max_cached_tokens=CAP, max_tree_depth=DEPTH))
        self.model = Model()
        self.names = count()

    @rule(target=requests, scope=st.sampled_from(SCOPES), prompt=texts.filter(bool))
    def start(self, scope: str, prompt: Tokens) -> str:
        number = next(self.names)
        name = f"r{number}"
        self.drafter.start(Request(name, prompt, scope=scope))
        asked = Asked(scope, number, prompt)
        self.model.running[name] = self.model.outputs[number] = asked
        self.model.cached[number] = 0
        return name

    @rule(name=requests, tokens=texts)
    def observe(self, name: str, tokens: Tokens) -> None:
        self.drafter.observe(name, tokens)
        if tokens:
            asked = self.model.running[name]
            asked.output += tokens
            self.model.remember(asked, len(tokens))

    @rule(name=consumes(requests))
    def stop(self, name: str) -> None:
        self.drafter.stop(name)
        asked = self.model.running.pop(name)
        if not asked.output and asked.number in self.model.outputs:
            self.model.forget(asked.number)

    @rule(scope=st.sampled_from([None, *SCOPES]))
    def clear(self, scope: str | None) -> None:
        self.drafter.clear(scope)
        for number, asked in list(self.model.outputs.items()):
            if scope in (None, asked.scope):
                self.model.forget(number)

    @rule(name=requests, limit=st.integers(0, 8))
    def propose(self, name: str, limit: int) -> None:
        asked = self.model.running[name]
        draft = self.drafter.propose(name, limit)
        own, shared = [asked.text], self.model.shared(asked.scope)
        assert len(draft) <= limit
        if not draft.token_ids:
            assert limit == 0 or not any(
                self._follows(asked.text, within) for within in (own, shared)
            ), "what stood before was not found again"
            return
        self._check(draft, asked.text, own if draft.is_local else shared)

    def _follows(self, text: Tokens, within: list[Tokens]) -> bool:
        """Whether a draft of the last token alone must be found.

        arctic looks for suffixes shorter than the text, so a text of one token has none.
        """
        if len(text) < 2:
            return False
        after = followers(text[-1:], within)
        most = max(after.values(), default=0)
        least = self.drafter.config.min_token_prob
        return most > 0 and most / count_of(text[-1:], within) >= least

    def _check(self, draft: Draft, text: Tokens, within: list[Tokens]) -> None:
        """The matched suffix stands there, each token is a most frequent one, odds are counts."""
        matched = text[len(text) - draft.match_len :]
        assert draft.match_len > 0
        prob = 1.0
        for place, token in enumerate(draft.token_ids):
            path = matched + draft.token_ids[:place]
            after = followers(path, within)
            assert after[token] == max(after.values()) > 0, (path, token, after)
            prob *= after[token] / count_of(path, within)
            assert draft.probs[place] == pytest.approx(prob, rel=1e-5)
        assert draft.score == pytest.approx(sum(draft.probs), rel=1e-5)

    @invariant()
    def tokens_are_counted_and_capped(self) -> None:
        assert self.drafter.num_cached_tokens == self.model.num_cached <= CAP
        scopes = {asked.scope for asked in self.model.outputs.values()}
        assert self.drafter.num_scopes == len(scopes)


TestSuffixCache = SuffixMachine.TestCase
TestSuffixCache.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def asked_whole(drafter: SuffixDrafter, name: str, limit: int) -> tuple[object, ...]:
    """The draft where both trees are asked for every length of match."""
    active = drafter._active[name]
    context = active.own.token_ids.tail(drafter.config.max_tree_depth)
    best, is_local = active.own.tree.speculate_ndarray(context, limit, 4.0, 0.0, 0.1, False), True
    if (scope := drafter._scopes.get(active.output.scope)) is not None:
        shared = scope.tree.speculate_ndarray(context, limit, 4.0, 0.0, 0.1, False)
        if shared.score > best.score:
            best, is_local = shared, False
    return tuple(best.token_ids), tuple(best.probs), best.match_len, is_local


@given(
    seed=st.integers(0, 2**32), depth=st.sampled_from([3, 9, 64]), cap=st.sampled_from([80, 999])
)
@settings(max_examples=40)
def test_lengths_of_match_that_are_not_asked_for_would_have_changed_nothing(
    seed: int, depth: int, cap: int
) -> None:
    random = Random(seed)
    drafter = SuffixDrafter(SuffixConfig(max_tree_depth=depth, max_cached_tokens=cap))
    phrases = [tuple(random.choices(range(6), k=random.randint(1, 14))) for _ in range(4)]
    for number in range(6):
        drafter.start(Request(str(number), random.choice(phrases)))
        if number >= 3:
            drafter.stop(str(number - 3))
        for _ in range(12):
            name = str(random.randint(max(0, number - 2), number))
            phrase = random.choice(phrases)
            drafter.observe(name, phrase[: random.randint(1, len(phrase))])
            draft = drafter.propose(name, 16)
            tokens, probs, match_len, is_local = asked_whole(drafter, name, 16)
            assert (draft.token_ids, draft.probs) == (tokens, probs)
            assert not tokens or (draft.match_len, draft.is_local) == (match_len, is_local)
