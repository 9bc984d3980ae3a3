"""Who drafts for whom: the batch's decisions, and what single requests ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import process_time

import numpy as np
import pytest

from hvd_ray.config import SuffixConfig
from hvd_ray.context import DecodeContext
from hvd_ray.drafting.suffix import SuffixDrafter
from hvd_ray.payoff.policy import AlwaysCache, Candidates
from hvd_ray.types import NO_DRAFT, Decision, Draft, Source
from hvd_ray.vllm_plugin import compat_runner
from hvd_ray.vllm_plugin import router as router_module
from hvd_ray.vllm_plugin.requests import RequestTable, Tracked
from hvd_ray.vllm_plugin.router import BatchPolicy, Choice, EachAlone, Limits, Router

from .runner_fakes import FakeRunner

LOOP = [1, 2, 3, 4, 5, 6] * 3


class ModelForAll:
    def __init__(self) -> None:
        self.asked: list[int] = []

    def decide_all(
        self, candidates_B: Sequence[Candidates], contexts_B: Sequence[DecodeContext]
    ) -> list[Decision]:
        assert len(candidates_B) == len(contexts_B)
        self.asked.append(len(candidates_B))
        return [Decision(Source.EAGLE3, min(2, c.model_limit)) for c in candidates_B]


def route(
    runner: FakeRunner,
    sampled: dict[str, list[int]],
    policy: BatchPolicy,
    *,
    max_draft_tokens: int = 16,
    eagle3_tokens: int = 4,
    lookup_ms: float = 1e9,
) -> dict[str, Choice | None]:
    table = RequestTable(SuffixDrafter(SuffixConfig()), lambda s: compat_runner.profile_of("m", s))
    limits = Limits(runner.max_model_len, eagle3_tokens, lookup_ms=lookup_ms)
    router = Router(table, policy, limits)
    rows = compat_runner.rows_of(runner, runner.sample(sampled))
    table.observe(rows)
    choices = router.choose(rows, max_draft_tokens=max_draft_tokens)
    return dict(zip(sampled, choices, strict=True))


def test_each_request_gets_a_draft_of_its_own_length() -> None:
    runner = FakeRunner()
    runner.add("loop", LOOP)
    runner.add("fresh", [11, 12, 13])
    choices = route(runner, {"loop": [1, 2], "fresh": [14]}, EachAlone(AlwaysCache()))
    assert choices["loop"] is not None
    assert choices["loop"].cache_tokens.token_ids[:4] == (3, 4, 5, 6)
    assert choices["fresh"] is not None
    assert choices["fresh"].cache_tokens.token_ids == ()


def test_what_a_request_asks_for_is_obeyed_and_touches_no_neighbour() -> None:
    runner = FakeRunner()
    for word in ("auto", "off", "cache", "eagle3"):
        runner.add(word, LOOP, extra_args={"hvd": word, "hvd_scope": ""})
    policy = ModelForAll()
    choices = route(runner, {w: [1] for w in ("auto", "off", "cache", "eagle3")}, policy)
    found = {word: choice.decision for word, choice in choices.items() if choice is not None}
    assert policy.asked == [1]
    assert (found["auto"].source, found["auto"].length) == (Source.EAGLE3, 2)
    assert (found["off"].source, found["off"].length) == (Source.NONE, 0)
    assert found["cache"].source == Source.SUFFIX
    assert (found["eagle3"].source, found["eagle3"].length) == (Source.EAGLE3, 4)


def test_a_seeded_request_is_left_alone_unless_it_names_a_source() -> None:
    runner = FakeRunner()
    for word in ("auto", "off", "cache", "eagle3"):
        extra = {"hvd": word, "hvd_scope": ""}
        runner.add(word, LOOP, extra_args=extra, is_seeded=True)
    runner.add("silent", LOOP, is_seeded=True)
    table = RequestTable(SuffixDrafter(SuffixConfig()), lambda s: compat_runner.profile_of("m", s))
    router = Router(table, ModelForAll(), Limits(64, 4, lookup_ms=1e9))
    rows = compat_runner.rows_of(runner, runner.sample({name: [1] for name in runner.requests}))
    table.observe(rows)
    found = {}
    for choice in router.choose(rows, max_draft_tokens=16):
        assert choice is not None
        router.note(choice, NO_DRAFT)
        plan = choice.tracked.plan
        assert plan is not None
        source = choice.decision.source
        found[choice.tracked.request_id] = plan.skipped if source is Source.NONE else source
        assert choice.may_use_model == (choice.tracked.request_id == "eagle3")
    drafted = {"cache": Source.SUFFIX, "eagle3": Source.EAGLE3}
    assert found == {"auto": "seeded", "silent": "seeded", "off": "off", **drafted}


def test_drafts_keep_within_budget_context_and_the_engines_limit() -> None:
    runner = FakeRunner(max_model_len=32)
    runner.add("budget", LOOP, max_tokens=3)
    runner.add("context", [*LOOP, *LOOP[:10]])  # 28 of 32 tokens
    runner.add("free", LOOP)
    chosen = route(
        runner,
        {"budget": [1], "context": [5, 6], "free": [1]},
        EachAlone(AlwaysCache()),
        max_draft_tokens=5,
    )
    lengths = {i: len(c.cache_tokens) for i, c in chosen.items() if c is not None}
    assert lengths == {"budget": 1, "context": 1, "free": 5}


def test_a_prefill_chunk_and_an_ended_request_get_nothing() -> None:
    runner = FakeRunner()
    runner.add("chunk", LOOP)
    runner.add("ended", LOOP, eos_token_id=9)
    choices = route(runner, {"chunk": [], "ended": [9]}, EachAlone(AlwaysCache()))
    assert choices == {"chunk": None, "ended": None}


def test_a_prompt_that_is_read_again_is_not_counted_with_the_decoding() -> None:
    """Case H02: after a preemption its request is known, and still no competitor for rows."""
    runner, policy = FakeRunner(), ModelForAll()
    for name in ("resumed", "decoding"):
        runner.add(name, LOOP)
    table = RequestTable(SuffixDrafter(SuffixConfig()), lambda s: compat_runner.profile_of("m", s))
    router = Router(table, policy, Limits(runner.max_model_len, 4, lookup_ms=1e9))
    for sampled in ({"resumed": [1], "decoding": [1]}, {"resumed": [], "decoding": [2]}):
        rows = compat_runner.rows_of(runner, runner.sample(sampled))
        table.observe(rows)
        choices = router.choose(rows, max_draft_tokens=16)
    assert policy.asked == [2, 1]
    assert choices[0] is None
    assert choices[1] is not None


def test_without_a_head_none_is_offered() -> None:
    runner = FakeRunner()
    runner.add("a", LOOP)
    choice = route(runner, {"a": [1]}, ModelForAll(), eagle3_tokens=0)["a"]
    assert choice is not None
    assert choice.num_model_tokens == 0


def test_where_time_for_look_ups_runs_out_requests_take_turns() -> None:
    runner = FakeRunner()
    for name in "ab":
        runner.add(name, LOOP)
    table = RequestTable(SuffixDrafter(SuffixConfig()), lambda s: compat_runner.profile_of("m", s))
    router = Router(table, EachAlone(AlwaysCache()), Limits(64, 0, lookup_ms=1e-9))
    rows = compat_runner.rows_of(runner, runner.sample({"a": [1], "b": [1]}))
    table.observe(rows)
    choices = router.choose(rows, max_draft_tokens=4)
    assert [len(c.cache_tokens) for c in choices if c is not None] == [0, 0]
    assert router.num_unlooked == 2
    router.limits = Limits(64, 0, lookup_ms=1e9)
    choices = router.choose(rows, max_draft_tokens=4)
    assert [len(c.cache_tokens) for c in choices if c is not None] == [4, 4]


def test_long_prompts_keep_to_the_time_for_look_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 requests, one of them with a prompt of 50,000 tokens; a look-up takes 1 ms by the clock
    of this test."""
    clock = [0.0]
    monkeypatch.setattr(router_module, "perf_counter", lambda: clock[0])
    rng = np.random.default_rng(0)
    runner = FakeRunner(max_model_len=60_000)
    runner.add("long", rng.integers(0, 49_152, 50_000).tolist())
    for index in range(255):
        runner.add(str(index), LOOP)
    table = RequestTable(SuffixDrafter(SuffixConfig()), lambda s: compat_runner.profile_of("m", s))
    router = Router(table, EachAlone(AlwaysCache()), Limits(60_000, 0, lookup_ms=5.0))
    rows = compat_runner.rows_of(runner, runner.sample({name: [1] for name in runner.requests}))
    table.observe(rows)
    looked_up = []

    def propose(_: Router, tracked: Tracked) -> Draft:
        looked_up.append(tracked.key)
        clock[0] += 1e-3
        return NO_DRAFT

    monkeypatch.setattr(Router, "_propose", propose)
    for _ in range(52):
        before = len(looked_up)
        router.choose(rows, max_draft_tokens=4)
        assert len(looked_up) - before <= 6
    assert len(set(looked_up)) == 256, "all had their turn"
    monkeypatch.undo()
    best = min(_cpu_seconds(lambda: router._propose(table.get("long"))) for _ in range(20))
    assert best < 1e-3, "a look-up hardly knows how long the prompt is"


def _cpu_seconds(call: Callable[[], object]) -> float:
    started = process_time()
    call()
    return process_time() - started
