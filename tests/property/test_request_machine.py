"""The life of requests in any order: start, step, preempt, abort, resume, finish."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from hvd_ray.config import SuffixConfig
from hvd_ray.decode import Generation
from hvd_ray.drafting.suffix import SuffixDrafter
from hvd_ray.engines.toy import ToyEngine
from hvd_ray.engines.toy_tiers import ToyTieredCache
from hvd_ray.types import NO_DRAFT, Draft, Request, SamplingParams, Source, Step
from hvd_ray.vllm_plugin import compat_runner
from hvd_ray.vllm_plugin.requests import Plan, RequestTable
from tests.property.toy_requests import decoder
from tests.unit.vllm_plugin.runner_fakes import FakeRunner

tokens = st.lists(st.integers(0, 4), min_size=1, max_size=5)
SCOPES = ("x", "y")
ANY_SHAPE = [HealthCheck.too_slow, HealthCheck.filter_too_much]
"""Rules on requests that are there have little to choose from at first."""


@dataclass
class Life:
    """A request as vLLM holds it."""

    name: str
    prompt: list[int]
    output: list[int] = field(default_factory=list)


class PluginMachine(RuleBasedStateMachine):
    """vLLM's scheduler, doing whatever it may do, over the plugin's table of requests."""

    running = Bundle("running")
    preempted = Bundle("preempted")

    def __init__(self) -> None:
        super().__init__()
        self.runner = FakeRunner(max_model_len=512)
        self.cache = SuffixDrafter(SuffixConfig(max_cached_tokens=80))
        self.steps: list[tuple[str, Step]] = []
        self.ended: list[str] = []
        self.table = RequestTable(
            self.cache,
            lambda state: compat_runner.profile_of("m", state),
            on_step=lambda tracked, step, _skipped: self.steps.append((tracked.key, step)),
            on_end=lambda tracked: self.ended.append(tracked.key),
        )
        self.names = count()
        self.lives: dict[str, Life] = {}

    def _step(self, sampled: dict[str, list[int]], drafted: dict[str, int] | None = None) -> None:
        accepted = self.runner.sample(sampled, drafted=drafted)
        self.table.forget_absent(self.runner.requests)
        self.table.observe(compat_runner.rows_of(self.runner, accepted))

    @rule(target=running, prompt=tokens, scope=st.sampled_from(SCOPES), reuses=st.booleans())
    def add(self, prompt: list[int], scope: str, reuses: bool) -> str:
        """A new request; vLLM's ids may come back once they are free."""
        free = [f"r{i}" for i in range(4) if f"r{i}" not in self.runner.requests]
        name = free[0] if reuses and free else f"n{next(self.names)}"
        self.runner.add(
            name, prompt, extra_args={"hvd_scope": scope}, max_tokens=24, eos_token_id=0
        )
        self.lives[name] = Life(name, list(prompt))
        self._step({name: []})  # a chunk of its prompt
        return name

    @rule(names=st.lists(running, min_size=1, max_size=4, unique=True), data=st.data())
    def decode(self, names: list[str], data: Any) -> None:
        """A step of some of them; drafts are what the cache proposes, verified as vLLM does."""
        sampled, drafted = {}, {}
        for name in names:
            draft = self._planned(name)
            took = data.draw(st.integers(0, len(draft)))
            bonus = data.draw(st.integers(0, 4))
            sampled[name] = [*draft.token_ids[:took], bonus]
            drafted[name] = len(draft)
        self._step(sampled, drafted)
        for name in names:
            self.lives[name].output += sampled[name]

    def _planned(self, name: str) -> Draft:
        tracked = self.table.get(name)
        if tracked is None or tracked.is_ended:
            return NO_DRAFT
        draft = self.cache.propose(tracked.key, 3)
        tracked.plan = Plan(len(tracked.context.token_ids), draft, draft)
        return draft

    @rule(target=preempted, name=consumes(running))
    def preempt(self, name: str) -> str:
        """Not in the batch any more; its state stays. What was planned for it is void."""
        self._planned(name)
        return name

    @rule(target=running, name=consumes(preempted), takes_back=st.integers(0, 2))
    def resume(self, name: str, takes_back: int) -> str:
        """Prefilled again, perhaps with fewer tokens than before."""
        life = self.lives[name]
        takes_back = min(takes_back, len(life.output))
        if takes_back:
            self.runner.take_back(name, takes_back)
            del life.output[-takes_back:]
        self._step({name: []})
        return name

    @rule(name=st.one_of(consumes(running), consumes(preempted)))
    def leave(self, name: str) -> None:
        """Finished or aborted: vLLM just no longer has it."""
        self.runner.remove(name)
        del self.lives[name]

    @rule(target=running, name=consumes(running))
    def replace(self, name: str) -> Any:
        """Aborted, and its id given to another request between two steps."""
        self.runner.remove(name)
        self.runner.add(name, [4, 4], extra_args={"hvd_scope": "x"}, max_tokens=24, eos_token_id=0)
        self.lives[name] = Life(name, [4, 4])
        return multiple(name)

    @invariant()
    def the_table_is_vllms(self) -> None:
        """Nobody that vLLM lacks after a step, prefixes as vLLM has them up to their end."""
        self.table.forget_absent(self.runner.requests)
        assert len(self.table) <= len(self.lives)
        for name, life in self.lives.items():
            tracked = self.table.get(name)
            if tracked is None:
                continue
            known = tracked.context.token_ids.view().tolist()
            whole = life.prompt + life.output
            assert known == whole[: len(known)] or len(known) > len(whole)
            if not tracked.is_ended and len(known) <= len(whole):
                assert known == whole
        assert self.cache.num_cached_tokens <= 80
        assert len(self.ended) == len(set(self.ended)), "a request ended twice"

    @invariant()
    def counts_add_up(self) -> None:
        for _, step in self.steps:
            assert 0 <= step.accepted <= step.drafted
            assert step.accepted <= step.emitted
            assert (step.source is Source.NONE) == (step.drafted == 0)

    def teardown(self) -> None:
        """With nobody left, nothing is held."""
        self.runner.requests.clear()
        self.table.forget_absent({})
        assert len(self.table) == 0
        assert not self.cache._active


TestPluginRequests = PluginMachine.TestCase
TestPluginRequests.settings = settings(
    max_examples=60, stateful_step_count=30, suppress_health_check=ANY_SHAPE
)


class DecoderMachine(RuleBasedStateMachine):
    """Many requests of one decoder, stepped and left in any order: each gets plain decoding's
    answer, whoever else was there, and leaves nothing."""

    running = Bundle("running")

    @initialize(system=st.sampled_from(["suffix", "hvd_cost", "nested", "hvd_tau+nested"]))
    def build(self, system: str) -> None:
        self.engine = ToyEngine(12, order=2, seed=5, sharpness=6.0, context_length=64)
        self.decoder = decoder(system, self.engine)
        self.plain = decoder("greedy", ToyEngine(12, order=2, seed=5, sharpness=6.0,
                                                 context_length=64))  # fmt: skip
        self.names = count()
        self.open: dict[str, Generation] = {}

    @rule(
        target=running,
        prompt=st.lists(st.integers(1, 3), min_size=1, max_size=6),
        temperature=st.sampled_from([0.0, 0.9]),
        max_tokens=st.integers(1, 20),
        scope=st.sampled_from(SCOPES),
    )
    def start(self, prompt: list[int], temperature: float, max_tokens: int, scope: str) -> str:
        name = f"r{next(self.names)}"
        sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=len(prompt))
        self.open[name] = self.decoder.start(Request(name, tuple(prompt), sampling, scope))
        return name

    @rule(name=running, cycles=st.integers(1, 4))
    def step(self, name: str, cycles: int) -> None:
        generation = self.open[name]
        for _ in range(cycles):
            if not generation.is_finished:
                self.decoder.step(generation)
                last = generation.steps[-1]
                assert last.accepted <= last.drafted
                assert last.emitted >= 1

    @rule(name=consumes(running))
    def abort(self, name: str) -> None:
        """What stood until then is the beginning of the plain answer."""
        generation = self.open.pop(name)
        self.decoder.close(generation)
        self.decoder.close(generation)
        got, wanted = generation.completion(), self.plain.generate(generation.request)
        assert got.token_ids == wanted.token_ids[: len(got.token_ids)]
        if not generation.is_finished:
            assert got.finish_reason == "abort"

    @rule(name=consumes(running))
    def finish(self, name: str) -> None:
        generation = self.open.pop(name)
        while not generation.is_finished:
            self.decoder.step(generation)
        self.decoder.close(generation)
        got, wanted = generation.completion(), self.plain.generate(generation.request)
        assert (got.token_ids, got.finish_reason) == (wanted.token_ids, wanted.finish_reason)
        assert sum(step.emitted for step in got.steps) == len(got.token_ids)

    @invariant()
    def caches_hold_committed_tokens_alone(self) -> None:
        """Invariant 4, for the target and for the slim model in front of it."""
        for generation in getattr(self, "open", {}).values():
            if not generation.steps:
                continue
            committed = generation.context.token_ids.view()[:-1].tolist()
            cache: Any = generation.state.cache
            if isinstance(cache, ToyTieredCache):
                read = cache.slim.token_ids
                assert read == committed[: len(read)]
                cache = cache.target
            assert cache.token_ids == committed

    def teardown(self) -> None:
        for generation in getattr(self, "open", {}).values():
            self.decoder.close(generation)
        drafter = getattr(self, "decoder", None) and self.decoder.cache_drafter
        if isinstance(drafter, SuffixDrafter):
            assert not drafter._active


TestDecoderRequests = DecoderMachine.TestCase
TestDecoderRequests.settings = settings(
    max_examples=40, stateful_step_count=25, suppress_health_check=ANY_SHAPE
)
