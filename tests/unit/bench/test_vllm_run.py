"""The comparison of vLLM engines, on stand-ins for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hvd_ray.bench import vllm_engines, vllm_run
from hvd_ray.bench.cells import workload_rows
from hvd_ray.bench.engine_process import Answer
from hvd_ray.bench.plan import Plan, Question, choose_arms
from hvd_ray.bench.vllm_engines import Wave, engine_arguments, predictor_facts
from hvd_ray.bench.vllm_run import Load, measure_in_vllm, run_loads
from hvd_ray.bench.workloads import Prompt
from hvd_ray.config import Config, load_config
from hvd_ray.errors import NotSupportedError
from hvd_ray.paper.samples import SampleFolder
from hvd_ray.types import Request, SamplingParams, Source, Step

CALLS: list[tuple[str, Any]] = []


class FakeEngine:
    def __init__(self, name: str, answer: Answer) -> None:
        self.name = name
        self.answer = answer

    def start(self) -> None:
        CALLS.append((self.name, "start"))

    def wait_ready(self) -> None:
        CALLS.append((self.name, "ready"))

    def reset(self) -> None:
        CALLS.append((self.name, "reset"))

    def close(self) -> None:
        CALLS.append((self.name, "close"))

    def serve(self, requests: Sequence[Request]) -> tuple[float, list[Answer]]:
        CALLS.append((self.name, [request.request_id for request in requests]))
        return 2.0, [self.answer for _ in requests]


PLAIN = Answer((1, 2, 3, 4), (1, 1, 1, 1), (), "length")
DRAFTED = Answer((1, 2, 3, 4), (1, 2, 1), ((3, 1), (2, 0)), "length")


@pytest.fixture(autouse=True)
def no_calls() -> None:
    CALLS.clear()


def plan_of(*systems: str, prompts: int = 3) -> Plan:
    questions = tuple(
        Question(
            Prompt(f"p{i}", "w", "f", f"s{i}", None, (), None, (5, 6), (), "here"),
            Request(f"w/p{i}", (5, 6), SamplingParams(max_tokens=4)),
        )
        for i in range(prompts)
    )
    return Plan(choose_arms(systems, ("cold",)), {"w": questions}, {})


def test_systems_take_turns_wave_by_wave() -> None:
    plan = plan_of("greedy", "suffix")
    engines = {"greedy": FakeEngine("greedy", PLAIN), "suffix": FakeEngine("suffix", DRAFTED)}
    told: list[str] = []
    samples = measure_in_vllm(plan, engines=engines, wave=Wave(2), on_request=told.append)
    served = [(name, call) for name, call in CALLS if isinstance(call, list)]
    assert served[2:] == [
        ("greedy", ["w/p0", "w/p1"]),
        ("suffix", ["w/p0", "w/p1"]),
        ("suffix", ["w/p2"]),
        ("greedy", ["w/p2"]),
    ]
    assert [name for name, call in CALLS if call == "reset"] == ["greedy", "suffix"]
    assert len(told) == plan.num_requests
    assert [s.seconds for s in samples] == [1.0, 1.0, 1.0, 1.0, 2.0, 2.0]


def test_passes_and_drafts_become_rows() -> None:
    plan = plan_of("suffix")
    engines = {"greedy": FakeEngine("greedy", PLAIN), "suffix": FakeEngine("suffix", DRAFTED)}
    samples = measure_in_vllm(plan, engines=engines, wave=Wave(1), on_request=lambda _: None)
    rows = {r.system: r for r in workload_rows(samples, engine="vllm", dtype="float32", seed=0)}
    assert rows["greedy"].target_passes == 12
    assert rows["suffix"].target_passes == 9
    assert (rows["suffix"].drafted, rows["suffix"].accepted) == (15, 3)
    assert rows["suffix"].identical_to_greedy == 1.0


def test_an_output_that_differs_is_found() -> None:
    other = Answer((1, 2, 9, 4), (1, 3), ((3, 2),), "length")
    engines = {"greedy": FakeEngine("greedy", PLAIN), "suffix": FakeEngine("suffix", other)}
    samples = measure_in_vllm(
        plan_of("suffix", prompts=1), engines=engines, wave=Wave(1), on_request=lambda _: None
    )
    found = {sample.arm.system: sample.difference for sample in samples}
    assert found["greedy"] is None
    assert found["suffix"] is not None
    assert found["suffix"].position == 2


def test_a_draft_of_which_nothing_was_accepted_is_a_pass_of_one_token() -> None:
    steps = list(vllm_run._steps(DRAFTED, Source.SUFFIX))
    assert [(s.drafted, s.accepted, s.emitted) for s in steps] == [(0, 0, 1), (3, 1, 2), (2, 0, 1)]
    assert [s.source for s in steps] == [Source.NONE, Source.SUFFIX, Source.SUFFIX]


def test_engines_are_ended_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engines, "engine_arguments", lambda system, *_: {"system": system})

    class Broken(FakeEngine):
        def wait_ready(self) -> None:
            if self.name == "suffix":
                raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        run_loads(
            [Load(plan_of("suffix"))],
            Config(),
            max_model_len=64,
            progress=Silent(),
            open_engine=lambda arguments: Broken(arguments["system"], PLAIN),
        )
    assert sorted(name for name, call in CALLS if call == "close") == ["greedy", "suffix"]


def test_engines_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would take nearly all of it, and the second would not start."""
    monkeypatch.setattr(vllm_engines, "engine_arguments", lambda system, *_: {"system": system})
    shares: list[float] = []

    def open_engine(arguments: dict[str, Any]) -> FakeEngine:
        shares.append(arguments["gpu_memory_utilization"])
        return FakeEngine(arguments["system"], PLAIN)

    run_loads(
        [Load(plan_of("ngram", "suffix"))],
        Config(),
        max_model_len=64,
        progress=Silent(),
        open_engine=open_engine,
    )
    assert shares == [0.3] * 3


class Silent:
    def stage(self, text: str) -> None: ...

    def expect(self, total: int) -> None: ...

    def advance(self, done: int, text: str) -> None: ...


def test_a_system_without_a_place_in_vllm_is_refused() -> None:
    arms = choose_arms(["greedy"], ("cold",))
    plan = Plan((*arms, type(arms[0])("tiered", "cold")), plan_of("greedy").measured, {})
    with pytest.raises(NotSupportedError, match="tiered"):
        run_loads([Load(plan)], Config(), max_model_len=64, progress=Silent())


def test_each_system_has_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engines, "head_folder", lambda _: tmp_path)
    monkeypatch.setattr(vllm_engines, "_predictor", lambda _: "own")
    monkeypatch.setattr(
        vllm_engines, "resolve_model", lambda _: type("M", (), {"path_or_id": "target"})()
    )
    config = load_config(None, ["tracking.uri=none"])
    made = {s: engine_arguments(s, config, Wave(8)) for s in vllm_engines.SYSTEMS}
    assert "speculative_config" not in made["greedy"]
    assert made["ngram"]["speculative_config"]["method"] == "ngram"
    assert made["suffix"]["speculative_config"] == {
        "method": "suffix",
        "num_speculative_tokens": vllm_engines.MAX_DRAFT_TOKENS,
    }
    assert made["eagle3"]["speculative_config"]["num_speculative_tokens"] == 4
    assert "additional_config" not in made["eagle3"]
    section = made["hvd_cost"]["additional_config"]["hvd"]
    assert (section["policy"], section["payoff"]) == ("cost", "own")
    assert {arguments["max_num_seqs"] for arguments in made.values()} == {8}


def test_the_result_names_the_predictor_that_the_engines_were_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = load_config(None, ["tracking.uri=none"])
    assert predictor_facts({"greedy", "eagle3", "rule_match"}, config) == {}
    found = predictor_facts({"greedy", "hvd_cost"}, config)
    assert found["predictor"] == "shipped for smollm2-135m"
    monkeypatch.setattr(vllm_engines, "_predictor", lambda _: "own")
    assert predictor_facts({"hvd_tau"}, config) == {"predictor": "the cache's own estimate"}


def engines_of(**answers: Answer) -> dict[str, FakeEngine]:
    return {name: FakeEngine(name, answer) for name, answer in answers.items()}


def test_what_the_store_holds_is_not_measured_again(tmp_path: Path) -> None:
    store, plan = SampleFolder(tmp_path), plan_of("greedy", "suffix")
    first = measure_in_vllm(
        plan,
        engines=engines_of(greedy=PLAIN, suffix=DRAFTED),
        wave=Wave(2),
        on_request=lambda _: None,
        store=store,
    )
    CALLS.clear()
    again = measure_in_vllm(
        plan, engines={}, wave=Wave(2), on_request=lambda _: pytest.fail("asked"), store=store
    )
    assert CALLS == []
    assert sorted(map(repr, again)) == sorted(map(repr, first))
    assert {s.prompt.id: s.wave for s in again} == {"p0": 0, "p1": 0, "p2": 1}


def test_a_wave_that_was_cut_short_is_measured_whole_and_memories_catch_up(tmp_path: Path) -> None:
    store, plan = SampleFolder(tmp_path), plan_of("greedy", "suffix", prompts=4)
    arguments: dict[str, Any] = {"wave": Wave(2), "on_request": lambda _: None, "store": store}
    measure_in_vllm(plan, engines=engines_of(greedy=PLAIN, suffix=DRAFTED), **arguments)
    store._file("w", "p3").unlink()
    assert vllm_run.num_missing(plan, 2, store) == 4
    CALLS.clear()
    measure_in_vllm(plan, engines=engines_of(greedy=PLAIN, suffix=DRAFTED), **arguments)
    served = [(name, call) for name, call in CALLS if isinstance(call, list)]
    assert served[2:] == [
        ("suffix", ["w/p0", "w/p1"]),  # not measured: what its cache would have seen
        ("suffix", ["w/p2", "w/p3"]),
        ("greedy", ["w/p2", "w/p3"]),
    ]


def test_no_engine_is_started_where_nothing_is_missing(tmp_path: Path) -> None:
    store, plan = SampleFolder(tmp_path), plan_of("greedy")
    measure_in_vllm(
        plan, engines=engines_of(greedy=PLAIN), wave=Wave(1), on_request=lambda _: None, store=store
    )
    runs = run_loads(
        [Load(plan, 1, store)],
        Config(),
        max_model_len=64,
        progress=Silent(),
        open_engine=lambda _: pytest.fail("started"),
    )
    assert [len(samples) for samples in runs] == [3]


def test_intervals_are_drawn_over_waves_where_requests_share_their_time() -> None:
    engines = engines_of(greedy=PLAIN, suffix=DRAFTED)
    plan = plan_of("suffix", prompts=6)
    for size, unit in ((1, "session"), (2, "wave")):
        samples = measure_in_vllm(plan, engines=engines, wave=Wave(size), on_request=lambda _: None)
        rows = workload_rows(samples, engine="vllm", dtype="float32", seed=0)
        assert {row.ci_unit for row in rows} == {unit}


def test_what_the_plugin_tells_of_its_cycles_is_taken_at_its_word() -> None:
    told = (Step(0, 0, Source.NONE, 0, 0, 1), Step(1, 1, Source.EAGLE3, 4, 2, 3))
    answer = Answer((1, 2, 3, 4), (1, 3), ((4, 2),), "length", told)
    samples = measure_in_vllm(
        plan_of("hvd_cost", prompts=1),
        engines=engines_of(greedy=PLAIN, hvd_cost=answer),
        wave=Wave(1),
        on_request=lambda _: None,
    )
    rows = {r.system: r for r in workload_rows(samples, engine="vllm", dtype="float32", seed=0)}
    assert rows["hvd_cost"].source_share == {"eagle3": 0.5, "none": 0.5}
    assert rows["greedy"].source_share == {"none": 1.0}
