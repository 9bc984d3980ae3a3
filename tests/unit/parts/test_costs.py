"""Which cost table holds here, and what is said where none does."""

from pathlib import Path

import pytest

from hvd_ray.config import Config
from hvd_ray.errors import UserError
from hvd_ray.parts.costs import costs_path, find_costs
from hvd_ray.payoff.cost_file import CostFile, CostKey, write_costs

KEY = CostKey(model="m", dtype="bfloat16", engine="torch", device="cpu", num_threads=2)


@pytest.fixture(autouse=True)
def here(hvd_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    monkeypatch.setattr("hvd_ray.parts.costs.cost_key", lambda _config: KEY)


def measure(**changes: object) -> None:
    key = KEY.model_copy(update=changes)
    write_costs(costs_path(key), CostFile(key=key, rows=(1, 2), verify_ms=(1.0, 2.0)))


def test_a_table_for_another_number_of_threads_is_named() -> None:
    for changes in ({"num_threads": 4}, {"num_threads": 1}, {"num_threads": 8, "model": "n"}):
        measure(**changes)
    with pytest.raises(UserError, match="one for 1 and 4: add num_threads=1 to use it") as told:
        find_costs(Config())
    assert str(told.value).endswith("`hvd calibrate num_threads=2`")
    with pytest.raises(UserError, match="`hvd calibrate dtype=float32 num_threads=2`"):
        find_costs(Config(dtype="float32"))
    measure()
    assert find_costs(Config()).key == KEY


def test_that_there_is_no_table_at_all_is_known_without_loading_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loaded(_config: Config) -> CostKey:
        raise AssertionError("torch was loaded")

    monkeypatch.setattr("hvd_ray.parts.costs.cost_key", loaded)
    with pytest.raises(UserError, match=r"no cost table.*`hvd calibrate dtype=float32`"):
        find_costs(Config(dtype="float32"))
    with pytest.raises(UserError, match="`hvd calibrate num_threads=2`"):  # else another is made
        find_costs(Config(num_threads=2))


def test_tables_of_other_models_and_broken_ones_are_no_help() -> None:
    measure(model="n", num_threads=1)
    path = costs_path(KEY.model_copy(update={"num_threads": 1}))
    path.write_text("{")
    with pytest.raises(UserError, match="no cost table at"):
        find_costs(Config())


def test_a_named_table_for_other_threads_says_what_to_type(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    key = KEY.model_copy(update={"num_threads": 1})
    write_costs(path, CostFile(key=key, rows=(1, 2), verify_ms=(1.0, 2.0)))
    config = Config(policy={"name": "hvd_cost", "costs": str(path)})
    with pytest.raises(UserError, match="here it is 2; type num_threads=1, or measure"):
        find_costs(config)
