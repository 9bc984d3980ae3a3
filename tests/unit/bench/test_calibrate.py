"""Cost tables: measured on the toy engine, kept, and refused where they do not hold."""

import json

import pytest

from hvd_ray.bench.calibrate import measure_cache_draft, measure_verify
from hvd_ray.commands.calibrate import _show
from hvd_ray.drafting.suffix import SuffixDrafter
from hvd_ray.engines.toy import ToyEngine
from hvd_ray.errors import UserError
from hvd_ray.payoff.cost_file import CostFile, CostKey, read_costs, write_costs
from hvd_ray.types import Source

KEY = CostKey(model="m", dtype="float32", engine="torch", device="cpu", num_threads=2)
COSTS = CostFile(
    key=KEY,
    rows=(1, 8),
    verify_ms=(10.0, 12.0),
    draft_ms={Source.EAGLE3: 1.0},
    draft_token_ms={Source.EAGLE3: 2.0},
)


def test_every_number_of_rows_is_measured_and_rolled_back():
    engine = ToyEngine()
    heard = []
    times = measure_verify(engine, rows=(1, 2, 4), num_repeats=3, on_repeat=lambda: heard.append(1))
    assert len(times.median_ms) == 3
    assert all(a <= b for a, b in zip(times.median_ms, times.median_ms[1:], strict=False))
    assert times.median_ms[0] > 0
    assert engine.num_passes == 1 + 3 * (3 + 2)
    assert len(heard) == 5


def test_a_look_up_takes_time():
    assert measure_cache_draft(SuffixDrafter(), [1, 2, 3] * 40) > 0


def test_a_table_comes_back_and_prices_what_the_model_drafter_adds(tmp_path):
    path = tmp_path / "costs.json"
    write_costs(path, COSTS)
    table = read_costs(path, key=KEY).table()
    assert table.cost_ms(Source.NONE, 1) == 10
    assert table.cost_ms(Source.EAGLE3, 8) == 12 + 1 + 7 * 2


@pytest.mark.parametrize("shows_slim", [True, False])
def test_slim_passes_are_shown_to_who_asked(capsys, tmp_path, shows_slim):
    costs = COSTS.model_copy(update={"slim": "mask", "slim_ms": (5.0, 6.0)})
    _show(costs, tmp_path / "costs.json", shows_slim=shows_slim)
    assert ("slim/full" in capsys.readouterr().out) == shows_slim


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 9}, "format version 9"),
        ({"verify_ms": [10.0]}, "as many times as row counts"),
        ({"verify_ms": [10.0, 9.0]}, "never fall"),
        ({"rows": [1, "x"]}, r"rows\.1"),
        ({"unknown": 1}, "unknown"),
        ({"draft_ms": {"suffix": -5}}, "suffix costs -5"),
        ({"draft_token_ms": {"eagle3": float("nan")}}, "eagle3 costs nan"),
    ],
)
def test_a_damaged_table_is_one_clear_line(tmp_path, changes, message):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(COSTS.model_dump(mode="json") | changes))
    with pytest.raises(UserError, match=message) as caught:
        read_costs(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00"])
def test_what_is_no_table_is_refused(tmp_path, text):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"costs\.json.*hvd calibrate"):
        read_costs(path)
    with pytest.raises(UserError, match=r"no cost table.*hvd calibrate"):
        read_costs(tmp_path / "absent.json")


@pytest.mark.parametrize("field", ["model", "dtype", "device"])
def test_a_table_of_something_else_is_refused_by_name(tmp_path, field):
    path = tmp_path / "costs.json"
    write_costs(path, COSTS)
    with pytest.raises(UserError, match=f"measured for {field} .*here it is 'other'"):
        read_costs(path, key=KEY.model_copy(update={field: "other"}))
