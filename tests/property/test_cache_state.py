"""Invariants 4, 7 and 8: what the KV cache and the draft cache may hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hvd_ray.config import Config, SuffixConfig
from hvd_ray.drafting.suffix import SuffixDrafter
from hvd_ray.engines.toy import ToyCache, ToyEngine
from hvd_ray.types import Request, SamplingParams
from tests.property.toy_requests import decoder, engines, requests, systems


@given(engines, requests(), systems)
def test_kv_cache_holds_committed_tokens_only(
    engine: ToyEngine, request: Request, system: str
) -> None:
    """Invariant 4: after every cycle the cache is the committed prefix, less its last token."""
    warm = decoder(system, engine)
    warm.generate(request)
    generation = warm.start(request)
    while not generation.is_finished:
        warm.step(generation)
        cache = generation.state.cache
        assert isinstance(cache, ToyCache)
        assert cache.token_ids == generation.context.token_ids.view()[:-1].tolist()
    warm.close(generation)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ann", "bob"]),
            st.lists(st.integers(0, 5), min_size=1, max_size=20),
            st.lists(st.integers(0, 5), min_size=0, max_size=30),
        ),
        max_size=12,
    ),
    st.integers(1, 60),
)
def test_cached_tokens_stay_under_the_cap(
    traffic: list[tuple[str, list[int], list[int]]], cap: int
) -> None:
    """Invariant 8, at every moment, over all scopes."""
    drafter = SuffixDrafter(SuffixConfig(max_cached_tokens=cap))
    for number, (scope, prompt, output) in enumerate(traffic):
        request = Request(f"{number}", tuple(prompt), scope=scope)
        drafter.start(request)
        for start in range(0, len(output), 4):
            drafter.observe(request.request_id, tuple(output[start : start + 4]))
            assert drafter.num_cached_tokens <= cap
        if number % 3:
            drafter.stop(request.request_id)
            assert drafter.num_cached_tokens <= cap
    drafter.clear()
    assert drafter.num_cached_tokens == 0


@given(
    st.lists(st.integers(0, 9), min_size=8, max_size=40),
    st.lists(st.integers(10, 19), min_size=4, max_size=10),
)
def test_scopes_share_nothing_and_a_scope_reuses(output: list[int], prompt: list[int]) -> None:
    """Invariant 7, both ways: another scope never drafts from it, the same scope does."""
    drafter = SuffixDrafter()
    drafter.start(Request("first", tuple(prompt), scope="ann"))
    drafter.observe("first", tuple(output))
    drafter.stop("first")
    for scope in ("ann", "bob"):
        drafter.start(Request(scope, tuple(prompt), scope=scope))
        drafter.observe(scope, tuple(output[:4]))
    assert drafter.propose("bob", 8).token_ids == _own_draft(prompt, output[:4])
    reused = drafter.propose("ann", 8)
    assert reused.token_ids


def _own_draft(prompt: list[int], output: list[int]) -> tuple[int, ...]:
    """What a drafter that never saw anybody else proposes."""
    alone = SuffixDrafter()
    alone.start(Request("alone", tuple(prompt)))
    alone.observe("alone", tuple(output))
    return alone.propose("alone", 8).token_ids


def test_outputs_after_a_stop_never_enter_the_draft_cache() -> None:
    """Case T06: the run is trimmed before anything remembers it."""
    engine = ToyEngine(vocab_size=12, order=1, seed=4, sharpness=8.0)
    config = Config()
    warm = decoder("suffix", engine, config)
    whole = warm.generate(Request("a", (3,), SamplingParams(max_tokens=40, ignore_eos=True)))
    stop = whole.text[20:22]
    cut = warm.generate(Request("b", (3,), SamplingParams(max_tokens=40, stop=(stop,))))
    assert cut.finish_reason == "stop"
    assert sum(step.emitted for step in cut.steps) == len(cut.token_ids)
    assert isinstance(warm.cache_drafter, SuffixDrafter)
    assert warm.cache_drafter.num_cached_tokens == len(whole.token_ids) + len(cut.token_ids)
