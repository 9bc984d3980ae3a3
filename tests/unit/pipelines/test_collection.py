"""Collecting, without Ray: the plan, the rows, and what a kill leaves behind."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from hvd_ray.bench.plan import Sampling
from hvd_ray.bench.workloads import load_prompts
from hvd_ray.config import Config
from hvd_ray.engines.toy import ToyCodec, ToyEngine
from hvd_ray.errors import UserError
from hvd_ray.pipelines.collection import (
    TRACES_PER_PART,
    CollectShard,
    TargetFacts,
    collect_shard,
    plan_shards,
    plan_traces,
    summarise,
)
from hvd_ray.pipelines.shards import KEPT
from hvd_ray.systems import build_cache_drafter, build_decoder, build_policy
from hvd_ray.traces.replay import replay
from hvd_ray.traces.store import read_steps, read_traces

ENGINE = ToyEngine(order=2, vocab_size=27, context_length=90)
TARGET = TargetFacts("toy", "f00d", "letters", ENGINE.capabilities)
SAMPLING = Sampling(max_tokens=20, seed=1)
EPOCH = datetime.fromtimestamp(0, UTC)


@pytest.fixture
def prompts(tmp_path: Path):
    """Forty prompts in ten sessions, and one that is over the context."""
    words = ("abc", "bcab", "cabba", "dad")
    lines = [
        f'{{"id": "p{i}", "session_id": "s{i // 4}", "prompt": "{words[i % 4]}{words[i % 3]}"}}'
        for i in range(40)
    ]
    lines.insert(5, f'{{"id": "long", "session_id": "s1", "prompt": "{"ab" * 60}"}}')
    file = tmp_path / "words.jsonl"
    file.write_text("\n".join(lines))
    return load_prompts([file]).prompts


def _plan(prompts, policy="suffix"):
    return plan_traces(prompts, codec=ToyCodec(), target=TARGET, sampling=SAMPLING, policy=policy)


def _decoder(system="suffix"):
    return build_decoder(system, engine=ENGINE, codec=ToyCodec(), config=Config())


def _collect(shards, out, system="suffix", report=print):
    for shard in shards:
        collect_shard(shard, decoder=_decoder(system), out=out, report=report)


def _rows(out):
    """Everything but the clock."""
    traces = sorted(read_traces(out), key=lambda trace: trace.trace_id)
    steps = {
        trace_id: [replace(step, draft_us=0, verify_us=0) for step in of_trace]
        for trace_id, of_trace in read_steps(out).items()
    }
    return [replace(trace, created_at=EPOCH) for trace in traces], steps


def test_every_prompt_becomes_one_trace_with_its_steps(prompts, tmp_path):
    shards = plan_shards(_plan(prompts))
    counts = []
    _collect(shards, tmp_path, report=counts.append)
    summary = summarise(tmp_path, shards)
    traces = read_traces(tmp_path)
    assert sorted(trace.prompt_id for trace in traces) == sorted(p.id for p in prompts)
    assert (summary.traces, summary.failed) == (41, 1)
    assert summary.tokens == sum(len(trace.output_token_ids) for trace in traces)
    steps = read_steps(tmp_path)
    assert summary.target_passes == sum(map(len, steps.values()))
    for trace in traces:
        emitted = sum(step.emitted for step in steps.get(trace.trace_id, ()))
        assert emitted == len(trace.output_token_ids)
    assert sum(count.get("done", 0) for count in counts) == 41
    assert sum(count.get(KEPT, 0) for count in counts) == sum(len(s.parts) for s in shards)
    assert sum(count.get("tokens", 0) for count in counts) == summary.tokens


def test_a_prompt_that_cannot_work_keeps_its_id_and_says_why(prompts, tmp_path):
    _collect(plan_shards(_plan(prompts)), tmp_path)
    (failed,) = [trace for trace in read_traces(tmp_path) if trace.error is not None]
    assert failed.prompt_id == "long"
    assert "context" in failed.error
    assert "words.jsonl:6" in failed.error
    assert failed.output_token_ids == ()


def test_when_no_prompt_can_work_the_first_ones_reason_is_the_answer(prompts):
    long = [prompt for prompt in prompts if prompt.id == "long"]
    with pytest.raises(UserError, match="context"):
        _plan(long)
    with pytest.raises(UserError, match="and 1 more like it"):
        _plan(long * 2)


def test_a_fault_of_one_request_does_not_end_the_run(prompts, tmp_path, monkeypatch):
    forward = ToyEngine.forward

    def forward_unless_it_starts_with_d(self, token_ids, cache, **how):
        if cache.length == 0 and token_ids[0] == 4:
            raise RuntimeError("out of memory\nand much more")
        return forward(self, token_ids, cache, **how)

    monkeypatch.setattr(ToyEngine, "forward", forward_unless_it_starts_with_d)
    shards = plan_shards(_plan(prompts))
    _collect(shards, tmp_path)
    errors = [trace.error for trace in read_traces(tmp_path) if trace.prompt_id != "long"]
    assert errors.count("decoding failed: out of memory") == 10
    assert errors.count(None) == 30


def test_sessions_stay_together_and_in_order(prompts):
    shards = plan_shards(_plan(prompts))
    places = {}
    for shard in shards:
        order = [trace for part in shard.parts for trace in part.traces]
        for trace in order:
            assert places.setdefault(trace.session_id, shard) is shard
        numbers = [int(trace.prompt_id[1:]) for trace in order if trace.error is None]
        assert numbers == sorted(numbers), "file order"
        assert all(len(part.traces) <= TRACES_PER_PART for part in shard.parts)
    assert len(shards) > 1
    sizes = [shard.num_traces for shard in shards]
    assert sizes == sorted(sizes, reverse=True)


def test_the_ids_name_prompt_model_and_sampling(prompts):
    ids = [trace.trace_id for trace in _plan(prompts)]
    assert len(set(ids)) == len(ids), "equal texts of different prompts are different traces"
    assert ids == [trace.trace_id for trace in _plan(prompts, policy="greedy")]
    warmer = plan_traces(
        prompts, codec=ToyCodec(), target=TARGET, sampling=Sampling(20, 0.5, 1), policy="suffix"
    )
    other = plan_traces(
        prompts,
        codec=ToyCodec(),
        target=replace(TARGET, fingerprint="beef"),
        sampling=SAMPLING,
        policy="suffix",
    )
    good = [i for i, trace in enumerate(_plan(prompts)) if trace.error is None]
    for changed in (warmer, other):
        assert not {ids[i] for i in good} & {changed[i].trace_id for i in good}


def test_the_policy_changes_no_trace(prompts, tmp_path):
    outputs = []
    for system in ("greedy", "suffix", "ngram"):
        out = tmp_path / system
        _collect(plan_shards(_plan(prompts, system)), out, system)
        outputs.append({trace.trace_id: trace.output_token_ids for trace in read_traces(out)})
    assert outputs[0] == outputs[1] == outputs[2]


class KilledError(BaseException):
    """Stands for `kill -9`: nothing catches it."""


def _killed_after(num_traces, shards, out):
    done = 0

    def report(counts):
        nonlocal done
        done += counts.get("done", 0)
        if done == num_traces:
            raise KilledError

    with pytest.raises(KilledError):
        _collect(shards, out, report=report)


@pytest.mark.parametrize("num_traces", [1, 8, 13, 40])
def test_a_run_that_was_killed_ends_with_the_same_rows(prompts, tmp_path, num_traces):
    shards = plan_shards(_plan(prompts))
    _collect(shards, tmp_path / "whole")
    _killed_after(num_traces, shards, tmp_path / "killed")
    left = [shard for shard in shards if not shard.is_finished(tmp_path / "killed")]
    assert left
    _collect(left, tmp_path / "killed")
    assert _rows(tmp_path / "killed") == _rows(tmp_path / "whole"), "steps and all"
    assert summarise(tmp_path / "killed", shards).traces == 41


def test_what_is_finished_is_not_decoded_again(prompts, tmp_path):
    shards = plan_shards(_plan(prompts))
    _collect(shards, tmp_path)
    before = ENGINE.num_passes
    _collect(shards, tmp_path)
    assert ENGINE.num_passes == before


def test_steps_of_a_part_without_traces_are_written_over(prompts, tmp_path):
    """Killed between the two files of a part: the steps are there and the traces are not."""
    shards = plan_shards(_plan(prompts))
    _collect(shards, tmp_path)
    whole = _rows(tmp_path)
    shards[0].parts[0].traces_file(tmp_path).unlink()
    _collect(shards, tmp_path)
    assert _rows(tmp_path) == whole


def test_replaying_a_shard_gives_the_steps_on_disk(prompts, tmp_path):
    shard: CollectShard = plan_shards(_plan(prompts))[0]
    _collect([shard], tmp_path)
    steps = read_steps(tmp_path)
    drafter, policy = build_cache_drafter("suffix", Config()), build_policy("suffix", Config())
    traces = sorted(read_traces(tmp_path), key=lambda trace: trace.created_at)
    for trace in traces:
        if trace.error is None:
            again = replay(trace, policy, drafter=drafter).steps
            live = [replace(step, draft_us=0, verify_us=0) for step in steps[trace.trace_id]]
            assert list(again) == live
    assert any(step.accepted > 2 for of_trace in steps.values() for step in of_trace)


class Deadly:
    """A decoder whose process dies at one request."""

    def __init__(self, decoder, request_id):
        self._decoder, self._request_id = decoder, request_id
        self.cache_drafter = decoder.cache_drafter

    def generate(self, request):
        if request.request_id == self._request_id:
            raise KilledError
        return self._decoder.generate(request)


def test_a_trace_that_kills_its_workers_becomes_an_error(prompts, tmp_path):
    shards = plan_shards(_plan(prompts))
    poisoned = shards[0].parts[0].traces[1]

    def worker(run: str) -> None:
        decoder = Deadly(_decoder(), poisoned.trace_id)
        collect_shard(shards[0], decoder=decoder, out=tmp_path, report=print, run=run)

    for run in ("killed once", "ours", "ours", "ours"):
        with pytest.raises(KilledError):
            worker(run)
    worker("ours")
    traces = {trace.trace_id: trace for trace in read_traces(tmp_path)}
    assert traces[poisoned.trace_id].error == "given up: 3 workers died while decoding it"
    assert len(traces) == shards[0].num_traces
    assert sum(trace.error is not None for trace in traces.values()) == 1 + sum(
        trace.error is not None for part in shards[0].parts for trace in part.traces
    )
    assert not list((tmp_path / "suspects").iterdir())
