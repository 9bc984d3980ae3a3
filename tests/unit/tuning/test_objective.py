"""A trial trains and is judged by replay, at its rungs and at its end."""

from dataclasses import replace

import numpy as np
import pytest

from hvd_ray.config import Config
from hvd_ray.payoff.cost import RowCosts
from hvd_ray.payoff.estimator import PredictorEstimator
from hvd_ray.payoff.features import (
    FEATURE_GROUPS,
    FEATURE_NAMES,
    FeatureExtractor,
    hidden_features,
)
from hvd_ray.payoff.policy import AlwaysCache, NeverDraft, ThresholdPolicy
from hvd_ray.traces.replay import summarize
from hvd_ray.tuning.contest import contest
from hvd_ray.tuning.data import fit_labels, label_table, open_material
from hvd_ray.tuning.objective import SPEED, TrialInputs, run_trial, summaries
from hvd_ray.tuning.space import Asha, TrialSettings
from tests.unit.tuning.conftest import Data

COSTS = RowCosts((1, 8, 64), (40.0, 44.0, 90.0))
SMALL = {"depth": 1, "width": 8, "epochs": 5, "learning_rate": 0.01}


@pytest.fixture(scope="module")
def inputs(data: Data) -> TrialInputs:
    material = open_material(data.labels, data.traces, Config())
    judging = frozenset({"chat-0", "chat-3", "tools-1", "tools-5"})
    return TrialInputs(
        labels=fit_labels(label_table(data.labels), judging),
        validation=material.replay_set(material.shards(), lambda t: t.session_id in judging),
        classes=data.classes,
        costs=COSTS,
        asha=Asha(grace_epochs=1, reduction_factor=2),
        seed=3,
        model="toy",
        tokenizer_sha="letters",
    )


def reports(settings: TrialSettings, inputs: TrialInputs) -> list:
    found: list = []
    run_trial(settings, inputs, lambda predictor, metrics: found.append((predictor, metrics)))
    return found


def test_it_reports_at_every_rung_and_at_the_end(inputs: TrialInputs) -> None:
    found = reports(TrialSettings(**SMALL), inputs)
    assert [metrics["epoch"] for _, metrics in found] == [1, 2, 4, 5]
    assert found[0][1]["train_loss"] > found[-1][1]["train_loss"]


def test_the_speed_is_that_of_replay_under_the_trial_s_policy(inputs: TrialInputs) -> None:
    settings = TrialSettings(**SMALL, tau=2.0)
    predictor, metrics = reports(settings, inputs)[-1]
    policy = ThresholdPolicy(PredictorEstimator(predictor, FeatureExtractor(inputs.classes)), 2.0)
    replays = inputs.validation.replays(policy, COSTS)
    assert metrics[SPEED] == pytest.approx(summarize(replays).tokens_per_second)
    tools = summaries(inputs.validation.traces, replays)["tools"]
    assert metrics["speed/tools"] == pytest.approx(tools.tokens_per_second)
    assert {name for name in metrics if name.startswith("speed/")} == {"speed/chat", "speed/tools"}


def test_the_same_trial_ends_the_same(inputs: TrialInputs) -> None:
    settings = TrialSettings(**SMALL, policy="hvd_cost", kind="survival")
    first, second = (reports(settings, inputs)[-1][1] for _ in range(2))
    timing = {"train_s", "replay_s"}
    assert {k: v for k, v in first.items() if k not in timing} == {
        k: v for k, v in second.items() if k not in timing
    }


def test_an_exception_of_the_report_ends_the_trial(inputs: TrialInputs) -> None:
    """How Ray Tune stops a trial early."""

    class StoppedError(Exception):
        pass

    heard = []

    def report(_predictor, metrics) -> None:
        heard.append(metrics["epoch"])
        raise StoppedError

    with pytest.raises(StoppedError):
        run_trial(TrialSettings(**SMALL), inputs, report)
    assert heard == [1]


def test_a_group_that_is_left_out_has_no_say(inputs: TrialInputs) -> None:
    settings = TrialSettings(**SMALL, without="recent_history")
    predictor, _ = reports(settings, inputs)[-1]
    columns = [FEATURE_NAMES.index(name) for name in FEATURE_GROUPS["recent_history"]]
    features_NF = inputs.labels.test.features_NF.copy()
    before = predictor.predict(features_NF).expected_B
    features_NF[:, columns] = np.random.default_rng(0).normal(0, 100, (len(features_NF), 1))
    assert (predictor.predict(features_NF).expected_B == before).all()
    sighted, _ = reports(TrialSettings(**SMALL), inputs)[-1]
    assert (sighted.predict(features_NF).expected_B != before).any()


def test_masking_leaves_the_shared_labels_as_they_are(inputs: TrialInputs) -> None:
    train = inputs.labels.train
    before = train.features_NF.copy()
    changed = train.without(hidden_features("cache_match"))
    assert (train.features_NF == before).all()
    assert (changed.features_NF != before).any()
    assert train.without(hidden_features("nothing")) is train


def test_a_contest_names_the_faster_and_how_sure_that_is(inputs: TrialInputs) -> None:
    rows = contest({"cache": AlwaysCache(), "none": NeverDraft()}, inputs.validation, COSTS, seed=0)
    whole = rows[0]
    assert [row.workload for row in rows] == ["all", "chat", "tools"]
    assert whole.speeds["none"] == pytest.approx(25.0)
    assert whole.gap.estimate.ratio == pytest.approx(whole.speeds["cache"] / 25.0)
    assert whole.gap.is_better
    assert (whole.gap.unit, rows[1].gap.unit) == ("session", "prompt")
    assert whole.num_tokens == sum(row.num_tokens for row in rows[1:])


def test_nothing_is_better_than_itself_or_by_one_prompt(inputs: TrialInputs) -> None:
    same = contest({"a": AlwaysCache(), "b": AlwaysCache()}, inputs.validation, COSTS, seed=0)
    assert not same[0].gap.is_better
    few = inputs.validation
    few = replace(
        few,
        traces=few.traces[:1],
        records=few.records[:1],
        rule_records=few.rule_records[:1],
        models=few.models[:1],
    )
    row = contest({"a": AlwaysCache(), "b": NeverDraft()}, few, COSTS, seed=0)[0]
    assert row.gap.estimate.ratio > 1
    assert not row.gap.is_better
    assert row.as_json()["gap"]["interval"] is None
