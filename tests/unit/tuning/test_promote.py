"""The alias moves only to a challenger that replays test sessions faster, or by force."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_ray.cli import main
from hvd_ray.commands.promote import _show as show
from hvd_ray.config import Config, PolicyConfig
from hvd_ray.errors import UserError
from hvd_ray.payoff.cost_file import CostFile, CostKey, write_costs
from hvd_ray.payoff.features import NUM_FEATURES
from hvd_ray.payoff.network import Network
from hvd_ray.payoff.predictor import MlpPredictor, PredictorCard
from hvd_ray.tracking import (
    RegisteredPredictor,
    register_predictor,
    registry,
    resolve_predictor,
    tracked,
)
from hvd_ray.tracking.promotion import find_alias
from hvd_ray.tracking.store import open_store
from hvd_ray.tuning import promote as module
from hvd_ray.tuning.promote import PromoteOptions, promote
from tests.unit.tuning.conftest import Data
from tests.unit.tuning.test_watch import Silent

Register = Callable[..., RegisteredPredictor]
ALWAYS, NEVER = 64.0, -1.0


def constant(expected: float, *, num_outputs: int = 1, **training: Any) -> MlpPredictor:
    """Says the same of every draft, within the draft's length."""
    weight_IO = np.zeros((NUM_FEATURES, num_outputs), np.float32)
    bias_O = np.full(num_outputs, expected, np.float32)
    low_F = np.zeros(NUM_FEATURES, np.float32)
    network = Network([(weight_IO, bias_O)], low_F=low_F, high_F=low_F + 1)
    kind = "mlp" if num_outputs == 1 else "survival"
    return MlpPredictor(network, PredictorCard(kind=kind, model="toy", training=training))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One store for all tests here; each has a target of its own in it."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture
def config(
    store: str, data: Data, hvd_home: Path, request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Config:  # fmt: skip
    """Decides by tau = 0, so that constant predictors mean always and never."""
    assert hvd_home
    monkeypatch.setattr(module, "token_classes_of", lambda _model, _sha: data.classes)
    settings = {"tracking": {"uri": store}, "policy": {"tau": 0.0}, "model": request.node.name}
    return Config.model_validate(settings)


@pytest.fixture
def register(config: Config, tmp_path: Path) -> Register:
    def call(predictor: MlpPredictor, alias: str, **params: Any) -> RegisteredPredictor:
        folder = tmp_path / f"{alias}-{len(list(tmp_path.iterdir()))}"
        predictor.save(folder)
        with tracked(config, run_name="made") as tracker:
            tracker.log_params(params)
            return register_predictor(tracker, folder, config=config, alias=alias)

    return call


@pytest.fixture
def options(data: Data, config: Config, monkeypatch: pytest.MonkeyPatch) -> PromoteOptions:
    """On the toy traces, but as if they were the configured model's."""
    real = module.open_material

    def open_material(labels: Path, traces: Path, given: Config) -> Any:
        return real(labels, traces, given.model_copy(update={"model": config.model}))

    monkeypatch.setattr(module, "open_material", open_material)
    return PromoteOptions(data.labels, data.traces, "pass")


def aliases(config: Config) -> dict[str, str | None]:
    found = {alias: find_alias(alias, config=config) for alias in ("champion", "challenger")}
    return {alias: None if v is None else v.version for alias, v in found.items()}


def tags_of(config: Config, version: RegisteredPredictor) -> dict[str, str]:
    client = open_store(str(config.tracking.uri)).client
    return dict(client.get_model_version(version.name, version.version).tags)


def test_the_faster_challenger_becomes_champion(
    config: Config, register: Register, options: PromoteOptions
) -> None:
    register(constant(NEVER), "champion")
    challenger = register(constant(ALWAYS), "challenger")
    outcome = promote(options, config, progress=Silent())
    assert outcome.is_promoted
    gap = outcome.rows[0].gap
    assert gap.estimate.low > 1.2
    assert outcome.rows[0].speeds["champion"] == pytest.approx(1.0), "a token a pass"
    assert outcome.to_serve is not None
    assert "policy.name=hvd_tau" in outcome.to_serve
    assert aliases(config) == {"champion": "2", "challenger": None}
    assert resolve_predictor(config=config) == resolve_predictor(challenger.ref, config=config)
    tags = tags_of(config, challenger)
    assert tags["promotion_forced"] == "false"
    assert tags["promoted_over"] == "1"
    assert json.loads(tags["promotion_gap"])["interval"][0] == pytest.approx(gap.estimate.low)


def test_the_slower_challenger_stays_and_can_be_forced(
    config: Config, register: Register, options: PromoteOptions
) -> None:
    register(constant(ALWAYS), "champion")
    challenger = register(constant(NEVER), "challenger")
    outcome = promote(options, config, progress=Silent())
    assert not outcome.is_promoted
    assert outcome.rows[0].gap.estimate.high < 1
    assert aliases(config) == {"champion": "1", "challenger": "2"}
    assert "promotion_forced" not in tags_of(config, challenger)

    forced = PromoteOptions(options.labels, options.traces, "pass", is_forced=True)
    outcome = promote(forced, config, progress=Silent())
    assert outcome.is_promoted
    assert outcome.reason == "forced, though the interval does not lie above 1"
    assert aliases(config) == {"champion": "2", "challenger": None}
    tags = tags_of(config, challenger)
    assert tags["promotion_forced"] == "true"
    assert json.loads(tags["promotion_gap"])["ratio"] < 1


def test_the_answer_says_what_serving_by_the_champion_still_needs(
    config: Config,
    register: Register,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A champion without a cost table serves nobody, and the chain of jobs measured none."""
    register(constant(ALWAYS, num_outputs=32), "challenger")
    outcome = promote(PromoteOptions(), config, progress=Silent())
    assert outcome.is_promoted
    told = f"to serve by it: type `hvd calibrate model={config.model}` on the machine that serves"
    show(outcome)
    assert told in capsys.readouterr().out
    assert outcome.as_json()["to_serve"] == outcome.to_serve

    register(constant(ALWAYS, num_outputs=32), "challenger")
    monkeypatch.setattr(module, "find_costs", lambda _config: "a table")
    forced = promote(PromoteOptions(is_forced=True), config, progress=Silent())
    assert forced.is_promoted
    assert forced.to_serve is None
    show(forced)
    assert "to serve" not in capsys.readouterr().out


def test_an_equal_challenger_stays(
    config: Config, register: Register, options: PromoteOptions
) -> None:
    register(constant(ALWAYS), "champion")
    register(constant(ALWAYS), "challenger")
    outcome = promote(options, config, progress=Silent())
    assert not outcome.is_promoted
    assert outcome.rows[0].gap.estimate.ratio == pytest.approx(1.0)


def test_the_first_challenger_has_nobody_to_beat(config: Config, register: Register) -> None:
    register(constant(NEVER), "challenger")
    outcome = promote(PromoteOptions(), config, progress=Silent())
    assert (outcome.is_promoted, outcome.reason) == (True, "there was no champion")
    assert outcome.rows == ()
    assert aliases(config) == {"champion": "1", "challenger": None}


def test_it_remembers_where_the_challenger_s_sweep_read(
    config: Config, register: Register, options: PromoteOptions, data: Data
) -> None:
    register(constant(NEVER), "champion")
    places = {"labels": str(data.labels), "traces": str(data.traces), "costs": "pass"}
    register(constant(ALWAYS), "challenger", **places)
    assert options.costs == "pass"
    assert promote(PromoteOptions(), config, progress=Silent()).is_promoted


def test_without_a_place_it_says_what_to_give(config: Config, register: Register) -> None:
    register(constant(NEVER), "champion")
    register(constant(ALWAYS), "challenger")
    with pytest.raises(UserError, match="give --labels LABELS_DIR and --traces TRACES_DIR"):
        promote(PromoteOptions(), config, progress=Silent())


def test_without_a_challenger_it_says_how_to_make_one(config: Config, register: Register) -> None:
    with pytest.raises(UserError, match=r"no challenger .* `hvd tune` or `hvd train`"):
        promote(PromoteOptions(), config, progress=Silent())
    register(constant(NEVER), "champion")
    with pytest.raises(UserError, match="no challenger"):
        promote(PromoteOptions(), config, progress=Silent())


def test_it_also_shows_the_challenger_as_it_was_tuned(
    config: Config, register: Register, options: PromoteOptions
) -> None:
    """The verdict is on what decoding would do; a better tau of the sweep's is told beside it."""
    config = config.model_copy(update={"policy": config.policy.model_copy(update={"tau": 100.0})})
    register(constant(NEVER), "champion")
    register(constant(ALWAYS, policy={"policy": "hvd_tau", "tau": 0.0}), "challenger")
    outcome = promote(options, config, progress=Silent())
    assert not outcome.is_promoted, "at tau 100 neither drafts"
    assert outcome.policy == {"policy": "hvd_tau", "tau": 100.0}
    assert outcome.tuned == {"policy": "hvd_tau", "tau": 0.0}
    assert outcome.as_tuned is not None
    assert outcome.as_tuned.gap.is_better


def test_under_hvd_cost_a_champion_without_a_curve_decides_by_tau(
    config: Config, register: Register, options: PromoteOptions, tmp_path: Path
) -> None:
    policy = config.policy.model_copy(update={"name": "hvd_cost"})
    config = config.model_copy(update={"policy": policy})
    key = CostKey(model="m", dtype="float32", engine="toy", device="cpu", num_threads=1)
    costs = CostFile(key=key, rows=(1, 64), verify_ms=(10.0, 12.0))
    write_costs(tmp_path / "costs.json", costs)
    register(constant(NEVER), "champion")
    register(constant(3.0, num_outputs=64), "challenger")
    options = PromoteOptions(options.labels, options.traces, str(tmp_path / "costs.json"))
    outcome = promote(options, config, progress=Silent())
    assert outcome.is_promoted
    assert outcome.unit == "tokens/s"
    assert outcome.rows[0].speeds["champion"] == pytest.approx(100.0)
    assert outcome.notes == ("the champion has no survival curve: it decides by hvd_tau here",)


def test_with_a_cost_table_predictors_meet_under_what_would_be_served(
    config: Config, register: Register, options: PromoteOptions, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    plain = config.model_copy(update={"policy": PolicyConfig()})
    key = CostKey(model="m", dtype="float32", engine="toy", device="cpu", num_threads=1)
    write_costs(tmp_path / "costs.json", CostFile(key=key, rows=(1, 64), verify_ms=(10.0, 12.0)))
    priced = PromoteOptions(options.labels, options.traces, str(tmp_path / "costs.json"))
    register(constant(NEVER), "champion")
    register(constant(ALWAYS), "challenger")
    outcome = promote(priced, plain, progress=Silent())
    assert outcome.policy == {"policy": "hvd_tau", "tau": 6.0}
    assert "neither has the survival curve" in outcome.policy_why
    register(constant(3.0, num_outputs=64), "challenger")
    outcome = promote(options, plain, progress=Silent())
    assert outcome.policy == {"policy": "hvd_tau", "tau": 6.0}
    assert "no cost table" in outcome.policy_why
    register(constant(3.0, num_outputs=64), "challenger")
    outcome = promote(priced, config, progress=Silent())
    assert (outcome.policy["policy"], outcome.policy_why) == ("hvd_tau", "by the policy.tau given")
    register(constant(3.0, num_outputs=64), "challenger")
    outcome = promote(priced, plain, progress=Silent())
    assert outcome.policy == {"policy": "hvd_cost"}
    show(outcome)
    assert "hvd_cost: as hvd serve decides with a cost table" in capsys.readouterr().out


def test_under_hvd_cost_a_challenger_without_a_curve_stays(
    config: Config, register: Register, options: PromoteOptions
) -> None:
    """However fast: with it as champion `hvd_cost` could not decode at all."""
    policy = config.policy.model_copy(update={"name": "hvd_cost"})
    register(constant(NEVER), "champion")
    register(constant(ALWAYS), "challenger")
    config = config.model_copy(update={"policy": policy})
    outcome = promote(options, config, progress=Silent())
    assert outcome.rows[0].gap.is_better
    assert (outcome.is_promoted, outcome.reason) == (
        False,
        "hvd_cost needs a survival curve, and it has none",
    )


def test_a_curve_is_not_lost_by_a_promotion(
    config: Config, register: Register, options: PromoteOptions
) -> None:
    """However they compare by `hvd_tau`: `hvd_cost` could be served no more."""
    register(constant(NEVER, num_outputs=64), "champion")
    register(constant(ALWAYS), "challenger")
    outcome = promote(options, config, progress=Silent())
    assert not outcome.is_promoted
    assert "needs a survival curve" in outcome.reason


def test_a_curve_takes_over_from_a_champion_without_one(
    config: Config, register: Register, options: PromoteOptions
) -> None:
    """Unless it is shown to be slower, so that nobody is left without `hvd_cost`."""
    register(constant(ALWAYS), "champion")
    register(constant(-1000.0, num_outputs=64), "challenger")
    assert not promote(options, config, progress=Silent()).is_promoted
    register(constant(ALWAYS, num_outputs=64), "challenger")
    outcome = promote(options, config, progress=Silent())
    assert (outcome.is_promoted, outcome.reason) == (
        True,
        "it is not slower, and gives the survival curve that hvd_cost needs",
    )
    register(constant(ALWAYS, num_outputs=64), "challenger")
    assert not promote(options, config, progress=Silent()).is_promoted, "both have one now"


def test_what_ships_is_to_be_beaten_where_there_is_no_champion(
    config: Config, register: Register, options: PromoteOptions, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    constant(ALWAYS).save(tmp_path / "shipped")
    monkeypatch.setattr(registry, "shipped_folder", lambda *_: tmp_path / "shipped")
    register(constant(NEVER), "challenger")
    outcome = promote(options, config, progress=Silent())
    assert (outcome.is_promoted, outcome.incumbent) == (False, f"shipped for {config.model}")
    assert aliases(config) == {"champion": None, "challenger": "1"}


def test_by_force_nothing_need_be_compared(config: Config, register: Register) -> None:
    register(constant(ALWAYS), "champion")
    register(constant(NEVER), "challenger")
    outcome = promote(PromoteOptions(is_forced=True), config, progress=Silent())
    assert (outcome.is_promoted, outcome.reason) == (True, "forced, though nothing was compared")
    assert aliases(config) == {"champion": "2", "challenger": None}


def test_a_policy_that_asks_no_predictor_is_refused(config: Config, register: Register) -> None:
    policy = config.policy.model_copy(update={"name": "suffix"})
    register(constant(NEVER), "challenger")
    with pytest.raises(UserError, match=r"policy\.name=suffix asks no predictor"):
        promote(PromoteOptions(), config.model_copy(update={"policy": policy}), progress=Silent())


def test_the_command_s_exit_codes(
    config: Config,
    register: Register,
    options: PromoteOptions,
    capsys: pytest.CaptureFixture[str],
) -> None:
    register(constant(ALWAYS), "champion")
    register(constant(NEVER), "challenger")
    words = [
        *("promote", "--labels", str(options.labels), "--traces", str(options.traces)),
        *("--costs", "pass", f"model={config.model}", "policy.tau=0"),
        f"tracking.uri={config.tracking.uri}",
    ]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 1
    shown = capsys.readouterr().out
    assert "not promoted" in shown
    assert "goes on deciding: models:/" in shown
    assert "take it: the same command with --force" in shown
    assert max(map(len, shown.splitlines())) <= 80
    with pytest.raises(SystemExit) as ended:
        main([*words, "--force", "--json"])
    assert ended.value.code == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["promoted"] is True
    assert answer["rows"][0]["gap"]["ratio"] < 1
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
