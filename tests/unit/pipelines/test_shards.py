"""How often a pool is begun again after deaths: as long as it gets anything written."""

from collections.abc import Callable

import pytest

from hvd_ray.pipelines.shards import KEPT, MAX_ATTEMPTS, _persist


class DeathError(Exception):
    pass


def pool_of(outcomes: list[int], kept: dict[str, int]) -> Callable[[], None]:
    """A pool that writes so many parts each time and dies, until the list is at its end."""

    def run() -> None:
        if not outcomes:
            return
        kept[KEPT] = kept.get(KEPT, 0) + outcomes.pop(0)
        raise DeathError

    return run


def test_it_goes_on_as_long_as_parts_get_written() -> None:
    kept: dict[str, int] = {}
    outcomes = [1, 0, 0, 2, 0, 0, 1, 1, 1, 1]
    _persist(pool_of(outcomes, kept), lambda: kept, death=DeathError)
    assert not outcomes


def test_it_gives_up_where_nothing_gets_written() -> None:
    kept: dict[str, int] = {}
    outcomes = [1, *[0] * MAX_ATTEMPTS, 5]
    with pytest.raises(DeathError):
        _persist(pool_of(outcomes, kept), lambda: kept, death=DeathError)
    assert outcomes == [5]


def test_other_failures_pass() -> None:
    def fail() -> None:
        raise ValueError("a fault of ours")

    with pytest.raises(ValueError, match="of ours"):
        _persist(fail, dict, death=DeathError)
