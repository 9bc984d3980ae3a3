"""Work in this process: its order, and what it tells; on Ray it is tested end to end."""

from hvd_ray.pipelines.spread import IN_PROCESS, workers


def add(shared: int, item: int) -> int:
    return shared + item


def test_one_worker_is_this_process_and_keeps_the_order() -> None:
    told: list[tuple[int, int]] = []
    with workers(1) as alone:
        assert alone is IN_PROCESS
        found = alone.map(add, [3, 1, 2], shared=10, on_done=lambda *done: told.append(done))
    assert found == [13, 11, 12]
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert IN_PROCESS.map(add, [], shared=1) == []
