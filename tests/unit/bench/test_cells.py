"""Rows from samples with known answers, and the file they are written to."""

import json
from dataclasses import replace

import pytest

from hvd_ray.bench.cells import Arm, Sample, aggregate_rows, workload_rows
from hvd_ray.bench.report import cut_notes
from hvd_ray.bench.result import (
    DEFINITIONS,
    BenchResult,
    Difference,
    Row,
    check_writable,
    read_result,
)
from hvd_ray.errors import UserError
from hvd_ray.types import Completion, Request, SamplingParams, Source, Step

GREEDY, SUFFIX = Arm("greedy", "none"), Arm("suffix", "cold")
TEN = tuple(range(10))
LOOP = tuple(range(20)) * 5
PROMISED = {
    "workload",
    "family",
    "system",
    "engine",
    "prompts",
    "tokens",
    "target_passes",
    "tokens_per_second",
    "speedup_vs_greedy",
    "speedup_ci",
    "emitted_per_pass",
    "cycles_per_1k_tokens",
    "drafted",
    "accepted",
    "source_share",
    "draft_ms_per_cycle",
    "verify_ms_per_cycle",
    "identical_to_greedy",
}


def _step(source=Source.NONE, drafted=0, accepted=0, draft_us=0.0, verify_us=0.0):
    return Step(
        cycle=0,
        position=0,
        source=source,
        drafted=drafted,
        accepted=accepted,
        emitted=accepted + 1,
        draft_us=draft_us,
        verify_us=verify_us,
    )


@pytest.fixture
def sample(toy):
    def make(arm, text="abc", *, token_ids=TEN, seconds=1.0, steps=None, workload="w", **rest):
        steps = steps or tuple(_step() for _ in token_ids)
        completion = Completion("r", tuple(token_ids), "", "length", steps=tuple(steps))
        prompt = toy.prompt(text, workload=workload)
        request = Request("r", (1,), SamplingParams())
        return Sample(prompt, arm, request, completion, seconds, **rest)

    return make


def _rows(samples):
    return {
        (row.workload, row.system): row
        for row in workload_rows(samples, engine="toy", dtype="float32", seed=0)
    }


def _aggregate(samples):
    rows = aggregate_rows(samples, engine="toy", dtype="float32", seed=0)
    return {row.system: row for row in rows}


def test_the_headline_counts_every_pass_and_the_mean_acceptance_only_drafted_ones(sample):
    """vllm#24344: 6 accepted in one drafted cycle of three is 6.0 beside 3.0 a pass."""
    steps = [_step(), _step(Source.SUFFIX, drafted=8, accepted=6), _step()]
    row = _rows([sample(GREEDY), sample(SUFFIX, token_ids=range(9), steps=steps)])["w", "suffix"]
    assert row.emitted_per_pass == pytest.approx(3.0)
    assert row.mean_accepted_drafted_only == pytest.approx(6.0)
    assert row.cycles_per_1k_tokens == pytest.approx(1000 / 3)
    assert (row.drafted_cycles, row.drafted, row.accepted) == (1, 8, 6)
    assert row.source_share == pytest.approx({"none": 2 / 3, "suffix": 1 / 3})


def test_greedy_against_itself_is_exactly_one_and_drafts_nothing(sample):
    row = _rows([sample(GREEDY, text, seconds=s) for text, s in (("a", 1.0), ("b", 3.0))])
    greedy = row["w", "greedy"]
    assert (greedy.speedup_vs_greedy, greedy.speedup_ci) == (1.0, (1.0, 1.0))
    assert greedy.mean_accepted_drafted_only is None
    assert greedy.emitted_per_pass == 1.0
    assert greedy.tokens_per_second == pytest.approx(20 / 4)


def test_times_of_the_first_cycle_are_left_out_since_it_reads_the_prompt(sample):
    steps = [_step(draft_us=9e6, verify_us=9e6), _step(draft_us=1000, verify_us=20_000), _step()]
    row = _rows([sample(GREEDY), sample(SUFFIX, steps=steps)])["w", "suffix"]
    assert row.draft_ms_per_cycle == pytest.approx(0.5)
    assert row.verify_ms_per_cycle == pytest.approx(10.0)


def test_a_single_cycle_has_no_time_to_report(sample):
    row = _rows([sample(GREEDY, token_ids=(1,))])["w", "greedy"]
    assert row.draft_ms_per_cycle is None
    assert row.verify_ms_per_cycle is None


def test_differing_outputs_lower_the_share_and_are_listed(sample):
    difference = Difference("b", 4, 0.25)
    rows = _rows(
        [
            sample(GREEDY, "a", is_identical_in_one_pass=True),
            sample(GREEDY, "b", is_identical_in_one_pass=False),
            sample(SUFFIX, "a"),
            sample(SUFFIX, "b", difference=difference),
        ]
    )
    assert rows["w", "suffix"].identical_to_greedy == 0.5
    assert rows["w", "suffix"].differences == (difference,)
    assert rows["w", "suffix"].identical_in_one_pass is None
    assert rows["w", "greedy"].identical_in_one_pass == 0.5


def test_loops_are_counted_and_left_out_beside(sample):
    """A cache drafts a loop perfectly: 4x on the loop, 1x on the rest."""
    rows = _rows(
        [
            sample(GREEDY, "a", token_ids=LOOP, seconds=8.0),
            sample(GREEDY, "b", seconds=1.0),
            sample(SUFFIX, "a", token_ids=LOOP, seconds=2.0, steps=[_step()] * 20),
            sample(SUFFIX, "b", seconds=1.0),
        ]
    )
    row = rows["w", "suffix"]
    assert row.loops == 0.5
    assert row.speedup_vs_greedy == pytest.approx(3.0)
    assert row.without_loops is not None
    assert row.without_loops.prompts == 1
    assert row.without_loops.speedup_vs_greedy == pytest.approx(1.0)
    assert row.without_loops.emitted_per_pass == pytest.approx(1.0)


def test_where_everything_loops_nothing_is_left_to_report(sample):
    rows = _rows([sample(arm, token_ids=LOOP) for arm in (GREEDY, SUFFIX)])
    assert rows["w", "suffix"].without_loops is None


def test_all_workloads_is_the_geometric_mean_each_workload_weighing_the_same(sample):
    samples = []
    for workload, factor, count in (("w", 2.0, 1), ("v", 8.0, 5)):
        for i in range(count):
            samples.append(sample(GREEDY, f"a{i}", workload=workload, seconds=4.0))
            samples.append(sample(SUFFIX, f"a{i}", workload=workload, seconds=4.0 / factor))
    row = _aggregate(samples)["suffix"]
    assert row.workload == "all"
    assert row.speedup_vs_greedy == pytest.approx(4.0)
    assert (row.prompts, row.tokens) == (6, 60)
    assert row.ci_is_degenerate, "one workload has a single prompt"


def test_the_aggregate_leaves_looping_prompts_of_each_workload_out(sample):
    samples = []
    for workload, ids in (("w", LOOP), ("v", TEN)):
        samples += [sample(arm, token_ids=ids, workload=workload) for arm in (GREEDY, SUFFIX)]
    row = _aggregate(samples)["suffix"]
    assert row.loops == 0.5
    assert row.without_loops is not None
    assert row.without_loops.prompts == 1


def test_an_output_of_no_tokens_does_not_break_the_interval(sample):
    empty = [sample(arm, "b", token_ids=(), steps=[_step()]) for arm in (GREEDY, SUFFIX)]
    row = _rows([sample(GREEDY), sample(SUFFIX), *empty])["w", "suffix"]
    assert row.speedup_vs_greedy == pytest.approx(1.0)


# -- the file ----------------------------------------------------------------------------------


def _result(sample):
    difference = Difference("abc", 4, None)
    samples = [sample(GREEDY), sample(SUFFIX, difference=difference)]
    rows = workload_rows(samples, engine="toy", dtype="float32", seed=0)
    aggregate = aggregate_rows(samples, engine="toy", dtype="float32", seed=0)
    return BenchResult({"commit": "abc"}, ("a note",), tuple(rows), tuple(aggregate))


def test_a_result_survives_its_file(sample, tmp_path):
    result = _result(sample)
    result.write(tmp_path / "deep" / "result.json")
    assert read_result(tmp_path / "deep" / "result.json") == result


def test_the_file_has_the_documented_columns(sample, tmp_path):
    _result(sample).write(tmp_path / "r.json")
    tree = json.loads((tmp_path / "r.json").read_text())
    assert set(tree["rows"][1]) >= PROMISED
    assert len(tree["rows"][1]["speedup_ci"]) == 2
    assert set(tree["definitions"]) <= set(Row.__dataclass_fields__)
    assert tree["definitions"] == DEFINITIONS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "no result of `hvd bench`"),
        ('{"format": 99}', "no result of `hvd bench`"),
        ('{"format": 1, "provenance": {}, "notes": []}', "damaged"),
        ('{"format": 1, "provenance": {}, "notes": [], "rows": [{}], "aggregate": []}', "damaged"),
    ],
)
def test_a_file_that_is_no_result_is_refused_in_one_line(tmp_path, text, message):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_result(path)
    assert "\n" not in str(caught.value)
    assert "r.json" in str(caught.value)


def test_a_result_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*gone\.json"):
        read_result(tmp_path / "gone.json")


def test_a_column_of_another_version_is_named(sample, tmp_path):
    result = _result(sample)
    tree = result.as_json()
    tree["rows"][0]["surprise"] = 1
    (tmp_path / "r.json").write_text(json.dumps(tree))
    with pytest.raises(UserError, match="surprise"):
        read_result(tmp_path / "r.json")


def test_a_result_that_cannot_be_written_leaves_nothing(sample, tmp_path):
    bad = replace(_result(sample), provenance={"value": float("nan")})
    with pytest.raises(ValueError, match="JSON"):
        bad.write(tmp_path / "r.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["file.txt/result.json", "."])
def test_a_place_that_cannot_be_written_is_found_before_measuring(tmp_path, place):
    (tmp_path / "file.txt").write_text("a file, no folder")
    with pytest.raises(UserError, match="cannot write"):
        check_writable(tmp_path / place)


def test_looking_whether_a_place_can_be_written_leaves_nothing(tmp_path):
    check_writable(tmp_path / "deep" / "er" / "result.json")
    assert not list(tmp_path.iterdir())


def test_answers_that_the_limit_cut_are_counted_and_named_where_they_are_scored(sample):
    ended = sample(GREEDY, "whole", workload="json_schema", quality=1.0)
    ended = replace(ended, completion=replace(ended.completion, finish_reason="stop"))
    cut = [sample(GREEDY, text, workload="json_schema", quality=0.0) for text in ("a", "b", "c")]
    rows = _rows([ended, *cut, sample(GREEDY, workload="unscored")])
    assert rows["json_schema", "greedy"].cut_share == 0.75
    assert rows["unscored", "greedy"].cut_share == 1
    assert cut_notes(rows.values()) == (
        "json_schema: 75 % of greedy's answers end at the limit of tokens; they are scored as "
        "they stand.",
    )
    assert cut_notes(_rows([ended]).values()) == ()
