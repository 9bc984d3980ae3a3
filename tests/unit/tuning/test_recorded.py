"""Recorded look-ups replay as live ones do, step by step."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hvd_ray.config import SuffixConfig
from hvd_ray.drafting.suffix import SuffixDrafter
from hvd_ray.payoff.cost import PassCost, RowCosts
from hvd_ray.payoff.cost_policy import CostPolicy
from hvd_ray.payoff.policy import (
    AlwaysCache,
    MatchRule,
    NeverDraft,
    ScoreRule,
    ThresholdPolicy,
    is_rule,
)
from hvd_ray.traces.replay import ModelDrafts, replay
from hvd_ray.traces.schema import Trace
from hvd_ray.tuning.recorded import ReplaySet, look_up
from hvd_ray.types import Source

COSTS = RowCosts((1, 8, 64), (40.0, 44.0, 90.0))


class ByScore:
    """A stand-in predictor: the cache's score, and a curve that falls with it."""

    has_survival = True

    def expected_length(self, draft, context):
        known = 0.0 if draft.evidence_E is None else float(draft.evidence_E.sum())
        return draft.score + 0.1 * len(context.history.outcomes) + 0.01 * known

    def survival(self, draft, context):
        return 0.9 ** np.arange(1, len(draft) + 1) * (1 if context.history.outcomes else 0.5)


POLICIES = [
    NeverDraft(),
    AlwaysCache(),
    MatchRule(3),
    ScoreRule(2),
    ThresholdPolicy(ByScore(), 2.0),
    CostPolicy(ByScore(), COSTS),
]


def _live(traces, policy, judged):
    """Replay all traces in order with one live cache; the judged ones' replays."""
    config = SuffixConfig()
    drafter = SuffixDrafter(config.for_rules() if is_rule(policy) else config)
    runs = [replay(trace, policy, drafter=drafter, costs=COSTS) for trace in traces]
    return [run for run, trace in zip(runs, traces, strict=True) if judged(trace)]


def _record(traces, judged):
    found = look_up(traces, judged, drafter=SuffixDrafter(SuffixConfig()))
    kept, records, rule_records = zip(*found, strict=True)
    return ReplaySet(kept, records, rule_records, (None,) * len(kept))


def _is_judged(trace: Trace) -> bool:
    return int(trace.prompt_id) % 3 != 0


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
def test_every_policy_decides_as_with_a_live_cache(phrases, policy):
    recorded = _record(phrases, _is_judged)
    live = _live(phrases, policy, _is_judged)
    assert recorded.replays(policy, COSTS) == live
    assert len(live) < len(phrases)
    if not isinstance(policy, NeverDraft):
        assert any(step.drafted for run in live for step in run.steps)


def test_traces_that_are_not_judged_fill_the_cache(phrases):
    alone = _record([t for t in phrases if _is_judged(t)], _is_judged)
    among = _record(phrases, _is_judged)
    passes = [
        sum(len(run.steps) for run in found.replays(AlwaysCache(), PassCost()))
        for found in (alone, among)
    ]
    assert passes[1] < passes[0]


def test_a_set_comes_back_from_disk_as_it_was(phrases, tmp_path: Path):
    recorded = _record(phrases, _is_judged)
    models = tuple(
        ModelDrafts(Source.EAGLE3, np.arange(len(t.output_token_ids), dtype=np.int32) % 5, 3, 70)
        if i % 2
        else None
        for i, t in enumerate(recorded.traces)
    )
    recorded = replace(recorded, models=models)
    recorded.save(tmp_path / "set")
    found = ReplaySet.load(tmp_path / "set")
    assert found.traces == recorded.traces
    policy = CostPolicy(ByScore(), COSTS)
    assert found.replays(policy, COSTS) == recorded.replays(policy, COSTS)
    assert found.replays(ScoreRule(), COSTS) == recorded.replays(ScoreRule(), COSTS)
    assert [m is None for m in found.models] == [m is None for m in models]
    assert {(m.max_draft_tokens, m.context_length) for m in found.models if m} == {(3, 70)}
    sources = {step.source for run in found.replays(policy, COSTS) for step in run.steps}
    assert Source.EAGLE3 in sources


def test_one_trace_alone_comes_back_too(phrases, tmp_path: Path):
    recorded = _record(phrases[:1], lambda _trace: True)
    recorded.save(tmp_path)
    found = ReplaySet.load(tmp_path)
    assert found.replays(AlwaysCache(), COSTS) == recorded.replays(AlwaysCache(), COSTS)


def test_each_trace_is_heard_of_once(phrases):
    heard = []
    look_up(phrases, _is_judged, drafter=SuffixDrafter(SuffixConfig()), on_trace=heard.append)
    assert heard == list(phrases)
