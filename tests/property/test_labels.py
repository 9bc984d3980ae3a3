"""Invariant 5: labels depend on the traces alone, and replay reproduces the run that was."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_ray.config import Config, NgramConfig, SuffixConfig
from hvd_ray.drafting.suffix import SuffixDrafter
from hvd_ray.engines.toy import ToyCodec, ToyEngine
from hvd_ray.payoff.cost import RowCosts
from hvd_ray.payoff.features import FeatureExtractor
from hvd_ray.payoff.policy import AlwaysCache
from hvd_ray.payoff.token_classes import TokenClasses
from hvd_ray.systems import Parts, build_cache_drafter, build_decoder, build_policy
from hvd_ray.traces.label import label_shard, shard_of
from hvd_ray.traces.oracle import replay_oracle
from hvd_ray.traces.replay import replay, summarize
from hvd_ray.traces.schema import Trace
from hvd_ray.types import Request, SamplingParams, Source
from tests.property.toy_requests import HEADLESS_SYSTEMS

EXTRACTOR = FeatureExtractor(TokenClasses.from_codec(ToyCodec(), 24))
START = datetime(2026, 1, 1, tzinfo=UTC)


class HistoryEstimator:
    """An estimate that any slip in the history would change."""

    has_survival = True

    def expected_length(self, draft, context):
        history = context.history
        recent = sum(outcome.accepted_len for outcome in history.outcomes)
        return len(draft) + recent / 3 - history.num_since_mismatch / 7 - context.room / 50

    def survival(self, draft, context):
        chance = 1 / (1 + 2.718 ** -(self.expected_length(draft, context) - 2))
        return np.cumprod(np.full(len(draft), chance, dtype=np.float32))


tokens = st.lists(st.integers(1, 4), min_size=1, max_size=40).map(tuple)


@st.composite
def trace_lists(draw):
    """Traces of two scopes and a few sessions, some at the same time, some failed."""
    count = draw(st.integers(1, 8))
    traces = []
    for number in range(count):
        output = draw(tokens)
        is_failed = draw(st.integers(0, 9)) == 0
        traces.append(
            Trace(
                trace_id=f"t{number}",
                prompt_id=str(number),
                workload="w",
                family="f",
                scope=draw(st.sampled_from(["a", "b"])),
                session_id=draw(st.sampled_from(["s0", "s1", "s2"])),
                created_at=START + timedelta(seconds=draw(st.integers(0, 3))),
                model="toy",
                tokenizer_sha="letters",
                prompt_token_ids=draw(tokens),
                output_token_ids=() if is_failed else output,
                finish_reason=None if is_failed else draw(st.sampled_from(["stop", "length"])),
                sampling=SamplingParams(max_tokens=len(output) + draw(st.integers(0, 9))),
                context_length=draw(st.integers(82, 100)),
                error="failed" if is_failed else None,
            )
        )
    return traces


def _label_by_workers(traces, *, num_shards, num_workers, order):
    """Label as so many workers would: each takes whole shards, in whatever order."""
    shards = {}
    for trace in traces:
        number = shard_of(trace.scope, trace.session_id, num_shards=num_shards)
        shards.setdefault((number, trace.scope), []).append(trace)
    keys = sorted(shards)
    order.shuffle(keys)
    tables = []
    for worker in range(num_workers):
        for key in keys[worker::num_workers]:
            members = list(shards[key])
            order.shuffle(members)
            labels = label_shard(members, drafter_config=CONFIG, extractor=EXTRACTOR)
            tables.append(labels.table)
    return pa.concat_tables(tables).sort_by([("trace_id", "ascending"), ("position", "ascending")])


CONFIG = SuffixConfig(max_tree_depth=12, max_spec_factor=2.0)


@settings(max_examples=60)
@given(traces=trace_lists(), num_shards=st.integers(1, 4), order=st.randoms())
def test_labels_are_the_same_for_any_number_of_workers(traces, num_shards, order):
    tables = [
        _label_by_workers(traces, num_shards=num_shards, num_workers=workers, order=order)
        for workers in (1, 2, 5)
    ]
    assert tables[0].equals(tables[1])
    assert tables[0].equals(tables[2])


@settings(max_examples=60)
@given(traces=trace_lists())
def test_every_position_is_labelled_once_and_truly(traces):
    labels = label_shard(traces, drafter_config=CONFIG, extractor=EXTRACTOR, cut_loops=False)
    rows = labels.table.select(["trace_id", "position", "draft_len", "accepted_len"]).to_pylist()
    outputs = {trace.trace_id: trace for trace in traces if trace.error is None}
    places = [(row["trace_id"], row["position"]) for row in rows]
    expected = {(t.trace_id, p) for t in outputs.values() for p in range(len(t.output_token_ids))}
    assert len(places) == len(set(places))
    assert set(places) == expected
    for row in rows:
        trace = outputs[row["trace_id"]]
        left = len(trace.output_token_ids) - row["position"]
        room = trace.sampling.max_tokens - row["position"] - 1
        assert 0 <= row["accepted_len"] <= min(row["draft_len"], left)
        assert row["draft_len"] <= max(0, room)


@settings(max_examples=40)
@given(traces=trace_lists())
def test_no_label_knows_of_another_scope(traces):
    together = label_shard(traces, drafter_config=CONFIG, extractor=EXTRACTOR).table
    for scope in ("a", "b"):
        own = [trace for trace in traces if trace.scope == scope]
        alone = label_shard(own, drafter_config=CONFIG, extractor=EXTRACTOR).table
        ids = pa.array([trace.trace_id for trace in own], pa.string())
        mask = pa.compute.is_in(together["trace_id"], value_set=ids)
        assert together.filter(mask).equals(alone)


requests = st.lists(
    st.tuples(
        tokens,
        st.sampled_from(["a", "b"]),
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.0, 0.8]),
            max_tokens=st.integers(1, 50),
            stop=st.sampled_from([(), ("ab",), ("c", "ba")]),
            stop_token_ids=st.sampled_from([(), (2, 3)]),
            ignore_eos=st.booleans(),
            seed=st.integers(0, 99),
        ),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=80)
@given(
    system=st.sampled_from(HEADLESS_SYSTEMS),
    asked=requests,
    engine=st.builds(
        ToyEngine,
        vocab_size=st.integers(4, 9),
        order=st.integers(1, 3),
        seed=st.integers(0, 9),
        context_length=st.integers(42, 90),
    ),
)
def test_replay_reproduces_the_steps_of_the_run(system, asked, engine):
    config = Config.model_validate(
        {
            "drafting": {
                "suffix": CONFIG.model_dump(),
                "ngram": NgramConfig(min_match=1).model_dump(),
            }
        }
    )
    parts = Parts(HistoryEstimator(), RowCosts((1, 16), (10.0, 25.0)))
    decoder = build_decoder(system, engine=engine, codec=ToyCodec(), config=config, parts=parts)
    drafter = build_cache_drafter(system, config)
    policy = build_policy(system, config, parts)
    for number, (prompt, scope, sampling) in enumerate(asked):
        prompt = tuple(token % engine.vocab_size for token in prompt)
        request = Request(f"r{number}", prompt, sampling, scope)
        done = decoder.generate(request)
        trace = Trace(
            trace_id=request.request_id,
            prompt_id="",
            workload="",
            family="",
            scope=scope,
            session_id="",
            created_at=START,
            model="toy",
            tokenizer_sha="letters",
            prompt_token_ids=prompt,
            output_token_ids=done.token_ids,
            finish_reason=done.finish_reason,
            sampling=sampling,
            context_length=engine.context_length,
        )
        live = [replace(step, draft_us=0.0, verify_us=0.0) for step in done.steps]
        assert list(replay(trace, policy, drafter=drafter).steps) == live


@settings(max_examples=60)
@given(traces=trace_lists(), base=st.floats(0.1, 9), row=st.floats(0, 5))
def test_no_policy_beats_the_oracle(traces, base, row):
    costs = RowCosts((1, 11), (base, base + 10 * row), {Source.SUFFIX: 0.01})
    policy_cache, oracle_cache = SuffixDrafter(CONFIG), SuffixDrafter(CONFIG)
    for trace in traces:
        if trace.error is None:
            run = replay(trace, AlwaysCache(), drafter=policy_cache, costs=costs)
            best = replay_oracle(trace, drafter=oracle_cache, costs=costs)
            assert best.num_tokens == run.num_tokens == len(trace.output_token_ids)
            assert best.cost_ms <= run.cost_ms + 1e-9
            summary = summarize([best])
            assert summary.precision in (None, 1.0)
            assert summary.recall in (None, 1.0)
