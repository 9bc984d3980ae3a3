"""The parts of an advice: acceptance, roles, walk, systems, filling, verdict, recommendation."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from hvd_ray.advise.acceptance import (
    ASSUMED,
    assumed_acceptance,
    measured_acceptance,
    parse_acceptance,
)
from hvd_ray.advise.contestants import Contestant, Field, contestants
from hvd_ray.advise.filling import filling_of
from hvd_ray.advise.judging import ALL, Row, judge
from hvd_ray.advise.loading import load_points
from hvd_ray.advise.lookups import walk
from hvd_ray.advise.material import deal_roles, read_traffic
from hvd_ray.advise.options import AdviceOptions
from hvd_ray.advise.recommend import HEAD, MODEL, PREDICTOR, Setting, recommend, servable
from hvd_ray.advise.sources import find_costs_for
from hvd_ray.advise.terminal import advised_lines
from hvd_ray.advise.verdict import WorkloadVerdict, doubts_about, verdict_of
from hvd_ray.config import Config, SuffixConfig
from hvd_ray.drafting.suffix import SuffixDrafter
from hvd_ray.engines.toy import ToyCodec
from hvd_ray.errors import UserError
from hvd_ray.payoff.cost import RowCosts
from hvd_ray.payoff.cost_by_hand import named
from hvd_ray.payoff.cost_file import CostFile, CostKey
from hvd_ray.payoff.cost_load import LoadedCosts
from hvd_ray.payoff.cost_policy import CostPolicy
from hvd_ray.payoff.features import FeatureExtractor
from hvd_ray.payoff.policy import AlwaysCache
from hvd_ray.payoff.token_classes import TokenClasses
from hvd_ray.serving.settings import serve_config
from hvd_ray.traces.replay import replay as replay_trace
from hvd_ray.traces.replay import summarize
from hvd_ray.traces.store import write_traces
from hvd_ray.types import Decision, Source, Step
from hvd_ray.vllm_plugin.options import check_head, read_options
from tests.unit.tuning.test_pieces import Many

CONFIG = Config()
COSTS = LoadedCosts(RowCosts((1, 64), (10.0, 10.0)))


@pytest.fixture(scope="module")
def walked(traffic):
    roles = deal_roles(
        traffic, sides="test", is_learning=True, judged_tokens=10_000, learned_tokens=10_000
    )
    extractor = FeatureExtractor(TokenClasses.from_codec(ToyCodec(), 5000))
    return walk(traffic, roles, suffix=SuffixConfig(), extractor=extractor, on_trace=lambda _: None)


# -- acceptance --------------------------------------------------------------------------------


def test_the_assumption_is_the_prior_of_the_cost_policy():
    assert CostPolicy(None, None).model_acceptance == ASSUMED


def test_drawn_acceptance_has_the_chances_it_was_given(traffic):
    head = parse_acceptance("0.8,0.5")
    accepted = np.concatenate([head.drafts(t, seed=1).accepted_len_T for t in traffic * 3])
    assert (accepted >= 1).mean() == pytest.approx(0.8, abs=0.03)
    assert (accepted >= 2).mean() == pytest.approx(0.4, abs=0.03)
    assert head.emitted_per_pass == pytest.approx(2.2)
    again = head.drafts(traffic[0], seed=1).accepted_len_T
    assert (again == head.drafts(traffic[0], seed=1).accepted_len_T).all()


def test_measured_acceptance_counts_conditional_chances():
    def step(drafted, accepted, source=Source.EAGLE3):
        return Step(0, 0, source, drafted, accepted, accepted + 1)

    steps = [[step(2, 2), step(2, 1), step(2, 0)], [step(1, 1), step(5, 5, Source.SUFFIX)]]
    head = measured_acceptance(steps, basis="here")
    assert head.chances == (0.75, 0.5)
    assert not head.is_assumed
    with pytest.raises(UserError, match="eagle3"):
        measured_acceptance([[step(5, 5, Source.SUFFIX)]], basis="here")


@pytest.mark.parametrize("text", ["", "high", "0.5,1.2", "0.5,-1", ",".join(["0.5"] * 65)])
def test_what_is_no_chance_is_refused(text):
    with pytest.raises(UserError, match="--eagle3"):
        parse_acceptance(text)


# -- who learns and who judges -----------------------------------------------------------------


def test_sessions_are_whole_and_every_workload_has_its_share(traffic):
    roles = deal_roles(
        traffic, sides="test", is_learning=True, judged_tokens=500, learned_tokens=200
    )
    assert not roles.judged & roles.learning
    for chosen, split in ((roles.judged, "test"), (roles.learning, "train")):
        mine = [t for t in traffic if t.trace_id in chosen]
        assert {t.split for t in mine} == {split}
        assert {t.workload for t in mine} == {"tools", "chat"}
        assert len(mine) == 3 * len({t.session_id for t in mine})
    num_judged = sum(len(t.output_token_ids) for t in traffic if t.trace_id in roles.judged)
    assert 500 <= num_judged < 900


def test_a_log_without_two_sides_teaches_nothing(traffic):
    train = [t for t in traffic if t.split == "train"]
    budgets = {"judged_tokens": 100, "learned_tokens": 100}
    with pytest.raises(UserError, match="--predictor none --split all"):
        deal_roles(train, sides="test", is_learning=True, **budgets)
    assert deal_roles(train, sides="all", is_learning=False, **budgets).judged


class Silent:
    def stage(self, text): ...
    def expect(self, total, *, unit=None): ...
    def advance(self, done, text): ...


def read(*places):
    return read_traffic(
        places, tokenizer="toy", import_settings={}, cut_loops=True, progress=Silent()
    )


def test_a_folder_of_traces_is_read_as_it_is(traffic, tmp_path):
    loop = replace(traffic[0], trace_id="loop", output_token_ids=(1, 2, 3) * 40)
    failed = replace(traffic[0], trace_id="failed", output_token_ids=(), error="no answer")
    write_traces([*traffic, loop, failed], tmp_path / "run" / "traces" / "p0.parquet")
    found = read(tmp_path / "run")
    assert [t.trace_id for t in found.traces if t.trace_id != "loop"] == [
        t.trace_id for t in traffic
    ]
    assert found.facts["traces_failed"] == 1
    assert found.facts["traces_looping"] == 1
    (cut,) = [t for t in found.traces if t.trace_id == "loop"]
    assert len(cut.output_token_ids) < 20


def test_logs_and_traces_are_not_mixed(traffic, tmp_path):
    write_traces(traffic, tmp_path / "traces" / "p0.parquet")
    (tmp_path / "log.jsonl").write_text("{}")
    with pytest.raises(UserError, match="one kind"):
        read(tmp_path, tmp_path / "log.jsonl")
    others = [replace(t, tokenizer_sha="other") for t in traffic[:1]]
    write_traces(others, tmp_path / "traces" / "p1.parquet")
    with pytest.raises(UserError, match="several tokenizers"):
        read(tmp_path)


# -- the walk and the systems ------------------------------------------------------------------


class Half:
    """Half of every draft, as no rule does."""

    def decide(self, candidates, context):  # noqa: ARG002
        draft = candidates.cache
        return (
            Decision(draft.source, len(draft) // 2) if len(draft) > 1 else Decision(Source.NONE, 0)
        )


@pytest.mark.parametrize(
    ("policy", "config"), [(AlwaysCache(), SuffixConfig().for_rules()), (Half(), SuffixConfig())]
)
def test_recorded_look_ups_replay_as_the_cache_itself_would(walked, traffic, policy, config):
    judged = {item.trace.trace_id for item in walked.judged}
    drafter = SuffixDrafter(config)
    live = [replay_trace(t, policy, drafter=drafter) for t in traffic]
    expected = [run.steps for run in live if run.trace_id in judged]
    system = Contestant("suffix", policy)
    found = Field(walked.judged, None, Config()).replays(system, COSTS)
    assert [run.steps for run in found] == expected


def test_rows_hold_what_the_replays_say_and_the_oracle_leads(walked):
    head = assumed_acceptance()
    field = Field(walked.judged, head, Config())
    traces = [item.trace for item in walked.judged]
    rows: list[Row] = []
    for system in contestants(Config(), estimator=None, costs=COSTS, head=head):
        replays = field.replays(system, COSTS)
        rows += judge(system, replays, traces, costs=COSTS, is_assumed=False, seed=0)
        whole = next(r for r in rows if (r.system, r.workload) == (system.name, ALL))
        assert whole.emitted_per_pass == pytest.approx(summarize(replays).emitted_per_pass)
        assert whole.speedup == pytest.approx(whole.emitted_per_pass), "every pass costs the same"
    by_name = {row.system: row for row in rows if row.workload == "tools"}
    assert by_name["greedy"].speedup == pytest.approx(1)
    assert by_name["suffix"].speedup > 2
    assert by_name["oracle"].speedup >= by_name["suffix"].speedup
    assert by_name["oracle+head"].speedup >= by_name["rule_match+head"].speedup
    low, high = by_name["suffix"].speedup_ci
    assert low < by_name["suffix"].speedup < high


def test_the_cache_fills_and_a_larger_one_is_no_worse(walked, traffic):
    suffix = Contestant("suffix", AlwaysCache())
    with_all = Field(walked.judged, None, Config()).replays(suffix, COSTS)
    filling = filling_of(traffic, walked.judged, with_all=with_all, suffix=SuffixConfig())
    apart = filling_of(
        traffic, walked.judged, with_all=with_all, suffix=SuffixConfig(), workers=Many(3)
    )
    assert apart == filling
    assert filling.caps[0].max_cached_tokens == 1
    assert filling.caps[-1].emitted_per_pass > filling.caps[0].emitted_per_pass
    assert filling.history_gain > 1
    assert filling.caps[0].emitted_per_pass < filling.caps[-1].emitted_per_pass
    first = filling.fills[0]
    assert (first.outputs_from, first.requests) == (0, 1)
    assert first.emitted_per_pass == first.emitted_with_empty_cache, "nothing is cached yet"
    assert sum(point.requests for point in filling.fills) == len(walked.judged)


def test_the_gain_shrinks_as_concurrency_grows(walked):
    suffix = Contestant("suffix", AlwaysCache())
    replays = Field(walked.judged, None, Config()).replays(suffix, COSTS)
    table = RowCosts((1, 32, 64), (10.0, 10.0, 20.0))
    points = load_points(
        [(suffix, replays)], table, redecided=lambda _: [], is_assumed=lambda _: False
    )
    gains = [round(point.speedup, 9) for point in points]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 1.3 > gains[-1]
    assert points[-1].is_beyond_table
    assert not points[0].is_beyond_table


# -- the verdict -------------------------------------------------------------------------------


def row(system, speedup, ci, *, workload=ALL, uses_head=False) -> Row:
    return Row(
        workload, system, uses_head, uses_head, 9, 9, 900, 300, speedup, ci, speedup, ci,
        "session", 0, 0, {"none": 1.0}, None, None,
    )  # fmt: skip


def test_it_can_say_that_it_will_not_help():
    rows = [row("greedy", 1, (1, 1)), row("suffix", 1.05, (1.01, 1.09)), row("oracle", 3, (2, 4))]
    verdict = verdict_of(rows, concurrency=8, head_is_at_hand=False, prices="known")
    assert verdict.overall.kind == "will not help"
    assert verdict.lines[0].startswith("It will not help you")
    assert "concurrency 8" in verdict.lines[0]


def test_the_simplest_of_the_best_is_advised_and_assumed_heads_are_not():
    rows = [
        row("greedy", 1, (1, 1)),
        row("suffix", 1.99, (1.7, 2.3)),
        row("hvd_cost", 2.0, (1.7, 2.3)),
        row("hvd_cost+head", 2.6, (2.0, 3.0), uses_head=True),
    ]
    verdict = verdict_of(rows, concurrency=1, head_is_at_hand=False, prices="known")
    assert (verdict.overall.kind, verdict.overall.system) == ("helps", "suffix")
    assert any("hvd_cost+head to 2.60x" in line for line in verdict.lines)
    measured = verdict_of(rows, concurrency=1, head_is_at_hand=True, prices="known")
    assert measured.overall.system == "hvd_cost+head"


@pytest.mark.parametrize("ci", [None, (0.9, 3.0)])
def test_without_evidence_it_may_help(ci):
    verdict = judged_alone(row("suffix", 1.8, ci))
    assert verdict.overall.kind == "may help"
    assert verdict.lines[0].startswith("It may help, the log is too short to say: suffix is 1.80x")


@pytest.mark.parametrize("ci", [None, (0.9, 1.1), (0.8, 1.5)])
def test_without_evidence_a_negative_is_as_unproven(ci):
    verdict = judged_alone(row("suffix", 1.0, ci))
    assert verdict.overall.kind == "too short to say"
    assert verdict.lines[0].startswith("The log is too short to say: the best system, suffix, is")
    assert judged_alone(row("suffix", 1.0, (0.9, 1.09))).overall.kind == "will not help"


def test_passes_saved_are_told_as_an_upper_bound():
    verdict = judged_alone(row("suffix", 3.31, (3.1, 3.5)), prices="none")
    assert (verdict.overall.kind, verdict.is_upper_bound) == ("may help", True)
    assert verdict.lines[0] == (
        "It may help: suffix needs 3.31x (3.10-3.50) fewer passes than plain decoding, and is at "
        "most that much faster (no cost table)."
    )
    assert verdict.as_json()["is_upper_bound"] is True
    no = judged_alone(row("suffix", 1.01, (1.0, 1.02)), prices="none")
    assert no.lines[0].startswith("It will not help you")
    assumed = judged_alone(row("suffix", 3.31, (3.1, 3.5)), prices="assumed")
    assert "concurrency 1, by assumed costs." in assumed.lines[0]


def test_a_log_of_copies_or_of_a_few_words_is_doubted():
    copies, few = [[(1, 2, 3)]] * 30, [[(k, 2, 3)] for k in range(30)]
    assert [line.split(",")[0] for line in doubts_about(few)] == [
        "Judged on 90 tokens in 30 answers"
    ]
    assert doubts_about(copies)[1].startswith("29 of 30 judged sessions repeat the answers")
    long = [[tuple(range(k, k + 90))] for k in range(30)]
    assert doubts_about(long) == []
    verdict = judged_alone(row("suffix", 3.0, (2.9, 3.1)), doubts=doubts_about(copies))
    assert verdict.lines[1].startswith("Judged on 90 tokens")


def test_a_load_needs_a_cost_table(monkeypatch):
    monkeypatch.setattr("hvd_ray.parts.costs.find_costs", no_costs)
    for costs in (None, "pass"):
        options = AdviceOptions((), costs=costs, concurrency=8)
        with pytest.raises(UserError, match="--concurrency 8 needs a cost table"):
            find_costs_for(options, Config())
        found, lacking = find_costs_for(replace(options, concurrency=1), Config())
        assert found is None
        assert lacking == ("--costs pass asked for none" if costs else "none of smollm2-135m")


def test_costs_that_something_disturbed_are_doubted():
    key = CostKey(model="m", dtype="float32", engine="torch", device="cpu", num_threads=2)
    table = {"key": key, "rows": (1, 2), "verify_ms": (1.0, 2.0)}
    assert named(CostFile(**table, provenance={"spread": 0.2})).doubt is None
    doubt = named(CostFile(**table, provenance={"spread": 0.31})).doubt
    assert "measured beside other work (repeats 31 % apart)" in doubt.replace("31%", "31 %")
    assert "`hvd calibrate dtype=float32` with nothing else running" in doubt


def test_a_head_that_is_not_worth_it_is_told_with_the_bar():
    with_head = row("hvd_cost+head", 1.6, (1.5, 1.7), uses_head=True)
    lines = verdict_of(
        [row("suffix", 1.5, (1.4, 1.6)), with_head],
        concurrency=1,
        head_is_at_hand=False,
        prices="known",
    ).lines
    assert lines[-1].endswith("reaches 1.60x, less than 1.1 times suffix's.")


def no_costs(config):
    raise UserError(f"none of {config.model}")


def judged_alone(found, *, prices="known", doubts=()):
    return verdict_of([found], concurrency=1, head_is_at_hand=False, prices=prices, doubts=doubts)


def test_workloads_are_told_apart():
    rows = [
        row("suffix", 1.5, (1.2, 1.9)),
        row("suffix", 2.0, (1.5, 2.5), workload="tools"),
        row("suffix", 1.0, (0.9, 1.05), workload="maths"),
        row("suffix", 1.0, None, workload="chat"),
        row("suffix", 1.2, None, workload="code"),
    ]
    lines = verdict_of(rows, concurrency=1, head_is_at_hand=False, prices="known").lines
    assert "It helps on tools (suffix 2.00x)." in lines
    assert "It will not help on maths (suffix 1.00x)." in lines
    assert "The log is too short to say for chat (suffix 1.00x)." in lines
    assert "It may help, too little is known of code (suffix 1.20x)." in lines
    lines = verdict_of(rows, concurrency=1, head_is_at_hand=False, prices="none").lines
    assert "It may help on tools (suffix 2.00x)." in lines


# -- what to type ------------------------------------------------------------------------------


def advised(system, kind="helps", *, interval=(1.5, 2.5), config=CONFIG, model="ORG/NAME"):
    setting = Setting(config, model, None, None, 32_000, 80.0, 4)
    return recommend(WorkloadVerdict(ALL, kind, system, 2.0, interval), setting)


def test_stock_systems_need_no_plugin():
    found = advised("suffix")
    assert found.speculative_config["method"] == "suffix"
    assert found.speculative_config["suffix_decoding_max_cached_requests"] == 400
    assert found.additional_config is None
    assert found.placeholders == ()
    assert advised("ngram").speculative_config["prompt_lookup_max"] == 5


def test_ours_go_through_the_plugin_and_name_what_is_missing():
    found = advised("hvd_cost+head")
    assert found.speculative_config["method"] == "eagle3"
    section = found.additional_config["hvd"]
    assert (section["policy"], section["eagle3_tokens"]) == ("cost", 4)
    assert section["cache"] == {"max_cached_tokens": 32_000}
    assert set(found.placeholders) == {HEAD, PREDICTOR}
    assert "head: HEAD_FOLDER" in found.serve_yaml
    assert "import_path: hvd_ray.serving.app:build" in found.serve_yaml
    assert "max_cached_tokens: 32000" in found.serve_yaml


@pytest.mark.parametrize(
    "system",
    ["suffix", "ngram", "rule_match", "rule_score", "hvd_tau", "hvd_cost", "hvd_cost+head"],
)
def test_what_is_advised_is_what_serve_and_the_plugin_take(system):
    found = advised(system)
    (application,) = yaml.safe_load(found.serve_yaml)["applications"]
    assert serve_config(application["args"]).policy.name == system.removesuffix("+head")
    options = read_options(found.additional_config)
    if found.additional_config is not None:
        assert options.system == system.removesuffix("+head")
        check_head(options, has_head=system.endswith("+head"), num_speculative_tokens=32)


def test_nothing_is_turned_on_where_it_does_not_help():
    found = advised("suffix", kind="will not help")
    assert found.speculative_config is None
    assert found.vllm_command == "vllm serve ORG/NAME"


@pytest.mark.parametrize(
    ("kind", "interval"),
    [("too short to say", (1.5, 2.5)), ("may help", None), ("may help", (0.9, 2.5))],
)
def test_a_log_that_is_too_short_gets_no_configuration(kind, interval):
    found = advised("suffix", kind=kind, interval=interval)
    assert (found.vllm_command, found.serve_yaml) == ("", "")
    assert advised_lines(found, Path("a.html")) == [
        "Advice: none, the log is too short to say; give a longer one."
    ]


def test_the_cache_that_is_advised_is_the_one_that_was_replayed():
    suffix = {"max_spec_factor": 2.0, "rule_spec_factor": 1.5, "min_token_prob": 0.2}
    config = Config(drafting={"suffix": suffix})
    ours = advised("hvd_cost", config=config)
    assert ours.speculative_config == {"method": "suffix", "num_speculative_tokens": 32}
    options = read_options(ours.additional_config)
    replayed = config.drafting.suffix.model_copy(update={"max_cached_tokens": 32_000})
    assert options.cache == replayed
    (application,) = yaml.safe_load(ours.serve_yaml)["applications"]
    assert serve_config(application["args"]).drafting.suffix == replayed
    theirs = advised("suffix", config=config).speculative_config
    assert theirs["suffix_decoding_max_spec_factor"] == 1.5
    assert theirs["suffix_decoding_min_token_prob"] == 0.2


def test_a_model_that_nobody_named_is_put_in_by_the_reader(tmp_path):
    assert servable("smollm2-135m") is None
    assert servable("ORG/NAME") == "ORG/NAME"
    assert servable(str(tmp_path)) is None, "a tokenizer alone"
    (tmp_path / "model.safetensors").touch()
    assert servable(str(tmp_path)) == str(tmp_path)
    found = advised("hvd_cost", model=None)
    assert found.vllm_command.startswith("vllm serve MODEL ")
    assert set(found.placeholders) == {MODEL, PREDICTOR}
    assert any("hvd calibrate" in line for line in advised_lines(found, None))


def test_the_terminal_says_where_the_serve_yaml_is():
    shown = advised_lines(advised("hvd_cost"), Path("answer.html"))
    assert shown[-1] == "(for Ray Serve: the YAML is at the end of answer.html)"
    assert "--out PAGE.html" in advised_lines(advised("suffix"), None)[-1]
    nothing = advised("suffix", kind="will not help")
    assert advised_lines(nothing, None) == ["Advice: turn nothing on."]
