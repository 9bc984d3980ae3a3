"""Labels say what the cache's draft would have been worth, position by position."""

import numpy as np
import pytest

from hvd_ray.config import SuffixConfig
from hvd_ray.drafting.suffix import SuffixDrafter
from hvd_ray.engines.toy import ToyCodec
from hvd_ray.payoff.features import FEATURE_NAMES, FEATURE_VERSION, FeatureExtractor
from hvd_ray.payoff.token_classes import TokenClasses
from hvd_ray.traces.label import label_rate, label_shard, label_trace, shard_of
from hvd_ray.traces.schema import labels_schema
from hvd_ray.types import SamplingParams

CONFIG = SuffixConfig(max_tree_depth=16, max_spec_factor=1.0)
PHRASE = (3, 1, 4, 1, 5, 9, 2, 6)


@pytest.fixture(scope="module")
def extractor() -> FeatureExtractor:
    return FeatureExtractor(TokenClasses.from_codec(ToyCodec(), 24))


def _rows(table, *columns):
    return list(zip(*(table[column].to_pylist() for column in columns), strict=True))


def _naive_rows(traces, config=CONFIG):
    """(trace, position, draft length, accepted length), token by token with plain loops."""
    drafter, rows = SuffixDrafter(config), []
    for trace in traces:
        drafter.start(trace.request())
        output = trace.output_token_ids
        for position, token in enumerate(output):
            room = trace.sampling.max_tokens - position - 1
            draft = drafter.propose(trace.trace_id, room).token_ids
            accepted = 0
            while accepted < len(draft) and position + accepted < len(output):
                if draft[accepted] != output[position + accepted]:
                    break
                accepted += 1
            rows.append((trace.trace_id, position, len(draft), accepted))
            drafter.observe(trace.trace_id, (token,))
        drafter.stop(trace.trace_id)
    return rows


def test_labels_equal_those_of_a_plain_walk(make_trace, extractor):
    rng = np.random.default_rng(5)
    traces = [
        make_trace(
            f"t{minute}",
            prompt=tuple(rng.integers(0, 4, 20).tolist()),
            output=tuple(rng.integers(0, 3, 40).tolist()),
            minute=minute,
        )
        for minute in range(5)
    ]
    labels = label_shard(traces, drafter_config=CONFIG, extractor=extractor, cut_loops=False)
    found = _rows(labels.table, "trace_id", "position", "draft_len", "accepted_len")
    assert found == _naive_rows(traces)
    assert max(accepted for *_, accepted in found) >= 3, "nothing was accepted: a weak example"


def test_the_prompt_alone_is_drafted_from(make_trace, extractor):
    trace = make_trace(prompt=PHRASE + PHRASE[:2], output=(*PHRASE[2:], 20))
    labels = label_shard([trace], drafter_config=CONFIG, extractor=extractor)
    assert labels.table["accepted_len"].to_pylist()[0] == 2, "factor 1: as long as the match"


def test_an_earlier_output_is_drafted_from_and_a_later_one_is_not(make_trace, extractor):
    early = make_trace("early", prompt=(7,), output=PHRASE, minute=1)
    late = make_trace("late", prompt=(8,), output=PHRASE, minute=2)
    table = label_shard([late, early], drafter_config=CONFIG, extractor=extractor).table
    accepted = {trace_id: [] for trace_id in ("early", "late")}
    for trace_id, length in _rows(table, "trace_id", "accepted_len"):
        accepted[trace_id].append(length)
    assert max(accepted["early"]) == 0
    assert max(accepted["late"]) >= 3
    assert table["trace_id"].to_pylist()[0] == "early", "rows are in time order"


def test_traces_of_equal_time_have_one_order(make_trace, extractor):
    traces = [make_trace(f"t{i}", output=PHRASE[i:] + PHRASE) for i in range(4)]
    tables = [
        label_shard(order, drafter_config=CONFIG, extractor=extractor).table
        for order in (traces, traces[::-1])
    ]
    assert tables[0].equals(tables[1])


def test_drafts_keep_to_the_room_that_decoding_has(make_trace, extractor):
    output = (5,) * 30
    budget = make_trace(output=output, sampling=SamplingParams(max_tokens=30))
    context = make_trace(
        output=output, sampling=SamplingParams(max_tokens=99), context_length=3 + 30
    )
    for trace in (budget, context):
        table = label_shard(
            [trace], drafter_config=CONFIG, extractor=extractor, cut_loops=False
        ).table
        for position, draft_len in _rows(table, "position", "draft_len"):
            assert draft_len <= 30 - position - 1
        assert table["draft_len"].to_pylist()[-2] == 1, "the last look-up with room uses it"


def test_an_output_that_stopped_early_ends_the_match(make_trace, extractor):
    phrase = tuple(range(1, 17))
    early = make_trace("early", prompt=(20,), output=phrase, minute=0)
    late = make_trace(
        "late", prompt=(21,), output=phrase[:10], minute=1, finish_reason="stop",
        sampling=SamplingParams(max_tokens=64),
    )  # fmt: skip
    table = label_shard([early, late], drafter_config=CONFIG, extractor=extractor).table
    _, draft_len, accepted_len = _rows(table, "trace_id", "draft_len", "accepted_len")[-4]
    assert (draft_len, accepted_len) == (6, 4)


def test_history_follows_the_walk_that_verifies_every_draft(make_trace, extractor):
    seen = []

    class Spy:
        def write(self, draft, context, out_F):
            outcomes = [(o.draft_len, o.accepted_len) for o in context.history.outcomes]
            seen.append((context.num_generated, outcomes, list(context.history.selections)))
            extractor.write(draft, context, out_F)

    trace = make_trace(prompt=PHRASE * 2, output=(*PHRASE, 20, *PHRASE))
    labels = label_trace(trace, drafter=SuffixDrafter(CONFIG), extractor=Spy())
    visits = np.flatnonzero(labels.is_visited_T).tolist()
    expected = [0]
    while (after := expected[-1] + labels.accepted_len_T[expected[-1]] + 1) < len(PHRASE) * 2 + 1:
        expected.append(after)
    assert visits == expected
    assert len(visits) < len(seen), "some positions were walked over"
    drafted = [int(labels.draft_len_T[v]) for v in visits]
    position, outcomes, selections = seen[-1]
    assert position == len(trace.output_token_ids) - 1
    noted = [d for v, d in zip(visits, drafted, strict=True) if d and v < position]
    assert len(selections) == len(noted)
    assert [draft_len for draft_len, _ in outcomes] == noted[: len(outcomes)]


def test_features_are_those_that_decoding_computes(make_trace, extractor):
    trace = make_trace(prompt=PHRASE * 2, output=PHRASE * 2)
    labels = label_trace(trace, drafter=SuffixDrafter(CONFIG), extractor=extractor)
    table = label_shard([trace], drafter_config=CONFIG, extractor=extractor, cut_loops=False).table
    assert table.schema.equals(labels_schema(FEATURE_NAMES, FEATURE_VERSION), check_metadata=True)
    for column, name in enumerate(FEATURE_NAMES):
        np.testing.assert_array_equal(table[name].to_numpy(), labels.features_TF[:, column])
    lengths = labels.features_TF[:, FEATURE_NAMES.index("cache_draft_len")]
    np.testing.assert_array_equal(lengths, labels.draft_len_T)


def test_a_loop_is_cut_and_counted_unless_it_is_wanted(make_trace, extractor):
    loop = make_trace("loop", output=tuple(range(20)) * 6)
    plain = make_trace("plain", output=PHRASE, minute=1)
    cut = label_shard([loop, plain], drafter_config=CONFIG, extractor=extractor)
    whole = label_shard([loop, plain], drafter_config=CONFIG, extractor=extractor, cut_loops=False)
    assert (cut.num_loops_cut, cut.num_positions) == (1, 20 + len(PHRASE))
    assert (whole.num_loops_cut, whole.num_positions) == (0, 120 + len(PHRASE))


def test_no_draft_goes_past_the_place_where_a_loop_was_cut(make_trace, extractor):
    loop = make_trace("loop", output=tuple(range(20)) * 6)
    again = make_trace("again", prompt=(21,), output=tuple(range(20)) * 6, minute=1)
    config = SuffixConfig(max_tree_depth=64, max_spec_factor=8.0)
    table = label_shard([loop, again], drafter_config=config, extractor=extractor).table
    rows = _rows(table, "trace_id", "position", "draft_len", "accepted_len")
    assert max(position + draft_len for _, position, draft_len, _ in rows) == 20 - 1
    assert all(draft_len == accepted for name, _, draft_len, accepted in rows if name == "again")
    assert sum(draft_len for *_, draft_len, _ in rows) > 0


def test_failed_traces_are_counted_and_left_out(make_trace, extractor):
    failed = make_trace("bad", output=(), finish_reason=None, error="the prompt is too long")
    labels = label_shard([failed, make_trace()], drafter_config=CONFIG, extractor=extractor)
    assert (labels.num_traces, labels.num_failed) == (1, 1)
    assert set(labels.table["trace_id"].to_pylist()) == {"t0"}


def test_a_shard_of_nothing_is_an_empty_table(extractor):
    labels = label_shard([], drafter_config=CONFIG, extractor=extractor)
    assert labels.num_positions == 0
    assert labels.table.schema.equals(labels_schema(FEATURE_NAMES, FEATURE_VERSION))


def test_sessions_stay_whole_and_scopes_apart():
    sessions = [f"session-{i}" for i in range(200)]
    shards = [shard_of("a", session, num_shards=4) for session in sessions]
    assert shards == [shard_of("a", session, num_shards=4) for session in sessions]
    assert {shards.count(shard) > 20 for shard in range(4)} == {True}
    assert shards != [shard_of("b", session, num_shards=4) for session in sessions]


def test_the_rate_is_positions_a_second(make_trace, extractor):
    traces = [make_trace(f"t{i}", output=PHRASE * 30) for i in range(3)]
    assert label_rate(traces, drafter_config=CONFIG, extractor=extractor) > 1_000
