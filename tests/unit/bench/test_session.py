"""A whole run on the toy engine, and what is refused before the target is even loaded."""

import json
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from hvd_ray.bench import session
from hvd_ray.bench.session import BenchOptions, run_bench
from hvd_ray.config import Config
from hvd_ray.engines.toy import ToyCodec, ToyEngine
from hvd_ray.errors import UserError
from hvd_ray.parts.find import Sources
from hvd_ray.payoff.cost_file import CostFile, CostKey
from hvd_ray.verify.slim_file import Escalation, SlimFile
from tests.property.toy_requests import HEADLESS_SYSTEMS


class Silent:
    def __init__(self):
        self.stages, self.expected, self.done = [], 0, 0

    def stage(self, text):
        self.stages.append(text)

    def expect(self, total):
        self.expected = total

    def advance(self, done, text):  # noqa: ARG002
        assert done == self.done + 1
        self.done = done


class Promise:
    """Stands for a predictor that expects much of every draft."""

    facts: ClassVar[dict] = {"predictor": "a promise"}
    has_survival = True

    def estimator(self, codec, *, vocab_size):  # noqa: ARG002
        return self

    def expected_length(self, draft, context):  # noqa: ARG002
        return 100.0

    def survival(self, draft, context):  # noqa: ARG002
        return np.ones(len(draft), dtype=np.float32)


def _none(config):  # noqa: ARG001
    raise UserError("no predictor: train one with `hvd train`")


def _no_head(config):  # noqa: ARG001
    raise UserError("no head: train one with `hvd drafter train`")


def _flat_costs(config):  # noqa: ARG001
    key = CostKey(model="toy", dtype="float32", engine="toy", device="none", num_threads=1)
    return CostFile(key=key, rows=(1, 64), verify_ms=(10.0, 20.0))


def _sources(**given):
    found = {"payoff": lambda _: Promise(), "costs": _flat_costs, "head": _no_head}
    return Sources(**found | given)


def _toy(config):  # noqa: ARG001
    return ToyEngine(), ToyCodec()


def _never(*_):
    raise AssertionError("the target was loaded")


def _run(options, *, load_engine=_toy, progress=None, config=None, **sources):
    return run_bench(
        options,
        config or Config(),
        progress=progress or Silent(),
        load_engine=load_engine,
        sources=_sources(**sources),
    )


@pytest.fixture(autouse=True)
def no_checkpoint(monkeypatch):
    """The toy engine has no folder whose weights could be named."""
    monkeypatch.setattr(session, "checkpoint", lambda _: {})


@pytest.fixture
def prompt_file(tmp_path):
    rows = [
        {"id": f"{workload}-{split}-{text}", "prompt": text, "split": split, "workload": workload}
        for workload in ("one", "two")
        for split, text in (("train", "qabcde"), ("test", "rabcde"), ("test", "bcdef"))
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_run_gives_a_row_for_each_workload_system_and_cache_state(prompt_file):
    progress = Silent()
    options = BenchOptions(prompt_files=(prompt_file,), max_tokens=20, cache="both")
    result = _run(options, progress=progress)
    assert progress.done == progress.expected == 2 * 2 * (2 + 5 * 2) + 2
    seen = {(row.workload, row.system, row.cache) for row in result.rows}
    assert len(result.rows) == len(seen) == 2 * (2 + 5 * 2)
    assert ("one", "suffix", "warm") in seen
    assert {row.system for row in result.aggregate} == set(HEADLESS_SYSTEMS)
    assert all(row.identical_to_greedy == 1 for row in result.rows)
    assert all(row.prompts == 2 for row in result.rows)
    assert result.provenance["predictor"] == "a promise"
    assert len(result.provenance["workload_hash"]) == 64
    assert json.dumps(result.as_json(), allow_nan=False)
    assert result.provenance["filling_prompts"] == {"one": 1, "two": 1}


def test_a_bad_line_is_skipped_if_asked_and_named_in_the_notes(prompt_file):
    with prompt_file.open("a") as file:
        file.write("{broken\n")
    number = prompt_file.read_text().count("\n")
    options = BenchOptions(prompt_files=(prompt_file,), max_tokens=5, limit=1, on_bad_line="skip")
    result = _run(options)
    assert any(f"skipped {prompt_file}:{number}: " in note for note in result.notes)


@pytest.mark.parametrize("load", [0.1, 99.0])
def test_a_busy_machine_and_a_disturbed_table_are_told_before_and_after(
    prompt_file, monkeypatch, load
):
    monkeypatch.setattr(session.os, "getloadavg", lambda: (load, 0.0, 0.0))
    costs = _flat_costs(None).model_copy(update={"provenance": {"spread": load / 100}})
    progress = Silent()
    options = BenchOptions(prompt_files=(prompt_file,), max_tokens=5, limit=1)
    result = _run(options, progress=progress, costs=lambda _: costs)
    told = [note for note in result.notes if note.startswith("Careful")]
    assert told == [text for text in progress.stages if text.startswith("Careful")]
    assert len(told) == (2 if load > 1 else 0)
    if told:
        assert "a load of 99.0 on" in told[0]
        assert "the cost table was measured beside other work" in told[1]
    untimed = _run(replace(options, is_timed=False))
    assert not any("a load of" in note for note in untimed.notes)


def test_the_limit_counts_prompts_of_each_workload(prompt_file):
    result = _run(BenchOptions(prompt_files=(prompt_file,), max_tokens=5, limit=1))
    assert all(row.prompts == 1 for row in result.rows)
    assert {row.workload for row in result.rows} == {"one", "two"}


def test_without_a_predictor_its_systems_are_left_out_and_that_is_said(prompt_file):
    options = BenchOptions(prompt_files=(prompt_file,), max_tokens=5)
    result = _run(options, payoff=_none)
    without = {"hvd_tau", "hvd_cost"}
    assert {row.system for row in result.rows} == set(HEADLESS_SYSTEMS) - without
    for system in without:
        assert any(f"{system} left out" in note for note in result.notes)


def test_asking_for_a_system_whose_predictor_is_missing_is_refused(prompt_file):
    options = BenchOptions(prompt_files=(prompt_file,), systems=("hvd_tau",))
    with pytest.raises(UserError, match="hvd train"):
        _run(options, load_engine=_never, payoff=_none)


def test_a_predictor_that_was_named_and_cannot_be_had_is_refused(prompt_file):
    config = Config.model_validate({"policy": {"predictor": "nowhere"}})
    options = BenchOptions(prompt_files=(prompt_file,))
    with pytest.raises(UserError, match="hvd train"):
        _run(options, load_engine=_never, payoff=_none, config=config)


def test_a_float32_output_that_differs_is_called_a_fault(prompt_file):
    """The toy engine is float32: a system with another target must not pass unnoticed."""
    real = session.build_decoder

    def build_decoder(system, *, engine, **rest):
        return real(system, engine=ToyEngine(seed=7) if system == "ngram" else engine, **rest)

    options = BenchOptions(
        prompt_files=(prompt_file,), systems=("ngram", "suffix"), max_tokens=20, limit=1
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "build_decoder", build_decoder)
        result = _run(options)
    faults = [note for note in result.notes if note.startswith("NOT EXACT")]
    assert len(faults) == 2
    assert all("ngram" in fault for fault in faults)


def test_the_shipped_workloads_are_the_default():
    assert {prompt.workload for prompt in BenchOptions().load().prompts} >= {
        "doc_edit",
        "open_chat",
    }


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"limit": 0}, "--limit must be 1 or more, got 0"),
        ({"max_tokens": 0}, "--max-tokens must be 1 or more, got 0"),
        ({"temperature": -1.0}, "--temperature must be 0 or more"),
        ({"temperature": float("nan")}, "--temperature must be 0 or more"),
        ({"cache": "lukewarm"}, "--cache must be one of cold, warm, both"),
        ({"engine": "llama"}, "not supported: engine 'llama'"),
        ({"concurrency": 0}, "--concurrency must be 1 or more, got 0"),
        ({"concurrency": 8}, "not supported: --concurrency with the torch engine"),
        ({"systems": ("warp",)}, r"'warp'.*greedy, ngram"),
        ({"systems": ("suffix", "eagle3_tree+nested")}, "not supported: trees behind nested: "),
        ({"workloads": ("doc_edit",), "prompt_files": ("p",)}, "not both"),
    ],
)
def test_options_that_cannot_be_met_are_refused_in_one_line(flags, message):
    with pytest.raises(UserError, match=message) as caught:
        BenchOptions(**flags)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"workloads": ("nonsense",)}, r"'nonsense'.*doc_edit"),
        ({"systems": ()}, "no system"),
        ({"systems": ("suffix", "suffix")}, "named twice"),
    ],
)
def test_nothing_is_loaded_for_a_request_that_cannot_be_met(flags, message):
    with pytest.raises(UserError, match=message):
        _run(BenchOptions(**flags), load_engine=_never)


def _slim(config):  # noqa: ARG001
    curve = Escalation(theta=(0.5, 0.9), escalated=(0.4, 0.7))
    return SlimFile(
        model="toy",
        num_layers=4,
        skipped_attention=(1, 2),
        skipped_mlp=(1, 2),
        method="dp",
        escalation=curve,
    )


def _costs_with_slim(config):
    times = {"slim": _slim(config).key, "slim_ms": (9.0, 18.0)}
    return _flat_costs(config).model_copy(update=times)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (_flat_costs, "was not measured; run `hvd calibrate`"),
        (
            _costs_with_slim,
            r"cannot pay here: .* = 0\.90, P.escalate. 0\.40, sum 1\.30 >= 1; use a system",
        ),
    ],
)
def test_tiers_that_cannot_pay_are_refused_before_anything_is_loaded(costs, message):
    options = BenchOptions(systems=("suffix", "tiered"))
    with pytest.raises(UserError, match=message):
        _run(options, load_engine=_never, slim=_slim, costs=costs)
    forced = Config.model_validate({"tiers": {"is_forced": True}})
    with pytest.raises(AssertionError, match="the target was loaded"):
        _run(options, load_engine=_never, slim=_slim, costs=costs, config=forced)


def test_an_absent_cost_table_is_found_before_a_predictor_is_looked_for():
    def absent(_config):
        raise UserError("no cost table; type `hvd calibrate`")

    with pytest.raises(UserError, match="system 'hvd_cost': no cost table"):
        _run(
            BenchOptions(systems=("suffix", "hvd_cost")),
            load_engine=_never,
            costs=absent,
            payoff=_never,
        )


def test_tiers_behind_sampled_drafts_are_refused_before_anything_is_loaded(tmp_path):
    settings = {"tiers": {"is_forced": True}, "drafting": {"eagle3": {"is_sampled": True}}}
    with pytest.raises(UserError, match="biases tiers"):
        _run(
            BenchOptions(systems=("eagle3", "tiered")),
            load_engine=_never,
            config=Config.model_validate(settings),
            slim=_slim,
            head=lambda _: tmp_path,
        )


def test_a_bad_prompt_is_named_by_file_and_line(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "abc"}\n{"prompt": ""}\n')
    with pytest.raises(UserError, match=r"prompts\.jsonl:2.*empty"):
        _run(BenchOptions(prompt_files=(path,)), load_engine=_never)


def test_a_prompt_over_the_context_stops_the_run_before_it_starts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "abc" * 400}) + "\n")
    with pytest.raises(UserError, match=r"prompts\.jsonl:1.*1200 tokens"):
        _run(BenchOptions(prompt_files=(path,)))
