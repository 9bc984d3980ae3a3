"""Traces, steps and labels keep every field on disk; a file that is none of ours is named."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hvd_ray.errors import UserError
from hvd_ray.traces import schema, store
from hvd_ray.types import SamplingParams, Source, Step

SAMPLING = SamplingParams(
    temperature=0.7,
    top_k=5,
    top_p=0.9,
    min_p=0.05,
    repetition_penalty=1.1,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    logit_bias={3: 1.5, 9: -100.0},
    max_tokens=12,
    min_tokens=2,
    stop=("the end", "\n\n"),
    stop_token_ids=(7, 8),
    ignore_eos=True,
    seed=2**40,
    logprobs=3,
)
STEP = Step(
    2, 5, Source.SUFFIX, 4, 3, 4, 6, 2.5, 8, predicted_payoff=3.25, tau=6.0,
    draft_us=12.5, verify_us=4e4, reason="payoff 3.2 <= tau 6",
)  # fmt: skip


def test_a_trace_comes_back_as_it_went(tmp_path, make_trace):
    trace = make_trace(sampling=SAMPLING, split="test", policy="suffix", engine="toy float32")
    store.write_traces([trace], tmp_path / "traces" / "a.parquet")
    assert store.read_traces(tmp_path) == [trace]


def test_a_failed_trace_keeps_its_id_and_its_error(tmp_path, make_trace):
    failed = make_trace(output=(), finish_reason=None, error="the prompt is too long")
    store.write_traces([failed], tmp_path / "a.parquet")
    assert store.read_traces(tmp_path / "a.parquet") == [failed]


def test_steps_come_back_by_trace_and_in_order(tmp_path):
    first = Step(0, 0, Source.NONE, 0, 0, 1)
    store.write_steps([("b", STEP), ("a", first), ("b", first)], tmp_path / "steps" / "x.parquet")
    assert store.read_steps(tmp_path) == {"a": (first,), "b": (first, STEP)}


def test_a_folder_of_collections_is_read_as_one(tmp_path, make_trace):
    for name in ("monday", "tuesday"):
        store.write_traces([make_trace(name)], tmp_path / name / "traces" / "a.parquet")
    (tmp_path / "notes").mkdir()
    assert [trace.trace_id for trace in store.read_traces(tmp_path)] == ["monday", "tuesday"]
    assert store.folders_of(tmp_path / "monday", "traces") == [tmp_path / "monday"]
    store.write_traces([make_trace("own")], tmp_path / "traces" / "b.parquet")
    assert [trace.trace_id for trace in store.read_traces(tmp_path)] == ["own"]
    with pytest.raises(UserError, match="holds no traces"):
        store.read_traces(tmp_path / "notes")


def test_parts_are_read_together_and_unfinished_ones_not_at_all(tmp_path, make_trace):
    for name in ("a", "b"):
        store.write_traces([make_trace(name)], tmp_path / "traces" / f"{name}.parquet")
    (tmp_path / "traces" / ".c.1-beef.tmp.parquet").write_bytes(b"half")
    assert [trace.trace_id for trace in store.read_traces(tmp_path)] == ["a", "b"]


def test_every_column_says_what_it_is():
    labels = schema.labels_schema(("score",), 1)
    for table in (schema.TRACES_SCHEMA, schema.STEPS_SCHEMA, labels):
        for column in table:
            assert column.metadata[b"doc"], column.name


def test_the_id_of_a_trace_names_its_identity():
    known = schema.trace_id_of("prompt", [1, 2], {"temperature": 0})
    assert known == schema.trace_id_of("prompt", [1, 2], {"temperature": 0})
    assert known != schema.trace_id_of("prompt", [1, 2], {"temperature": 1})


def test_a_loop_is_cut_where_it_begins_and_the_room_ends_there(make_trace):
    head, stretch = tuple(range(100, 110)), tuple(range(20))
    trace = make_trace(output=head + stretch * 5, finish_reason="length")
    cut = schema.cut_at_loop(trace)
    assert cut.output_token_ids == head + stretch
    assert (cut.finish_reason, cut.end) == ("loop", 30)
    assert trace.end == trace.sampling.max_tokens


def test_a_trace_without_a_loop_stays_the_same(make_trace):
    trace = make_trace(output=tuple(range(100)))
    assert schema.cut_at_loop(trace) is trace


def _metadata(**changes: str) -> dict[bytes, bytes]:
    known = dict(schema.TRACES_SCHEMA.metadata)
    return known | {getattr(schema, key): value.encode() for key, value in changes.items()}


def _rewrite(path: Path, change) -> None:
    pq.write_table(change(pq.read_table(path)), path)


BROKEN = {
    "version 99": lambda t: t.replace_schema_metadata(_metadata(VERSION_KEY="99")),
    "version none": lambda t: t.replace_schema_metadata(
        {k: v for k, v in _metadata().items() if k != schema.VERSION_KEY}
    ),
    "holds steps": lambda t: t.replace_schema_metadata(_metadata(SCHEMA_KEY="steps")),
    "holds an unknown table": lambda t: t.replace_schema_metadata({}),
    "column split is missing": lambda t: t.drop_columns(["split"]),
    "column model is int64": lambda t: t.set_column(
        t.schema.get_field_index("model"), "model", pa.array([1] * t.num_rows)
    ),
}


@pytest.mark.parametrize("difference", BROKEN)
def test_a_file_of_another_schema_is_refused_by_name(tmp_path, make_trace, difference):
    path = tmp_path / "a.parquet"
    store.write_traces([make_trace()], path)
    _rewrite(path, BROKEN[difference])
    with pytest.raises(UserError, match=difference) as refused:
        store.read_traces(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("keep", [0, 3, 200, -1])
def test_a_truncated_file_is_refused_by_name(tmp_path, make_trace, keep):
    path = tmp_path / "a.parquet"
    store.write_traces([make_trace()], path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match="no readable Parquet file") as refused:
        store.read_traces(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_no_parquet_is_refused_by_name(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": "a"}\n' * 100)
    with pytest.raises(UserError, match=r"prompts\.jsonl: no readable Parquet"):
        store.read_traces(path)


@pytest.mark.parametrize("place", ["absent", "."])
def test_a_place_without_traces_says_so(tmp_path, place):
    with pytest.raises(UserError, match="holds no traces"):
        store.read_traces(tmp_path / place)


def test_labels_of_other_features_are_refused(tmp_path):
    table = schema.labels_schema(("score",), 7).empty_table()
    store.write_table(table, tmp_path / "labels" / "a.parquet")
    assert store.read_labels(tmp_path, feature_names=("score",), feature_version=7).num_rows == 0
    with pytest.raises(UserError, match="features of version 7, expected 8; label"):
        store.read_labels(tmp_path, feature_names=("score",), feature_version=8)


def test_writing_into_a_file_instead_of_a_folder_is_a_clear_line(tmp_path, make_trace):
    (tmp_path / "file").write_text("here")
    with pytest.raises(UserError, match="cannot write"):
        store.write_traces([make_trace()], tmp_path / "file" / "a.parquet")


def _with_nothing_in(column: str):
    def change(table):
        index, kind = table.schema.get_field_index(column), table.schema.field(column).type
        values = [*table[column].to_pylist()[:-1], None]
        if column == "sampling":
            empty = pa.nulls(1, kind)
            return table.set_column(
                index, column, pa.chunked_array([*table[column].slice(0, 1).chunks, empty])
            )
        return table.set_column(index, pa.field(column, kind), pa.array(values, kind))

    return change


@pytest.mark.parametrize("column", [c.name for c in schema.TRACES_SCHEMA if not c.nullable])
def test_a_value_that_is_missing_is_named(tmp_path, make_trace, column):
    path = tmp_path / "a.parquet"
    store.write_traces([make_trace("t0"), make_trace("t1")], path)
    _rewrite(path, _with_nothing_in(column))
    name = "row 1" if column == "trace_id" else "trace t1"
    with pytest.raises(UserError) as refused:
        store.read_traces(path)
    assert str(refused.value) == (
        f"{path}: holds a row that is none of traces ({name}: {column} is missing)"
    )


@pytest.mark.parametrize("column", [c.name for c in schema.STEPS_SCHEMA if not c.nullable])
def test_a_value_that_is_missing_in_a_step_is_named(tmp_path, column):
    path = tmp_path / "a.parquet"
    store.write_steps([("a", STEP), ("b", STEP)], path)
    _rewrite(path, _with_nothing_in(column))
    with pytest.raises(UserError, match=rf"a\.parquet: .* none of steps .*: {column} is missing"):
        store.read_steps(path)


def test_a_value_that_is_missing_in_a_label_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    found = schema.labels_schema(("score",), 7)
    row = {field.name: pa.scalar(1).cast(field.type).as_py() for field in found}
    store.write_table(pa.Table.from_pylist([row, row], schema=found), path)
    _rewrite(path, _with_nothing_in("session_id"))
    with pytest.raises(UserError, match=r"none of labels \(trace 1: session_id is missing"):
        store.read_labels(path, feature_names=("score",), feature_version=7)


@pytest.mark.parametrize("column", store.TOKEN_COLUMNS)
@pytest.mark.parametrize("token", [-3, None])
def test_a_token_that_is_none_is_named(tmp_path, make_trace, column, token):
    path = tmp_path / "a.parquet"
    store.write_traces([make_trace("t0", output=()), make_trace("t1")], path)

    def change(table):
        kind = table.schema.field(column).type
        lists = [table[column].to_pylist()[0], [7, token]]
        index = table.schema.get_field_index(column)
        return table.set_column(index, pa.field(column, kind), pa.array(lists, kind))

    _rewrite(path, change)
    with pytest.raises(UserError, match=rf"trace t1: {column} holds {token}, which is no token"):
        store.read_traces(path)


@pytest.mark.parametrize("has_figures", [True, False], ids=["footer", "no footer"])
def test_a_token_that_the_model_does_not_know_is_named(tmp_path, make_trace, has_figures):
    path = tmp_path / "traces" / "a.parquet"
    traces = [make_trace("t0", prompt=(99,), output=()), make_trace("t1", output=(5, 10**9))]
    store.write_traces(traces, path)
    pq.write_table(pq.read_table(path), path, write_statistics=has_figures)
    with pytest.raises(UserError, match=r"a\.parquet: trace t1: output_token_ids holds 1000000000"):
        store.refuse_unknown_tokens(tmp_path, num_token_ids=100)
    with pytest.raises(UserError, match=r"trace t0: prompt_token_ids holds 99, .* beyond 98"):
        store.refuse_unknown_tokens(tmp_path, num_token_ids=99)
    store.refuse_unknown_tokens(tmp_path, num_token_ids=10**9 + 1)
