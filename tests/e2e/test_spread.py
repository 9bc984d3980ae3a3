"""Reports on Ray: the same as in one process, and what becomes of workers that die."""

import json
import os
from dataclasses import replace

import pytest

from hvd_ray.errors import UserError
from hvd_ray.fetch import tokenizer_sha
from hvd_ray.payoff.dataset import read_labels_table
from hvd_ray.payoff.training import train_predictor
from hvd_ray.payoff.training_settings import TrainingSettings
from hvd_ray.pipelines import spread
from hvd_ray.pipelines.label import token_classes_of
from hvd_ray.traces.store import write_traces
from hvd_ray.tuning.data import label_table
from tests.unit.tuning.conftest import label_folder, phrase_traces

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]

SETTINGS = TrainingSettings(kind="survival", epochs=2, hidden=(8,), batch_size=256)


@pytest.fixture(scope="module")
def pair(ray_session):  # noqa: ARG001
    with spread.workers(2) as started:
        yield started


def test_the_replay_of_two_workers_is_that_of_one(hvd, tiny_llama_path, tmp_path):
    model, sha = str(tiny_llama_path), tokenizer_sha(tiny_llama_path)
    traces, labels = tmp_path / "traces", tmp_path / "labels"
    named = [replace(trace, model=model, tokenizer_sha=sha) for trace in phrase_traces(6)]
    write_traces(named, traces / "traces" / "part-0.parquet")
    label_folder(traces, labels, token_classes_of(model, sha))
    learned = train_predictor(read_labels_table(label_table(labels)), SETTINGS)
    learned.predictor.save(tmp_path / "predictor")
    given = ("--traces", traces, "--predictor", tmp_path / "predictor", "--costs", "pass", "--json")
    trees = []
    for num in (1, 2):
        code, out, err = hvd("report", "--replay", labels, *given, "--workers", num)
        assert code == 0, err
        trees.append(json.loads(out) | {"provenance": None})
    assert trees[0] == trees[1]
    assert "starting 2 workers on Ray" in err


def test_a_worker_that_dies_does_its_item_again(pair, tmp_path):
    def work(shared, item):
        mark = shared / str(item)
        if item == 2 and not mark.exists():
            mark.touch()
            os._exit(1)
        return item * item

    told = []
    found = pair.map(work, range(4), shared=tmp_path, on_done=lambda *done: told.append(done))
    assert found == [0, 1, 4, 9]
    assert told == [(done, 4) for done in range(1, 5)]
    assert pair.map(lambda shared, item: shared + item, [1, 2], shared=1) == [2, 3]


def test_what_items_share_is_unpacked_once_by_each_worker(pair):
    found = pair.map(lambda shared, _item: (os.getpid(), id(shared)), range(8), shared=[1])
    assert len(set(found)) <= 2


def test_deaths_without_end_and_mistakes_are_one_line(pair, monkeypatch):
    def refuse(shared, item):
        raise UserError(f"{shared}: {item} is bad")

    with pytest.raises(UserError) as refused:
        pair.map(refuse, [7], shared="labels")
    assert str(refused.value) == "labels: 7 is bad"
    monkeypatch.setattr(spread, "MAX_DEATHS", 1)
    with (
        spread.workers(2) as dying,
        pytest.raises(UserError, match=r"a worker died.*with fewer --workers"),
    ):
        dying.map(lambda _shared, _item: os._exit(1), [1], shared=None)
