"""Counts of a run on many prompts, times of a run alone."""

from dataclasses import replace

import pytest

from hvd_ray.bench.merge import TIMES, own_with_times_of, with_times_of
from hvd_ray.bench.report import markdown_report, tiers_part
from hvd_ray.bench.result import BenchResult, Row
from hvd_ray.bench.tier_report import tier_summary
from hvd_ray.errors import UserError

COSTS = {"rows": [1, 6], "verify_ms": [10.0, 10.0], "slim_ms": [5.0, 6.0]}


def row(system: str, workload: str, **changes: object) -> Row:
    plain = Row(
        workload=workload, family="maths", system=system, engine="torch", cache="none",
        dtype="bfloat16", temperatures=(0.0,), prompts=8, tokens=80, target_passes=40,
        tokens_per_second=10.0, speedup_vs_greedy=0.5, speedup_ci=(0.4, 0.6), ci_unit="prompt",
        ci_is_degenerate=False, emitted_per_pass=2.0, mean_accepted_drafted_only=None,
        cycles_per_1k_tokens=500.0, drafted_cycles=0, drafted=0, accepted=0, source_share={},
        draft_ms_per_cycle=1.0, verify_ms_per_cycle=2.0, identical_to_greedy=1.0, differences=(),
        identical_in_one_pass=None, loops=0.0, without_loops=None, full_passes_per_token=0.5,
        slim_passes_per_token=0.7, escalated_share=0.25, unchecked_share=0.5,
        agreement_with_greedy=0.75,
    )  # fmt: skip
    return replace(plain, **changes)  # type: ignore[arg-type]


def result(*, is_timed: bool, systems: tuple[str, ...] = ("greedy", "tiered"), **changes: object):
    scores = {"greedy": 1.0, "tiered": 0.625}
    rows = tuple(
        row(s, "gsm8k", quality=scores.get(s), quality_metric="same_number", **changes)
        for s in systems
    )
    whole = tuple(row(s, "all", **changes) for s in systems)
    options = {"is_timed": is_timed}
    about = {"config": {"model": "m"}, "options": options, "costs": COSTS, "slim": {"method": "dp"}}
    return BenchResult(about, (), rows, whole)


def test_times_come_from_the_run_alone_and_nothing_else_does():
    counted = result(is_timed=False)
    timed = result(is_timed=True, prompts=3, speedup_vs_greedy=1.5, speedup_ci=(1.2, 1.8), tokens=9)
    both = with_times_of(counted, timed)
    assert both.is_timed
    for merged, one, other in zip(both.rows, counted.rows, timed.rows, strict=True):
        assert all(getattr(merged, name) == getattr(other, name) for name in TIMES)
        assert replace(merged, **{name: getattr(one, name) for name in TIMES}) == one
    assert "first 3 prompts" in both.notes[0]
    assert "of 8" in both.notes[0]
    assert "float" not in both.notes[0]


def test_times_of_another_precision_are_called_so():
    counted, timed = result(is_timed=False, dtype="float32"), result(is_timed=True)
    note = with_times_of(counted, timed).notes[0]
    assert "a run alone in bfloat16 over" in note
    assert note.endswith("of 8 in float32.")


def test_what_does_not_fit_is_refused():
    counted = result(is_timed=False)
    with pytest.raises(UserError, match="not timed either"):
        with_times_of(counted, counted)
    with pytest.raises(UserError, match="no row of tiered on gsm8k"):
        with_times_of(counted, result(is_timed=True, systems=("greedy",)))
    other = result(is_timed=True)
    with pytest.raises(UserError, match="a result of x"):
        with_times_of(counted, replace(other, provenance={"config": {"model": "x"}}))
    with pytest.raises(UserError, match="a result of the vllm engine"):
        with_times_of(counted, result(is_timed=True, engine="vllm"))
    options = {"options": {"is_timed": True, "concurrency": 8}}
    with pytest.raises(UserError, match="8 requests at once"):
        with_times_of(counted, replace(other, provenance={**other.provenance, **options}))


def test_the_one_table_has_a_row_for_each_mode_and_a_column_for_each_task():
    head, body = tier_summary(result(is_timed=True))
    assert head[-1] == "gsm8k, same_number"
    greedy, tiered = (dict(zip(head, cells, strict=True)) for cells in body)
    assert greedy["slim / full cost"] == greedy["asks the target"] == "-"
    assert tiered == {
        "mode": "tiered",
        "slim / full cost": "0.60",
        "asks the target": "25 %",
        "full / token": "0.50",
        "slim / token": "0.70",
        "unchecked": "50 %",
        "speed-up (95 %)": "0.50 (0.40-0.60)",
        "agreement": "75 %",
        "gsm8k, same_number": "0.62",
    }
    assert "0.60" in tiers_part([result(is_timed=True)])


def test_a_run_beside_others_shows_no_times():
    head, body = tier_summary(result(is_timed=False))
    assert "speed-up (95 %)" not in head
    assert {len(cells) for cells in body} == {len(head)}
    shown = markdown_report([result(is_timed=False)])
    assert "0.40-0.60" not in shown
    assert "Speed-up against greedy in" not in shown
    assert "tokens/s" not in shown
    assert " speed-up " not in shown
    assert " speed-up " in markdown_report([result(is_timed=True)])


def test_no_more_cycles_than_there_were_have_drafted():
    """A slim model decides cycles without a pass, so passes are fewer than cycles."""
    shares = {"none": 0.2, "suffix": 0.8}
    many = result(
        is_timed=True, target_passes=10, drafted_cycles=40, drafted=100, source_share=shares
    )
    assert "0 / 100, 80 %" in markdown_report([many])
    none = result(is_timed=True, target_passes=0, source_share={"suffix": 1.0})
    assert "0 / 0, 100 %" in markdown_report([none])


def test_a_suites_own_times_are_of_the_run_alone_too():
    own = {"cycle_costs": [1], "against": [2], "payoffs": [3]}
    timed = {"cycle_costs": [4], "against": [5], "payoffs": [6]}
    assert own_with_times_of(own, timed) == {"cycle_costs": [4], "against": [5], "payoffs": [3]}
    assert own_with_times_of(own, None) == {"cycle_costs": [], "against": [], "payoffs": [3]}
