"""Sweep files: what they may say, what a trial is then given."""

from pathlib import Path
from typing import Any

import pytest

from hvd_ray.errors import UserError
from hvd_ray.payoff.cost_policy import CostPolicy
from hvd_ray.payoff.features import FEATURE_GROUPS, FEATURE_NAMES, hidden_features
from hvd_ray.payoff.policy import ThresholdPolicy
from hvd_ray.tuning.knobs import Choice, Range, parse_knob
from hvd_ray.tuning.space import Asha, Space, TrialSettings, load_sweep

REPO = Path(__file__).parents[3]


class Scripted:
    """An Optuna trial that answers from a script, else with the first or lowest value."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def _answer(self, name: str, default: Any) -> Any:
        self.asked.append(name)
        return self.answers.get(name, default)

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        return self._answer(name, choices[0])

    def suggest_int(self, name: str, low: int, high: int) -> Any:  # noqa: ARG002
        return self._answer(name, low)

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> Any:  # noqa: ARG002
        return self._answer(name, low)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trails=3", "setting trails: unknown; the settings are listed in hvd_ray/tuning/space.py"),
        ("space.dept=1", "setting space.dept: unknown"),
        ("asha.grace=1", "setting asha.grace: unknown"),
        ("trials=0", "setting trials: Input should be greater than or equal to 1, got 0"),
        ("space.depth={int: [0, 99]}", r"setting space\.depth: .*less than or equal to 8"),
        ("space.kind={choice: [mlp, svm]}", "setting space.kind: Input should be 'mlp' or"),
        ("space.width=wide", "setting space.width: Input should be a valid integer"),
        ("space.tau={log: [0, 3]}", "setting space.tau: log needs numbers above 0"),
        ("space.tau={uniform: [3, 1]}", "uniform: 3 is not below 1"),
        ("space.tau={normal: [3, 1]}", "'normal' is none of choice, int, uniform, log"),
        ("space.tau={choice: []}", "choice needs a list of values"),
        ("space.width={choice: [8, 8]}", "choice holds a value twice"),
        ("space.width={int: [1.5, 8]}", "int takes whole numbers"),
        ("space.without=everything", "'everything' is no feature group; there are cache_match"),
        ("space.cost.hysteresis_of_nobody=1", "is no knob of hvd_cost; there are"),
        ("space.cost.estimator=1", "'estimator' is no knob of hvd_cost"),
        ("space.cost.objective=best", "objective: Input should be 'rate' or 'cycle'"),
    ],
)
def test_what_no_sweep_may_say(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_sweep(None, [override])
    assert "\n" not in str(caught.value)


def test_overrides_go_to_the_sweep_or_to_the_configuration() -> None:
    sweep, others = load_sweep(None, ["trials=3", "tracking.uri=none", "seed=7", "space.depth=1"])
    assert (sweep.trials, sweep.seed, sweep.space.depth) == (3, 7, Choice((1,)))
    assert others == ["tracking.uri=none"]


@pytest.mark.parametrize(
    "path", sorted((REPO / "tune_configs").glob("*.yaml")), ids=lambda p: p.name
)
def test_the_sweep_files_of_the_checkout_load(path: Path) -> None:
    sweep, others = load_sweep(path)
    assert others == []
    for policy in ("hvd_tau", "hvd_cost"):
        TrialSettings.from_flat(sweep.space.suggest(Scripted(policy=policy)))


def test_without_a_file_a_sweep_is_the_whole_one() -> None:
    assert load_sweep(REPO / "tune_configs" / "payoff.yaml") == load_sweep(None)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("space: {tau: {uniform: [1, 2}")
    with pytest.raises(UserError, match=r"s\.yaml: not valid YAML"):
        load_sweep(tmp_path / "s.yaml")


def test_under_hvd_tau_no_cost_knob_is_asked() -> None:
    trial = Scripted(policy="hvd_tau", kind="mlp", tau=3.5)
    row = Space().suggest(trial)
    assert (row["tau"], row["kind"]) == (3.5, "mlp")
    assert not any(name.startswith("cost.") for name in (*row, *trial.asked))


def test_under_hvd_cost_the_kind_is_survival_and_tau_is_not_asked() -> None:
    trial = Scripted(policy="hvd_cost", **{"cost.objective": "cycle"})
    row = Space().suggest(trial)
    assert (row["kind"], row["cost.objective"]) == ("survival", "cycle")
    assert "tau" not in row
    assert {"tau", "kind"}.isdisjoint(trial.asked)


def test_a_fixed_knob_is_not_searched_but_stands_in_the_row() -> None:
    trial = Scripted(policy="hvd_tau")
    row = load_sweep(None, ["space.depth=1", "space.width={choice: [16]}"])[0].space.suggest(trial)
    assert (row["depth"], row["width"]) == (1, 16)
    assert {"depth", "width"}.isdisjoint(trial.asked)


@pytest.mark.parametrize(
    "settings",
    [
        TrialSettings(),
        TrialSettings(tau=2.5, without="decode_state+draft_structure", depth=0),
        TrialSettings(policy="hvd_cost", kind="survival", cost={"objective": "cycle"}),
    ],
)
def test_a_trial_s_row_says_everything(settings: TrialSettings) -> None:
    assert TrialSettings.from_flat(settings.flat()) == settings


def test_settings_become_training_and_policy() -> None:
    estimator: Any = object()
    costs: Any = object()
    training = TrialSettings(depth=3, width=16, learning_rate=0.01).training(5)
    assert (training.hidden, training.learning_rate, training.seed) == ((16, 16, 16), 0.01, 5)
    tau = TrialSettings(tau=2).decider(estimator, costs)
    assert isinstance(tau, ThresholdPolicy)
    assert tau.tau == 2
    cost = TrialSettings(policy="hvd_cost", cost={"objective": "cycle"}).decider(estimator, costs)
    assert isinstance(cost, CostPolicy)
    assert cost.objective == "cycle"


def test_features_left_out_are_those_of_the_named_groups() -> None:
    masked = hidden_features(TrialSettings(without="decode_state+recent_history").without)
    expected = {*FEATURE_GROUPS["decode_state"], *FEATURE_GROUPS["recent_history"]}
    assert {FEATURE_NAMES[index] for index in masked} == expected
    assert hidden_features(TrialSettings().without) == ()


def test_the_paper_s_settings_are_tried_first_as_far_as_the_space_holds_them() -> None:
    point = Space().paper_point()
    assert point["tau"] == 6.0
    assert point["width"] == 256
    narrow = load_sweep(None, ["space.width={choice: [8, 16]}", "space.tau=3"])[0].space
    assert {"width", "tau"}.isdisjoint(narrow.paper_point())


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["space.policy=hvd_cost", "space.tau=3"], "space.tau has no effect"),
        (["space.policy=hvd_cost", "space.kind=mlp"], "space.kind has no effect"),
        (["space.policy=hvd_tau", "space.cost.objective=rate"], "space.cost has no effect"),
    ],
)
def test_an_idle_knob_warns(given: list[str], named: str) -> None:
    with pytest.warns(UserWarning, match=named):
        load_sweep(None, given)


def test_rungs_rise_by_the_factor_and_end_with_the_trial() -> None:
    assert Asha(grace_epochs=3, reduction_factor=3).rungs(20) == {3, 9, 20}
    assert Asha(grace_epochs=3, reduction_factor=3).rungs(2) == {2}
    assert Asha(grace_epochs=1, reduction_factor=2).rungs(8) == {1, 2, 4, 8}


@pytest.mark.parametrize(
    ("raw", "inside", "outside"),
    [
        ({"int": [1, 3]}, 3, 4),
        ({"uniform": [0, 1]}, 0.5, 1.5),
        ({"choice": ["a", "b"]}, "b", "c"),
        (4, 4, 5),
    ],
)
def test_a_knob_knows_what_it_holds(raw: Any, inside: Any, outside: Any) -> None:
    knob = parse_knob(raw)
    assert knob.holds(inside)
    assert not knob.holds(outside)
    assert parse_knob(knob.plain()) == knob


def test_epochs_bound_the_rungs() -> None:
    assert Space(epochs=Range("int", 4, 11)).max_epochs == 11
    assert Space(epochs=Choice((4, 30, 7))).max_epochs == 30
