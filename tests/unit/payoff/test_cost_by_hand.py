"""Cost tables written by hand, and what is left of a gain under load."""

import json

import pytest

from hvd_ray.errors import UserError
from hvd_ray.payoff.cost import RowCosts
from hvd_ray.payoff.cost_by_hand import read_any_costs
from hvd_ray.payoff.cost_file import CostFile, CostKey, write_costs
from hvd_ray.payoff.cost_load import LoadedCosts
from hvd_ray.types import Source, Step

TEXT = """
name: a GPU
rows: [1, 10]
verify_ms: [5, 14]
draft_token_ms: {eagle3: 0.5}
basis: a data sheet
is_assumed: true
"""


def test_a_table_by_hand_says_what_it_is(tmp_path):
    (tmp_path / "gpu.yaml").write_text(TEXT)
    costs = read_any_costs(tmp_path / "gpu.yaml")
    assert (costs.name, costs.basis, costs.is_assumed) == ("a GPU", "a data sheet", True)
    assert costs.has_eagle3
    assert costs.table.cost_ms(Source.EAGLE3, 3) == pytest.approx(7 + 2 * 0.5)


def test_json_and_measured_tables_are_read_alike(tmp_path):
    tree = {"name": "x", "rows": [1], "verify_ms": [2.0]}
    (tmp_path / "gpu.json").write_text(json.dumps(tree))
    assert read_any_costs(tmp_path / "gpu.json").table.cost_ms(Source.NONE, 4) == 2
    key = CostKey(model="m", dtype="bfloat16", engine="torch", device="a CPU", num_threads=2)
    write_costs(tmp_path / "cpu.json", CostFile(key=key, rows=(1, 2), verify_ms=(1.0, 3.0)))
    measured = read_any_costs(tmp_path / "cpu.json")
    assert "a CPU" in measured.name
    assert not measured.is_assumed
    assert not measured.has_eagle3


@pytest.mark.parametrize(
    ("slim_ms", "said"),
    [((1.0,), "1 slim_ms for 2 row counts"), ((1.0, float("nan")), "above 0"), ((), "0 slim_ms")],
)
def test_times_of_a_slim_model_are_held_to_the_same(tmp_path, slim_ms, said):
    key = CostKey(model="m", dtype="bfloat16", engine="torch", device="a CPU", num_threads=2)
    costs = CostFile(key=key, rows=(1, 2), verify_ms=(1.0, 3.0), slim="abc", slim_ms=slim_ms)
    with pytest.raises(UserError, match=said):
        write_costs(tmp_path / "cpu.json", costs)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: x\nrows: [1]\nverify_ms: [1]\nspeed: 3", "speed"),
        ("rows: [1]\nverify_ms: [1]", "name"),
        ("name: x\nrows: [1, 2]\nverify_ms: [2, 1]", "never fall"),
        ("name: x\nrows: [1]\nverify_ms: [1]\ndraft_ms: {nobody: 1}", "draft_ms"),
        ("name: x\nrows: [1, 2]\nverify_ms: [true, 2]", "verify_ms.0: .* a number, got true"),
        ("name: x\nrows: [true, 2]\nverify_ms: [1, 2]", "rows.0: .* a number, got true"),
        ("name: x\nrows: [1]\nverify_ms: [1]\ndraft_ms: {suffix: false}", "got false"),
        (f"name: x\nrows: [1, {10**400}]\nverify_ms: [1, 2]", "rows.1"),
        (f"name: x\nrows: [1, 2]\nverify_ms: [1, {10**400}]", "verify_ms"),
        ('name: "a\\e[31mb"\nrows: [1]\nverify_ms: [1]', "name: .* printable text on one line"),
        ('name: "a\\nb"\nrows: [1]\nverify_ms: [1]', "name: .* printable text"),
        ('name: " "\nrows: [1]\nverify_ms: [1]', "name: must not be empty"),
        ('name: x\nbasis: "a\\nb"\nrows: [1]\nverify_ms: [1]', "basis: .* printable text"),
        ("name: x\nrows: [1]\nverify_ms: [1]\nis_assumed: 1", "is_assumed"),
    ],
)
def test_a_bad_table_is_refused_by_name(tmp_path, text, said):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(UserError, match=said):
        read_any_costs(tmp_path / "bad.yaml")


def test_true_is_no_time_in_a_measured_table_either(tmp_path):
    key = CostKey(model="m", dtype="bfloat16", engine="torch", device="a CPU", num_threads=2)
    write_costs(tmp_path / "cpu.json", CostFile(key=key, rows=(1, 2), verify_ms=(1.0, 3.0)))
    tree = json.loads((tmp_path / "cpu.json").read_text())
    for name in ("rows", "verify_ms"):
        (tmp_path / "cpu.json").write_text(json.dumps(tree | {name: [True, 3]}))
        with pytest.raises(UserError, match=f"{name}.0: .* a number, got true"):
            read_any_costs(tmp_path / "cpu.json")


def test_an_absent_table_says_how_to_get_one(tmp_path):
    with pytest.raises(UserError, match="hvd calibrate"):
        read_any_costs(tmp_path / "none.yaml")


def step(drafted: int, source: Source = Source.SUFFIX) -> Step:
    return Step(0, 0, source if drafted else Source.NONE, drafted, 0, 1)


def test_one_request_alone_costs_what_its_cycles_cost():
    costs = RowCosts((1, 4, 64), (5.0, 6.0, 30.0), {Source.SUFFIX: 0.1})
    steps = [step(0), step(3), step(20)]
    alone = LoadedCosts(costs, 1)
    expected = sum(costs.cost_ms(s.source, s.drafted + 1) for s in steps)
    assert alone.cycles_ms(steps, mean_rows=9.0) == pytest.approx(expected)
    assert alone.cost_ms(Source.SUFFIX, 4) == costs.cost_ms(Source.SUFFIX, 4)


def test_rows_that_are_free_alone_cost_under_load():
    costs = RowCosts((1, 64, 128), (5.0, 5.0, 10.0))
    assert LoadedCosts(costs, 1).cost_ms(Source.SUFFIX, 8) == 5
    assert LoadedCosts(costs, 16).cost_ms(Source.SUFFIX, 8) == pytest.approx(10.0)


def test_a_cache_is_asked_for_each_request_and_a_head_once():
    costs = RowCosts((1,), (5.0,), {Source.SUFFIX: 0.1, Source.EAGLE3: 1.0})
    loaded = LoadedCosts(costs, 8)
    assert loaded.cost_ms(Source.SUFFIX, 2) == pytest.approx(5.8)
    assert loaded.cost_ms(Source.EAGLE3, 2) == pytest.approx(6.0)
