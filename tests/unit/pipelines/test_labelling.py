"""Labelling, without Ray: which traces share a cache, and the parts on disk."""

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pytest

from hvd_ray.config import SuffixConfig
from hvd_ray.engines.toy import ToyCodec
from hvd_ray.errors import UserError
from hvd_ray.payoff.features import FEATURE_NAMES, FEATURE_VERSION, FeatureExtractor
from hvd_ray.payoff.token_classes import TokenClasses
from hvd_ray.pipelines.labelling import label_one, plan_labels, summarise
from hvd_ray.traces.schema import Trace
from hvd_ray.traces.store import read_labels, write_traces
from hvd_ray.types import SamplingParams

CONFIG = SuffixConfig(max_tree_depth=16)


@pytest.fixture(scope="module")
def extractor() -> FeatureExtractor:
    return FeatureExtractor(TokenClasses.from_codec(ToyCodec(), 24))


def _trace(number: int, **fields: object) -> Trace:
    rng = np.random.default_rng(number)
    output = tuple(rng.integers(0, 3, 30).tolist())
    values: dict[str, object] = {"output_token_ids": output, "finish_reason": "length"} | fields
    return Trace(
        trace_id=f"t{number:02d}",
        prompt_id=str(number),
        workload="w",
        family="f",
        scope="default",
        session_id=f"s{number // 3}",
        created_at=datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=number),
        model="toy",
        tokenizer_sha="letters",
        prompt_token_ids=tuple(rng.integers(0, 3, 10).tolist()),
        sampling=SamplingParams(max_tokens=30),
        context_length=99,
        **values,  # type: ignore[arg-type]
    )


def _written(folder, traces, *, parts):
    for index in range(parts):
        write_traces(traces[index::parts], folder / "traces" / f"p{index}.parquet")
    return folder


def _label(plan, out, extractor):
    done = Counter()
    for shard in plan.shards:
        label_one(
            shard,
            drafter_config=CONFIG,
            extractor=extractor,
            cut_loops=True,
            out=out,
            report=done.update,
        )
    assert done["done"] == plan.num_positions, "the bar ends full"
    labels = read_labels(out, feature_names=FEATURE_NAMES, feature_version=FEATURE_VERSION)
    return labels.sort_by([("trace_id", "ascending"), ("position", "ascending")])


def test_the_files_that_traces_stand_in_do_not_matter(tmp_path, extractor):
    traces = [_trace(number) for number in range(20)]
    tables, hashes = [], []
    for parts in (1, 7):
        plan = plan_labels(_written(tmp_path / str(parts), traces, parts=parts))
        tables.append(_label(plan, tmp_path / f"labels-{parts}", extractor))
        hashes.append(plan.traces_hash)
    assert tables[0].equals(tables[1])
    assert hashes[0] == hashes[1]
    assert tables[0].num_rows == 20 * 30


def test_the_plan_covers_every_trace_once(tmp_path):
    traces = [_trace(number) for number in range(20)]
    plan = plan_labels(_written(tmp_path, traces, parts=3), num_shards=4)
    read = [trace for shard in plan.shards for trace in shard.read()]
    assert sorted(read, key=lambda trace: trace.trace_id) == traces
    assert plan.num_positions == 600
    assert [len({t.session_id for t in s.read()}) > 0 for s in plan.shards] == [True] * len(
        plan.shards
    )
    sizes = [shard.num_positions for shard in plan.shards]
    assert sizes == sorted(sizes, reverse=True)
    sessions = [{trace.session_id for trace in shard.read()} for shard in plan.shards]
    assert sum(map(len, sessions)) == len(set().union(*sessions)), "no session is split"


def test_the_summary_counts_what_was_left_out(tmp_path, extractor):
    traces = [_trace(number) for number in range(6)]
    traces.append(_trace(6, output_token_ids=(), finish_reason=None, error="too long"))
    traces.append(_trace(7, output_token_ids=tuple(range(20)) * 5))
    plan = plan_labels(_written(tmp_path, traces, parts=2))
    _label(plan, tmp_path / "out", extractor)
    summary = summarise(tmp_path / "out", plan)
    assert (summary.traces, summary.failed, summary.loops_cut) == (7, 1, 1)
    assert summary.positions == 6 * 30 + 20


def test_the_hash_follows_ids_and_time(tmp_path):
    traces = [_trace(number) for number in range(4)]
    later = [replace(traces[0], created_at=traces[3].created_at + timedelta(1)), *traces[1:]]
    fewer = traces[:3]
    hashes = {
        plan_labels(_written(tmp_path / name, of_kind, parts=1)).traces_hash
        for name, of_kind in (("a", traces), ("b", later), ("c", fewer))
    }
    assert len(hashes) == 3


@pytest.mark.parametrize(
    ("traces", "reason"),
    [
        ([_trace(1), _trace(1)], "t01 stands in"),
        ([_trace(1), replace(_trace(2), tokenizer_sha="other")], "several tokenizers"),
        ([_trace(1, output_token_ids=(), error="no")], "every trace there has failed"),
        ([], "its files hold no trace, so there is nothing to label"),
    ],
)
def test_traces_that_cannot_be_labelled_together_are_refused(tmp_path, traces, reason):
    with pytest.raises(UserError, match=reason):
        plan_labels(_written(tmp_path, traces, parts=max(1, len(traces))))


def test_a_trace_of_another_schema_is_named(tmp_path):
    folder = _written(tmp_path, [_trace(1)], parts=1)
    file = folder / "traces" / "p0.parquet"
    pa.parquet.write_table(pa.parquet.read_table(file).drop_columns(["scope"]), file)
    with pytest.raises(UserError, match=r"p0\.parquet: the column scope is missing"):
        plan_labels(folder)


def test_a_row_that_is_none_of_traces_is_found_before_anything_is_dealt(tmp_path):
    folder = _written(tmp_path, [_trace(1), _trace(2)], parts=1)
    file = folder / "traces" / "p0.parquet"
    table = pa.parquet.read_table(file)
    index, ids = table.schema.get_field_index("session_id"), pa.array(["s", None])
    pa.parquet.write_table(table.set_column(index, "session_id", ids), file)
    with pytest.raises(UserError, match=r"p0\.parquet: .* traces \(trace t02: session_id is miss"):
        plan_labels(folder)


def test_a_time_beyond_the_calendar_is_one_line(tmp_path):
    folder = _written(tmp_path, [_trace(1)], parts=1)
    file = folder / "traces" / "p0.parquet"
    table = pa.parquet.read_table(file)
    index, kind = table.schema.get_field_index("created_at"), table.schema.field("created_at").type
    times = pa.array([2**62], pa.int64()).cast(kind)
    pa.parquet.write_table(table.set_column(index, "created_at", times), file)
    with pytest.raises(UserError, match=r"p0\.parquet: holds a row that is none of traces"):
        plan_labels(folder)
