"""Who learns, who judges: sessions are dealt by hash and test sessions are left alone."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_ray.config import Config
from hvd_ray.errors import UserError
from hvd_ray.payoff.cost import PassCost
from hvd_ray.payoff.cost_file import CostFile, CostKey
from hvd_ray.payoff.dataset import TEST
from hvd_ray.payoff.policy import AlwaysModel
from hvd_ray.traces.store import read_traces, write_traces
from hvd_ray.tuning.data import (
    ModelNote,
    fit_labels,
    label_table,
    model_drafts,
    open_material,
    train_sessions,
    validation_sessions,
)
from hvd_ray.tuning.pricing import Pricing
from hvd_ray.tuning.space import Validation
from hvd_ray.types import Source
from tests.unit.tuning.conftest import Data

NOTE = ModelNote(num_tokens=3, context_length=100)
TOKENS = st.dictionaries(
    st.sampled_from(["chat", "tools", "sql"]),
    st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.integers(1, 500), min_size=1),
    min_size=1,
)


@given(TOKENS, st.floats(0.05, 0.95), st.integers(1, 2000), st.integers(0, 5))
def test_every_workload_with_two_sessions_stands_on_both_sides(tokens, fraction, cap, seed):
    settings = Validation(fraction=fraction, max_tokens_per_workload=cap)
    own = {w: {f"{w}-{s}": n for s, n in sessions.items()} for w, sessions in tokens.items()}
    if all(len(sessions) < 2 for sessions in own.values()):
        with pytest.raises(UserError, match="two sessions of a workload at least"):
            validation_sessions(own, settings=settings, seed=seed)
        return
    chosen = validation_sessions(own, settings=settings, seed=seed)
    assert chosen == validation_sessions(own, settings=settings, seed=seed)
    for sessions in own.values():
        mine = chosen & set(sessions)
        if len(sessions) == 1:
            assert not mine
            continue
        assert 0 < len(mine) < len(sessions)
        if len(mine) > 1:
            assert sum(sessions[session] for session in mine) <= cap


def test_another_seed_deals_otherwise() -> None:
    tokens = {"chat": {f"s{i}": 10 for i in range(40)}}
    deals = {validation_sessions(tokens, settings=Validation(), seed=seed) for seed in range(4)}
    assert len(deals) == 4
    assert {len(deal) for deal in deals} == {12}


def test_trials_learn_from_neither_validation_nor_test_sessions(data: Data) -> None:
    table = label_table(data.labels)
    held_out = frozenset({"chat-0", "tools-1"})
    labels = fit_labels(table, held_out)
    rows = table.select(["session_id", "split", "draft_len"]).to_pylist()
    with_draft = [row for row in rows if row["draft_len"] > 0]
    learn = [r for r in with_draft if r["split"] == "train" and r["session_id"] not in held_out]
    judge = [r for r in with_draft if r["session_id"] in held_out]
    assert (len(labels.train), len(labels.test)) == (len(learn), len(judge))
    assert labels.num_unsplit == sum(row["split"] == TEST for row in rows)


def test_a_test_session_is_no_validation_session_whatever_is_asked(data: Data) -> None:
    table = label_table(data.labels)
    test_session = next(r["session_id"] for r in table.to_pylist() if r["split"] == TEST)
    with_it = fit_labels(table, frozenset({"chat-0", test_session}))
    assert len(with_it.test) == len(fit_labels(table, frozenset({"chat-0"})).test)


def test_shards_are_as_they_were_labelled(data: Data) -> None:
    material = open_material(data.labels, data.traces, Config())
    shards = material.shards()
    assert sum(map(len, shards)) == len(read_traces(data.traces))
    labelled = dict.fromkeys(label_table(data.labels).column("trace_id").to_pylist())
    for shard in shards:
        mine = {trace.trace_id for trace in shard}
        assert [trace.trace_id for trace in shard] == [name for name in labelled if name in mine]
    assert train_sessions(shards)["chat"] == {f"chat-{i}": 120 for i in range(6)}


def test_look_ups_agree_with_the_labels(data: Data) -> None:
    material = open_material(data.labels, data.traces, Config())
    found = material.replay_set(material.shards(), lambda trace: trace.workload == "tools")
    lengths = {
        trace.trace_id: record.lengths_T.tolist()
        for trace, record in zip(found.traces, found.records, strict=True)
    }
    rows = label_table(data.labels).select(["trace_id", "position", "draft_len"]).to_pylist()
    assert any(row["draft_len"] > 5 for row in rows)
    for row in rows:
        if row["trace_id"].startswith("tools"):
            assert lengths[row["trace_id"]][row["position"]] == row["draft_len"]


def test_model_drafts_are_taken_where_the_labels_have_them_all(data: Data) -> None:
    table = label_table(data.labels)
    assert model_drafts(table, {"chat-0"}, NOTE) == {}
    accepted = np.arange(table.num_rows) % 4
    names = np.array(table.column("trace_id").to_pylist())
    accepted = np.where((names == "chat-1") & (accepted == 2), -1, accepted)
    column = pa.array([None if a < 0 else int(a) for a in accepted], pa.int32())
    index = table.schema.get_field_index("eagle3_accepted_len")
    table = table.set_column(index, table.schema.field(index), column)
    found = model_drafts(table, {"chat-0", "chat-1"}, NOTE)
    assert set(found) == {"chat-0"}
    assert (found["chat-0"].max_draft_tokens, found["chat-0"].context_length) == (3, 100)
    assert found["chat-0"].accepted_len_T.tolist() == accepted[names == "chat-0"].tolist()


def test_labels_of_other_traces_are_refused(data: Data, tmp_path: Path) -> None:
    others = read_traces(data.traces)[:-1]
    write_traces(others, tmp_path / "traces" / "part-0.parquet")
    with pytest.raises(UserError, match="not labelled from the traces in"):
        open_material(data.labels, tmp_path, Config())


def test_a_folder_without_labels_is_refused(data: Data, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no labels .* make them with `hvd traces label"):
        open_material(tmp_path, data.traces, Config())


def test_one_of_several_labellings_has_to_be_named(data: Data, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "labels").mkdir(parents=True)
    with pytest.raises(UserError, match="holds 2 labellings, each with caches of its own; name"):
        open_material(tmp_path, data.traces, Config())


def test_labels_of_another_cache_are_refused(data: Data) -> None:
    config = Config.model_validate({"drafting": {"suffix": {"max_tree_depth": 32}}})
    with pytest.raises(UserError, match=r"max_tree_depth=64, and this run has 32"):
        open_material(data.labels, data.traces, config)


def test_the_model_is_the_named_one_or_that_of_the_traces(data: Data, tmp_path: Path) -> None:
    assert open_material(data.labels, data.traces, Config()).model == "toy"
    assert open_material(data.labels, data.traces, Config(model="mine")).model == "mine"
    copy = tmp_path / "labels"
    shutil.copytree(data.labels, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | {"model": "noted"}))
    assert open_material(copy, data.traces, Config()).model == "noted"


def _with_model_labels(data: Data, folder: Path, *, num_tokens: int) -> Path:
    """The labels with a head's chains of `num_tokens`, as their manifest and their rows say."""
    copy = folder / "labels"
    shutil.copytree(data.labels, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["settings"]["eagle3"] = {"num_tokens": num_tokens, "context_length": 50}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    for file in (copy / "labels").glob("*.parquet"):
        table = pq.read_table(file)
        index = table.schema.get_field_index("eagle3_accepted_len")
        ones = pa.array([1] * table.num_rows, pa.int32())
        pq.write_table(table.set_column(index, table.schema.field(index), ones), file)
    return copy


def test_a_labelled_head_is_replayed_within_its_own_bounds(data: Data, tmp_path: Path) -> None:
    labels = _with_model_labels(data, tmp_path, num_tokens=4)
    config = Config.model_validate({"drafting": {"eagle3": {"num_tokens": 2}}})
    material = open_material(labels, data.traces, config)
    found = material.replay_set(material.shards(), lambda trace: trace.workload == "tools")
    assert {(m.max_draft_tokens, m.context_length) for m in found.models if m} == {(2, 50)}
    steps = [step for run in found.replays(AlwaysModel(), PassCost()) for step in run.steps]
    drafted = {step.position: step.drafted for step in steps}
    assert drafted[0] == 0, "no model draft before the prompt's pass"
    assert max(drafted.values()) == 2
    assert all(step.drafted == 0 for step in steps if step.position >= 30), "prompts of 20 tokens"


def test_chains_longer_than_the_labelled_ones_are_refused(data: Data, tmp_path: Path) -> None:
    labels = _with_model_labels(data, tmp_path, num_tokens=3)
    with pytest.raises(UserError, match=r"num_tokens=3, and this run has 4"):
        open_material(labels, data.traces, Config())


def test_labels_of_the_cache_alone_replay_without_a_model(data: Data) -> None:
    material = open_material(data.labels, data.traces, Config())
    assert material.model_drafter is None
    found = material.replay_set(material.shards(), lambda trace: trace.workload == "tools")
    assert set(found.models) == {None}


def test_a_cost_table_without_a_price_for_the_head_is_refused() -> None:
    key = CostKey(model="m", dtype="float32", engine="torch", device="cpu", num_threads=1)
    unpriced = CostFile(key=key, rows=(1, 2), verify_ms=(1.0, 2.0), provenance={})
    with pytest.raises(UserError, match="no price for them; measure again with `hvd calibrate`"):
        Pricing(unpriced).check_model_price(Path("labels"))
    Pricing(unpriced.model_copy(update={"draft_ms": {Source.EAGLE3: 1.0}})).check_model_price(
        Path("labels")
    )
    Pricing().check_model_price(Path("labels"))
