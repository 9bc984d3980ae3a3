"""The suffix drafter against arctic's own cache; the n-gram drafter against a scan."""

from __future__ import annotations

import numpy as np
import pytest
from arctic_inference.suffix_decoding import SuffixDecodingCache
from arctic_inference.suffix_decoding._C import SuffixTree
from hypothesis import given
from hypothesis import strategies as st

from hvd_ray.config import NgramConfig, SuffixConfig
from hvd_ray.drafting.ngram import NgramDrafter
from hvd_ray.drafting.resting import OwnText, RestingTexts
from hvd_ray.drafting.suffix import RuleDrafter, SuffixDrafter
from hvd_ray.errors import UserError
from hvd_ray.types import Request, tenant_of

texts = st.lists(st.integers(0, 6), min_size=1, max_size=40).map(tuple)


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=5), st.sampled_from([8, 24, 64]))
def test_suffix_drafts_equal_arctics(
    traffic: list[tuple[tuple[int, ...], ...]], depth: int
) -> None:
    """Within one scope ours is arctic's cache: drafts, probabilities, scores, match lengths."""
    config = SuffixConfig(max_tree_depth=depth)
    ours = SuffixDrafter(config)
    arctic = SuffixDecodingCache(max_tree_depth=depth)
    for number, (prompt, output) in enumerate(traffic):
        name = f"{number}"
        ours.start(Request(name, prompt))
        arctic.start_request(name, np.array(prompt, np.int32))
        seen = list(prompt)
        for token in output:
            draft = ours.propose(name, 64)
            wanted = arctic.speculate(
                name,
                np.array(seen, np.int32),
                max_spec_tokens=64,
                max_spec_factor=config.max_spec_factor,
            )
            assert draft.token_ids == tuple(wanted.token_ids)
            if draft.token_ids:
                assert draft.probs == tuple(wanted.probs)
                assert (draft.score, draft.match_len) == (wanted.score, wanted.match_len)
            ours.observe(name, (token,))
            arctic.add_active_response(name, np.array([token], np.int32))
            seen.append(token)
        ours.stop(name)
        arctic.stop_request(name)


@given(
    st.lists(st.integers(0, 3), min_size=70, max_size=100).map(tuple),
    st.lists(st.tuples(texts, texts, st.booleans()), min_size=2, max_size=5),
)
def test_a_conversation_that_goes_on_drafts_as_if_read_anew(
    opening: tuple[int, ...], turns: list[tuple[tuple[int, ...], tuple[int, ...], bool]]
) -> None:
    """Going on from a tree at rest changes no draft, also where the next prompt differs from it."""
    ours = SuffixDrafter(SuffixConfig().for_rules())
    arctic = SuffixDecodingCache(max_tree_depth=64)
    prompt = opening
    for number, (output, asked, goes_on) in enumerate(turns):
        name = f"{number}"
        ours.start(Request(name, prompt))
        arctic.start_request(name, np.array(prompt, np.int32))
        ours.observe(name, output)
        arctic.add_active_response(name, np.array(output, np.int32))
        draft = ours.propose(name, 64)
        seen = np.array(prompt + output, np.int32)
        wanted = arctic.speculate(name, seen, max_spec_tokens=64)
        assert (draft.token_ids, draft.probs) == (tuple(wanted.token_ids), tuple(wanted.probs))
        ours.stop(name)
        arctic.stop_request(name)
        prompt = (prompt + output if goes_on else opening) + asked


def own_text(size: int) -> OwnText:
    own = OwnText(SuffixTree(8))
    own.extend(np.arange(size, dtype=np.int32))
    return own


def test_texts_rest_for_their_own_scope_only_and_within_the_cap() -> None:
    resting = RestingTexts(max_tokens=250)
    prompt = np.arange(100, dtype=np.int32)
    for scope in ("a", "b", "c"):
        resting.put(scope, own_text(100))
    assert resting.num_tokens == 200
    assert resting.take("a", prompt) is None  # the oldest made room
    assert resting.take("c", prompt[:99]) is None  # not a beginning of that prompt
    assert resting.take("c", np.arange(120, dtype=np.int32)) is not None
    assert resting.take("c", prompt) is None  # handed out once
    resting.clear("b")
    assert resting.num_tokens == 0


def test_suffix_limit_cuts_the_draft() -> None:
    drafter = SuffixDrafter(SuffixConfig().for_rules())
    drafter.start(Request("r", tuple(range(20)) + tuple(range(10))))
    assert len(drafter.propose("r", 64)) == 10
    assert drafter.propose("r", 3).token_ids == (10, 11, 12)
    assert drafter.propose("r", 0).token_ids == ()


def test_evicted_outputs_no_longer_draft() -> None:
    drafter = SuffixDrafter(SuffixConfig(max_cached_tokens=20))
    drafter.start(Request("old", (90,)))
    drafter.observe("old", tuple(range(10)))
    drafter.stop("old")
    drafter.start(Request("new", (91,)))
    drafter.observe("new", tuple(range(50, 65)))
    assert drafter.num_cached_tokens == 15
    drafter.start(Request("asks", (92, 0, 1, 2, 3)))
    assert drafter.propose("asks", 8).token_ids == ()


def test_evicted_outputs_are_no_longer_counted() -> None:
    """Counts that stay would grow with all that a scope has ever seen."""
    drafter = SuffixDrafter(SuffixConfig(max_cached_tokens=20))

    def num_counted() -> int:
        (scope,) = drafter._scopes.values()
        return int(np.count_nonzero(scope.counts.slots_S & np.uint64(0xFFFFFF)))

    for number in range(6):
        drafter.start(Request(str(number), (90,)))
        drafter.observe(str(number), tuple(range(100 * number, 100 * number + 10)))
        drafter.stop(str(number))
        counted = num_counted()
        if number == 1:
            of_two = counted
        assert number < 2 or counted == of_two, "the two that are kept, and no other"


def test_an_owner_keeps_its_share_however_much_another_writes() -> None:
    """Parts of one owner's cache count together; what nobody else needs, anybody may fill."""
    drafter = SuffixDrafter(SuffixConfig(max_cached_tokens=100), owner_of=tenant_of)

    def write(name: str, scope: str, start: int, num_tokens: int) -> None:
        drafter.start(Request(name, (999,), scope=scope))
        drafter.observe(name, tuple(range(start, start + num_tokens)))
        drafter.stop(name)

    def drafts(scope: str, start: int) -> bool:
        name = f"asks {scope} {start}"
        drafter.start(Request(name, (998, start, start + 1, start + 2), scope=scope))
        found = drafter.propose(name, 4).token_ids
        drafter.stop(name)
        return bool(found)

    write("alice", "alice/m/", 100, 20)
    for number in range(40):
        write(f"bob {number}", f"bob/m//salt{number}", 1_000 + 20 * number, 20)
        assert drafter.num_cached_tokens <= 100
    assert drafts("alice/m/", 100), "less than her share, and never pushed out"
    assert drafts("bob/m//salt39", 1_780)
    assert not drafts("bob/m//salt0", 1_000), "the oldest of the one that holds the most"
    for number in range(40):
        write(f"more {number}", "alice/m/", 3_000 + 20 * number, 20)
    assert not drafts("alice/m/", 100)
    assert drafts("bob/m//salt39", 1_780), "nor can she push him out"


@given(
    st.lists(st.tuples(st.sampled_from(["a/x", "a/y", "b/x", "c/x"]), texts), max_size=30),
    st.integers(1, 60),
)
def test_owners_change_nothing_of_the_cap(
    traffic: list[tuple[str, tuple[int, ...]]], cap: int
) -> None:
    drafter = SuffixDrafter(SuffixConfig(max_cached_tokens=cap), owner_of=tenant_of)
    for number, (scope, output) in enumerate(traffic):
        drafter.start(Request(str(number), (7,), scope=scope))
        drafter.observe(str(number), output)
        assert drafter.num_cached_tokens <= cap
        held = sum(owner.num_tokens for owner in drafter._owners.values())
        assert held == drafter.num_cached_tokens
        if number % 3:
            drafter.stop(str(number))
    drafter.clear()
    assert drafter.num_cached_tokens == 0
    assert not drafter._owners


def test_an_output_longer_than_the_cap_still_serves_its_own_request() -> None:
    drafter = SuffixDrafter(SuffixConfig(max_cached_tokens=5))
    drafter.start(Request("r", (9,)))
    for _ in range(3):
        drafter.observe("r", (1, 2, 3, 4))
    assert drafter.num_cached_tokens <= 5
    assert drafter.propose("r", 4).token_ids[:2] == (1, 2)


@pytest.mark.parametrize("drafter", [SuffixDrafter(), NgramDrafter()])
def test_a_request_id_in_use_is_refused(drafter: SuffixDrafter | NgramDrafter) -> None:
    drafter.start(Request("r", (1, 2)))
    with pytest.raises(ValueError, match="already active"):
        drafter.start(Request("r", (1, 2)))
    drafter.stop("r")
    drafter.start(Request("r", (1, 2)))
    drafter.stop("r")


@given(texts, texts, st.integers(1, 3), st.integers(0, 3))
def test_ngram_equals_a_scan(
    prompt: tuple[int, ...], output: tuple[int, ...], low: int, extra: int
) -> None:
    config = NgramConfig(min_match=low, max_match=low + extra, max_draft_tokens=6)
    drafter = NgramDrafter(config)
    drafter.start(Request("r", prompt))
    drafter.observe("r", output)
    draft = drafter.propose("r", 64)
    assert (draft.token_ids, draft.match_len) == _scan(prompt + output, config)


def _scan(token_ids: tuple[int, ...], config: NgramConfig) -> tuple[tuple[int, ...], int]:
    """The longest match, of its places the latest, found by looking everywhere."""
    for size in range(config.max_match, config.min_match - 1, -1):
        latest = token_ids[len(token_ids) - size :]
        for end in range(len(token_ids) - 1, size - 1, -1):
            if len(latest) == size and token_ids[end - size : end] == latest:
                return token_ids[end : end + config.max_draft_tokens], size
    return (), 0


def test_ngram_sizes_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(UserError, match="min_match=6 must not exceed max_match=5"):
        NgramDrafter(NgramConfig(min_match=6))


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=5))
def test_drafts_for_rules_are_those_of_a_cache_of_their_own(
    requests: list[tuple[tuple[int, ...], tuple[int, ...]]],
) -> None:
    """They share what the cache knows with the longer drafts, and nothing else."""
    shared, own = SuffixDrafter(), SuffixDrafter(SuffixConfig().for_rules())
    rules = RuleDrafter(shared)
    for number, (prompt, output) in enumerate(requests):
        request = Request(f"{number}", prompt)
        rules.start(request)
        own.start(request)
        for token in output:
            shared.propose(request.request_id, 64)
            assert rules.propose(request.request_id, 64) == own.propose(request.request_id, 64)
            rules.observe(request.request_id, (token,))
            own.observe(request.request_id, (token,))
        rules.stop(request.request_id)
        own.stop(request.request_id)


def test_where_a_predictor_decides_drafts_are_longer() -> None:
    drafter = SuffixDrafter()
    drafter.start(Request("r", (*range(10, 40), 10, 11)))
    assert len(drafter.propose("r", 64)) == 8
    assert len(RuleDrafter(drafter).propose("r", 64)) == 2
