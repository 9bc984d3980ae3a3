"""A drafter's collection that is killed anywhere ends with every request once, engine left out."""

import pyarrow.parquet as pq
import pytest

from hvd_ray.errors import UserError
from hvd_ray.pipelines import eagle3_collect
from hvd_ray.pipelines.eagle3_collect import CollectedRow, CollectRequest, collect

REQUESTS = [
    CollectRequest(
        request_id=f"r{number}",
        prompt_id=f"p{number}",
        family="chat",
        workload="toy",
        prompt_token_ids=(1, number),
        temperature=0.0,
        max_tokens=4,
    )
    for number in range(20)
]


class KilledError(BaseException):
    """Stands for `kill -9`: nothing catches it."""


@pytest.fixture
def engine(monkeypatch):
    """Answers each request; dies after so many."""
    lives = {"left": 10**9, "asked": 0}

    def generate(_engine, requests, *, max_in_flight):
        del max_in_flight
        for request in requests:
            if not lives["left"]:
                raise KilledError
            lives["left"] -= 1
            lives["asked"] += 1
            yield CollectedRow(request=request, output_token_ids=(7,), finish_reason="stop")

    monkeypatch.setattr(eagle3_collect, "start_engine", lambda *_, **__: None)
    monkeypatch.setattr(eagle3_collect, "generate", generate)
    return lives


def run(out) -> None:
    collect(REQUESTS, model=out, out=out, rows_per_shard=3)


def test_killed_again_and_again_it_ends_with_every_request_once(engine, tmp_path) -> None:
    for lives in (1, 4, 5, 2):
        engine["left"] = lives
        with pytest.raises(KilledError):
            run(tmp_path)
    engine["left"] = 10**9
    run(tmp_path)
    rows = [
        row["request_id"]
        for part in tmp_path.glob("part-*.parquet")
        for row in pq.read_table(part).to_pylist()
    ]
    assert sorted(rows) == sorted(request.request_id for request in REQUESTS)
    assert engine["asked"] <= len(REQUESTS) + 4 * 2, "at most a part less one is asked again"
    assert not list(tmp_path.glob(".*"))


def test_a_disk_without_room_is_a_clear_line_and_leaves_no_part(engine, tmp_path, monkeypatch):
    del engine

    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.write_table", full)
    with pytest.raises(UserError, match="no room left while writing"):
        run(tmp_path)
    assert not list(tmp_path.iterdir())
