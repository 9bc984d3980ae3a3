"""Evidence and counts against counting by hand, whatever order texts came and went in."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_ray.config import SuffixConfig
from hvd_ray.drafting.evidence import EVIDENCE_NAMES, NUM_EVIDENCE, evidence_of
from hvd_ray.drafting.evidence_kernel import UNSEEN_PROB
from hvd_ray.drafting.ngram_kernel import _SEED, count_at, mixed, tag_of
from hvd_ray.drafting.ngram_table import MAX_ORDER, NgramTable
from hvd_ray.drafting.suffix import SuffixDrafter
from hvd_ray.types import Request

texts = st.lists(st.integers(0, 4), min_size=1, max_size=40)


def ngrams(*sequences: list[int]) -> Counter[tuple[int, ...]]:
    return Counter(
        tuple(text[end - size : end])
        for text in sequences
        for end in range(1, len(text) + 1)
        for size in range(1, min(MAX_ORDER, end) + 1)
    )


def table_of(*sequences: list[int], has_places: bool = False) -> NgramTable:
    table = NgramTable(has_places=has_places)
    for text in sequences:
        table.extend(np.array(text, np.int32), 0)
    return table


def count(table: NgramTable, ngram: tuple[int, ...]) -> int:
    state = _SEED
    for token in reversed(ngram):
        state = np.uint64(mixed(state, token))
    return int(count_at(table.slots_S, np.uint64(tag_of(state))))


@given(st.lists(texts, min_size=1, max_size=4), st.data())
def test_counts_are_those_of_the_texts_that_stayed(sequences, data):
    table = NgramTable()
    for text in sequences:
        cut = data.draw(st.integers(0, len(text)))
        table.extend(np.array(text[:cut], np.int32), 0)
        table.extend(np.array(text, np.int32), cut)
    gone = data.draw(st.sampled_from(sequences))
    table.remove(np.array(gone, np.int32))
    stayed = list(sequences)
    stayed.remove(gone)
    expected = ngrams(*stayed)
    for ngram in ngrams(*sequences):
        assert count(table, ngram) == expected[ngram]


def test_a_table_that_grows_forgets_nothing():
    rng = np.random.default_rng(0)
    text = rng.integers(0, 49_000, 3000).astype(np.int32)
    table = NgramTable(has_places=True)
    table.extend(text, 0)
    expected = ngrams(text.tolist())
    assert len(expected) > 20_000
    assert all(count(table, ngram) == n for ngram, n in list(expected.items())[::97])
    assert count(table, (7, 7, 7)) == 0


def by_hand(draft, own, prompt_len, outputs):
    """A few figures of each kind, from their definitions."""
    mine, theirs = ngrams(own), ngrams(*outputs)
    whole = own + draft
    behind, size = len(own), min(len(draft), 8)

    def tail(ahead, order):
        end = behind + ahead
        return tuple(whole[end - order : end]) if end >= order else None

    def prob(ahead, own_weight, scope_weight, discount):
        value = UNSEEN_PROB
        for order in range(1, MAX_ORDER):
            before, after = tail(ahead - 1, order), tail(ahead, order + 1)
            if before is None:
                break
            context = own_weight * (mine[before] - (ahead == 1)) + scope_weight * theirs[before]
            if context <= 0:
                break
            hits = own_weight * mine[after] + scope_weight * theirs[after] if after else 0
            value = (min(hits, context) + discount * value) / (context + discount)
        return value

    found = {}
    for text, setting in (("all", (1, 1, 1.0)), ("own", (1, 0, 0.5)), ("scope", (0, 1, 0.5))):
        probs = [prob(k, *setting) for k in range(1, size + 1)]
        found[f"support_{text}_prob_1"] = probs[0]
        found[f"support_{text}_low_prob"] = min(probs)
        found[f"support_{text}_run_sum"] = sum(np.cumprod(probs))
        if size >= 4:
            found[f"support_{text}_run_4"] = math.prod(probs[:4])
    for order in (1, 2, 4, 8):
        key = tail(1, order)
        found[f"support_own_log_seen_{order}_1"] = math.log1p(mine[key] if key else 0)
    new = [k for k in range(1, size + 1) if not tail(k, 3) or mine[tail(k, 3)] == 0]
    found["support_own_new_3_at"] = new[0] - 1 if new else size
    last = {tuple(own[end - 3 : end]): end for end in range(3, behind + 1)}
    places = [last.get(tail(k, 3), 0) if tail(k, 3) else 0 for k in range(1, size + 1)]
    found["place_num_repeated"] = sum(place > prompt_len for place in places)
    found["place_log_distance_1"] = math.log1p(behind - places[0]) if places[0] else 12.0
    here = tail(0, 6)
    before = [end for end in range(6, behind) if here and tuple(own[end - 6 : end]) == here]
    found["place_log_distance"] = math.log1p(behind - before[-1]) if before else 12.0
    return found


@settings(max_examples=200)
@given(st.lists(texts, max_size=3), texts, st.integers(0, 40), texts)
def test_evidence_equals_counting_by_hand(outputs, own, prompt_len, draft):
    found = evidence_of(
        tuple(draft),
        token_ids=np.array(own, np.int32),
        prompt_len=prompt_len,
        own=table_of(own, has_places=True),
        scope=table_of(*outputs),
    )
    named = dict(zip(EVIDENCE_NAMES, found.tolist(), strict=True))
    expected = by_hand(draft, own, prompt_len, outputs)
    assert {name: named[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_the_names_are_unique_and_all_are_written():
    assert len(set(EVIDENCE_NAMES)) == NUM_EVIDENCE
    own = list(range(30)) * 4
    found = evidence_of(
        tuple(own[:20]),
        token_ids=np.array(own, np.int32),
        prompt_len=40,
        own=table_of(own, has_places=True),
        scope=table_of(own),
    )
    zeros = {name for name, value in zip(EVIDENCE_NAMES, found, strict=True) if value == 0}
    assert not {name for name in zeros if not name.endswith("_low_at")}


def test_evidence_forgets_evicted_outputs_and_other_scopes():
    drafter = SuffixDrafter(SuffixConfig(max_cached_tokens=60))

    def seen(scope: str) -> float:
        drafter.start(Request("asks", (9, 1, 2, 3, 9, 1, 2, 3), scope=scope))
        evidence_E = drafter.propose("asks", 8).evidence_E
        drafter.stop("asks")
        return dict(zip(EVIDENCE_NAMES, evidence_E.tolist(), strict=True))[
            "support_scope_log_seen_2_0"
        ]

    drafter.start(Request("old", (7,), scope="a"))
    drafter.observe("old", (1, 2, 3) * 10)
    drafter.stop("old")
    assert seen("a") == pytest.approx(math.log1p(10))
    assert seen("b") == 0
    drafter.start(Request("new", (7,), scope="a"))
    drafter.observe("new", (5, 6, 4) * 15)
    assert seen("a") == 0
