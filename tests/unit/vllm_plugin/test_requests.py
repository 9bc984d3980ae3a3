"""The table of requests follows whatever vLLM does with them."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_ray.config import SuffixConfig
from hvd_ray.drafting.suffix import SuffixDrafter
from hvd_ray.types import Draft, Source, Step
from hvd_ray.vllm_plugin import compat_runner
from hvd_ray.vllm_plugin.options import Control
from hvd_ray.vllm_plugin.requests import Plan, RequestTable, Tracked

from .runner_fakes import FakeRunner


class Bench:
    """A table on a fake runner, and the steps that it recorded."""

    def __init__(self) -> None:
        self.runner = FakeRunner()
        self.steps: list[Step] = []
        self.skipped: list[str | None] = []
        """Why each step verified no draft."""
        self.ended: list[str] = []
        self.table = RequestTable(
            SuffixDrafter(SuffixConfig()),
            lambda state: compat_runner.profile_of("model", state),
            on_step=lambda _tracked, step, skipped: self._note(step, skipped),
            on_end=lambda tracked: self.ended.append(tracked.key),
        )

    def _note(self, step: Step, skipped: str | None) -> None:
        self.steps.append(step)
        self.skipped.append(skipped)

    def step(self, sampled: dict[str, list[int]], drafted: dict[str, int] | None = None) -> None:
        rows = compat_runner.rows_of(self.runner, self.runner.sample(sampled, drafted=drafted))
        self.table.forget_absent(self.runner.requests)
        self.table.observe(rows)

    def tracked(self, request_id: str) -> Tracked:
        tracked = self.table.get(request_id)
        assert tracked is not None
        return tracked

    def tokens(self, request_id: str) -> list[int]:
        return self.tracked(request_id).context.token_ids.view().tolist()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_prefill_chunk_is_no_cycle(bench: Bench) -> None:
    bench.runner.add("a", [1, 2, 3])
    bench.step({"a": []})
    assert bench.table.get("a") is None
    bench.step({"a": [4]})
    assert bench.tokens("a") == [1, 2, 3, 4]
    assert bench.tracked("a").context.num_generated == 1


def test_a_step_is_recorded_with_what_became_of_its_draft(bench: Bench) -> None:
    bench.runner.add("a", [1, 2, 3])
    bench.step({"a": [4]})
    draft = Draft(Source.SUFFIX, (5, 6, 7), score=1.5, match_len=6)
    bench.tracked("a").plan = Plan(4, draft, draft, predicted_payoff=2.0, tau=1.75, reason="why")
    bench.step({"a": [5, 9]}, drafted={"a": 3})
    step = bench.steps[-1]
    assert (step.source, step.drafted, step.accepted, step.emitted) == (Source.SUFFIX, 3, 1, 2)
    assert (step.predicted_payoff, step.tau, step.reason, step.position) == (2.0, 1.75, "why", 1)
    assert (step.match_len, step.score, step.cache_draft_len) == (6, 1.5, 3)
    outcome = bench.tracked("a").context.history.outcomes[-1]
    assert (outcome.draft_len, outcome.accepted_len, outcome.predicted) == (3, 1, 2.0)


def test_a_draft_that_vllm_cut_counts_as_cut(bench: Bench) -> None:
    bench.runner.add("a", [1, 2])
    bench.step({"a": [3]})
    draft = Draft(Source.SUFFIX, (4, 5, 6))
    bench.tracked("a").plan = Plan(3, draft, draft)
    bench.step({"a": [4, 5]}, drafted={"a": 1})  # the grammar forbade the second
    assert (bench.steps[-1].drafted, bench.steps[-1].accepted) == (1, 1)


def test_a_draft_that_vllm_left_out_is_skipped_for_that_reason(bench: Bench) -> None:
    bench.runner.add("a", [1, 2])
    bench.step({"a": [3]})
    draft = Draft(Source.SUFFIX, (4, 5, 6))
    bench.tracked("a").plan = Plan(3, draft, draft)
    bench.step({"a": [4]})  # no room in the step's budget
    bench.tracked("a").plan = Plan(4, draft, Draft(Source.NONE, ()), skipped="policy")
    bench.step({"a": [5]})
    assert bench.skipped[1:] == ["dropped", "policy"]


def test_rows_that_pad_a_step_are_no_draft(bench: Bench) -> None:
    bench.runner.add("a", [1, 2])
    bench.step({"a": [3]}, drafted={"a": 16})
    assert (bench.steps[-1].source, bench.steps[-1].drafted) == (Source.NONE, 0)


def test_a_preempted_request_keeps_its_place_and_drops_its_draft(bench: Bench) -> None:
    bench.runner.add("a", [1, 2])
    bench.runner.add("b", [7])
    bench.step({"a": [3], "b": [8]})
    draft = Draft(Source.SUFFIX, (4, 5))
    bench.tracked("a").plan = Plan(3, draft, draft)
    bench.step({"b": [8]})  # a was preempted
    bench.step({"a": [], "b": [8]})  # and is prefilled again, its output included
    bench.step({"a": [4], "b": [8]})
    assert bench.tokens("a") == [1, 2, 3, 4]
    assert (bench.steps[-2].source, bench.steps[-2].drafted) == (Source.NONE, 0)
    assert bench.ended == []


@pytest.mark.parametrize("position", [2, 4])
def test_a_plan_of_another_moment_counts_for_nothing(bench: Bench, position: int) -> None:
    """Case G03: its tokens stand somewhere else by now, whatever vLLM verified."""
    bench.runner.add("a", [1, 2])
    bench.step({"a": [3]})
    draft = Draft(Source.SUFFIX, (4, 5, 6), match_len=2)
    bench.tracked("a").plan = Plan(position, draft, draft, predicted_payoff=2.0)
    bench.step({"a": [4, 5]}, drafted={"a": 3})
    step = bench.steps[-1]
    assert (step.source, step.drafted, step.accepted, step.match_len) == (Source.NONE, 0, 0, 0)
    assert step.predicted_payoff is None
    bench.step({"a": [7]})
    assert not bench.tracked("a").context.history.outcomes


def test_finished_and_aborted_requests_leave(bench: Bench) -> None:
    bench.runner.add("a", [1])
    bench.step({"a": [2]})
    bench.runner.remove("a")
    bench.runner.add("b", [1])
    bench.step({"b": [2]})
    assert bench.table.get("a") is None
    assert len(bench.table) == len(bench.ended) == 1


def test_an_id_that_comes_back_is_another_request(bench: Bench) -> None:
    bench.runner.add("a", [1, 2, 3])
    bench.step({"a": [4]})
    bench.runner.remove("a")
    bench.runner.add("a", [9, 9])
    bench.step({"a": [8]})
    assert bench.tokens("a") == [9, 9, 8]
    assert len(bench.ended) == 1


def test_where_vllm_takes_tokens_back_its_prefix_counts(bench: Bench) -> None:
    bench.runner.add("a", [1, 2])
    bench.step({"a": [3, 4, 5]})
    bench.runner.take_back("a", 2)
    bench.step({"a": [6]})
    assert bench.tokens("a") == [1, 2, 3, 6]
    assert bench.tracked("a").context.prompt_len == 2


def test_where_vllm_takes_back_the_end_the_request_goes_on(bench: Bench) -> None:
    bench.runner.add("a", [1, 2], eos_token_id=0)
    bench.step({"a": [3, 0]})
    assert bench.tracked("a").is_ended
    bench.runner.take_back("a", 1)
    bench.step({"a": [6]})
    assert bench.tokens("a") == [1, 2, 3, 6]
    assert not bench.tracked("a").is_ended


def test_nothing_beyond_the_end_is_remembered(bench: Bench) -> None:
    bench.runner.add("a", [1, 2], eos_token_id=0)
    bench.runner.add("b", [1, 2], max_tokens=2)
    bench.step({"a": [3, 0, 4, 5], "b": [3, 4, 5]})
    assert bench.tokens("a") == [1, 2, 3, 0]
    assert bench.tokens("b") == [1, 2, 3, 4]
    for request_id in "ab":
        assert bench.tracked(request_id).context.history.num_since_mismatch == 2
    assert bench.tracked("a").is_ended
    assert bench.tracked("b").is_ended


def test_scopes_are_salt_and_adapter() -> None:
    runner = FakeRunner()
    runner.add("a", [1], extra_args={"hvd_scope": "x"})
    runner.add("b", [1], extra_args={"hvd_scope": "x"})
    runner.add("c", [1], extra_args={"hvd_scope": "y"})
    runner.add("d", [1], extra_args={"hvd_scope": ""})
    runner.add("e", [1], extra_args={"hvd_scope": "x"})
    runner.requests["e"].lora_request = type("L", (), {"lora_int_id": 1, "lora_name": "l"})()
    runner.add("f", [1], extra_args=None)
    runner.add("g", [1], extra_args=None)
    scopes = {i: compat_runner.profile_of("m", s).scope for i, s in runner.requests.items()}
    assert scopes["a"] == scopes["b"]
    others = [scopes[i] for i in "acdefg"]
    assert len(set(others)) == len(others), "a front end without the plugin shares with nobody"


def test_outputs_are_drafted_within_a_scope_and_never_across(bench: Bench) -> None:
    said = list(range(10, 22))
    for request_id, salt in (("a", "x"), ("b", "x"), ("c", "y")):
        bench.runner.add(request_id, [1, 2], extra_args={"hvd_scope": salt})
    bench.step({"a": said})
    bench.runner.remove("a")
    bench.step({"b": said[:4], "c": said[:4]})
    cache = bench.table.cache
    assert cache.propose(bench.tracked("b").key, 3).token_ids == tuple(said[4:7])
    assert cache.propose(bench.tracked("c").key, 3).token_ids == ()


def test_a_profile_holds_what_ends_the_request() -> None:
    runner = FakeRunner()
    runner.add("a", [1], eos_token_id=2, stop_token_ids=[5], extra_args={"hvd": "off"})
    runner.add("b", [1])
    runner.requests["b"].prompt_embeds = np.zeros((1, 4))
    profile = compat_runner.profile_of("m", runner.requests["a"])
    assert profile.stop_token_ids == {2, 5}
    assert profile.control is Control.OFF
    assert not compat_runner.profile_of("m", runner.requests["b"]).is_readable


def test_many_short_requests_leave_no_more_than_the_cap() -> None:
    runner = FakeRunner()
    cache = SuffixDrafter(SuffixConfig(max_cached_tokens=200))
    table = RequestTable(cache, lambda state: compat_runner.profile_of("m", state))
    sizes = []
    for number in range(300):
        name = f"r{number}"
        runner.add(name, [1, 2], extra_args={"hvd_scope": str(number % 3)})
        rows = compat_runner.rows_of(runner, runner.sample({name: [number, number + 1, 7, 8]}))
        table.forget_absent(runner.requests)
        table.observe(rows)
        runner.remove(name)
        sizes.append(cache.num_cached_tokens)
    assert max(sizes) <= 200
    assert sizes[-1] > 150
    assert len(table) == 1
    assert cache.num_scopes <= 3


@pytest.mark.parametrize(("word", "num_kept"), [("off", 0), ("cache", 4), ("eagle3", 4)])
def test_off_leaves_nothing_in_the_cache(bench: Bench, word: str, num_kept: int) -> None:
    bench.runner.add("a", [1, 2, 3], extra_args={"hvd": word, "hvd_scope": ""})
    bench.step({"a": [4]})
    bench.step({"a": [5, 6, 7]})
    assert bench.tokens("a") == [1, 2, 3, 4, 5, 6, 7]
    bench.runner.remove("a")
    bench.step({})
    assert bench.table.cache.num_cached_tokens == num_kept
