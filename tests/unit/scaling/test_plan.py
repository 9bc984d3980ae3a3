"""The plan of all stages: where each stops scaling and why, and what the command prints."""

import json

import pytest

from hvd_ray.cli import main
from hvd_ray.errors import UserError
from hvd_ray.scaling.costs import STAGES, load_stage_costs
from hvd_ray.scaling.load import Load
from hvd_ray.scaling.model import Machines
from hvd_ray.scaling.plan import WORTH_DOUBLING, Plan

COSTS = load_stage_costs(None)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *words])
    return ended.value.code, *capsys.readouterr()


@pytest.mark.parametrize("name", STAGES)
def test_doubling_pays_up_to_the_limit_and_not_beyond(name: str) -> None:
    plan = Plan(COSTS, Load(50_000_000), Machines(1), num_shards=40, num_trials=24)
    limit = plan.limit(name)
    seconds = {n: plan.with_workers(n).stage(name).seconds for n in (1, 2, 4, 8, 16, 32, 64, 128)}
    if limit.num_workers > 1:
        half = limit.num_workers // 2
        assert seconds[half] / seconds[limit.num_workers] >= WORTH_DOUBLING
    assert seconds[limit.num_workers] / seconds[2 * limit.num_workers] < WORTH_DOUBLING


def test_the_reason_is_what_binds() -> None:
    load = Load(1_000_000_000)
    few = Plan(COSTS, load, Machines(1), num_shards=8)
    assert "8 shards" in few.limit("label").reason
    assert "one process" in few.limit("train").reason
    cores = Plan(COSTS, load, Machines(1, num_cores=2))
    assert (cores.limit("label").num_workers, cores.limit("label").reason) == (
        2,
        "they share 2 cores",
    )
    slow = Plan(COSTS, load, Machines(1, storage_mb_s=0.5))
    assert "storage" in slow.limit("label").reason
    small = Plan(COSTS, Load(100_000), Machines(1))
    assert "s" in small.limit("collect").reason


def test_costs_of_ones_own_win(tmp_path) -> None:
    changed = load_stage_costs(None, ("collect.token_us=7", "label.shard_s=2"))
    assert (changed.collect.token_us, changed.label.shard_s) == (7, 2)
    file = tmp_path / "costs.json"
    file.write_text(changed.model_dump_json())
    assert load_stage_costs(file) == changed


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not valid JSON"),
        ("[]", "no mapping of stages; expected a JSON file of stage costs"),
        ('{"collect": {}}', "say nothing of label, train, tune; expected a JSON file"),
        ('{"collect": {}, "label": {}, "train": {}, "tune": {}}', "setting"),
    ],
)
def test_bad_costs_are_a_clear_line(tmp_path, text: str, reason: str) -> None:
    file = tmp_path / "costs.json"
    file.write_text(text)
    with pytest.raises(UserError, match=reason):
        load_stage_costs(file)


def test_the_shipped_costs_say_where_they_come_from() -> None:
    about = COSTS.provenance
    assert {"created_at", "commit", "cpu", "model", "runs"} <= set(about)


def test_the_command_shows_every_stage_within_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, shown, _ = run(
        capsys, "--tokens", "1e9", "--workers", "64", "--largest-tenant", "0.5", "--price", "1.2"
    )
    assert code == 0
    assert all(name in shown for name in (*STAGES, "cost", "stops scaling", "One tenant"))
    assert "were tenants never split" in shown
    words = " ".join(shown.split())
    assert "label 1 in 40 of the traces' files and learn from that (jobs/README.md)" in words
    assert "collect the prompts in 2 parts, each with an --out of its own" in words
    assert "still scaling there; more than 4,096 are not tried" in words
    assert "busy: of the workers' time" in words
    assert "hours: workers times time" in words
    assert max(map(len, shown.splitlines())) <= 80
    assert "smollm2-135m, bfloat16, AMD EPYC" in " ".join(shown.split())
    assert "one small model on a CPU" in " ".join(shown.split())


def test_the_command_answers_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, _ = run(capsys, "--tokens", "1_000_000", "--workers", "8", "--curve", "--json")
    answer = json.loads(shown)
    assert code == 0
    assert set(answer["stages"]) == set(STAGES) == set(answer["curve"])
    assert answer["stages"]["label"]["num_used"] == 8
    assert answer["curve"]["label"]["1"] > answer["curve"]["label"]["8"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--tokens", "many"), "'--tokens': many is no integer"),
        (("--tokens", "1e300"), "'--tokens': 1e300 is out of range: expected 1 to 1,000,000,000"),
        (("--workers", "0"), "'--workers': 0 is out of range: expected 1 to 100,000"),
        (("--workers", "1000000000"), "'--workers': 1000000000 is out of range"),
        (("--shards", "1e9"), "'--shards': 1e9 is out of range: expected 1 to 400,000"),
        (("--cores", "-1"), "'--cores': -1 is out of range"),
        (("--trials", "0"), "'--trials': 0 is out of range"),
        (("--trials", "1e9"), "'--trials': 1e9 is out of range"),
        (("--session-traces", "0"), "'--session-traces': 0 is out of range"),
        (("--storage-mb-s", "0"), "'--storage-mb-s': 0 is out of range: expected 0.001 to"),
        (("--storage-mb-s", "-5"), "'--storage-mb-s': -5 is out of range"),
        (("--memory-gb", "-1"), "'--memory-gb': -1 is out of range"),
        (("--price", "-3"), "'--price': -3 is out of range: expected 0 to 1,000,000,000"),
        (("--price", "nan"), "'--price': nan is no finite number"),
        (("--price", "inf"), "'--price': inf is no finite number"),
        (("--trace-tokens", "1e12"), "--trace-tokens must be from 1 to --tokens (1,000,000)"),
        (("collect.token_us=1e300",), "setting collect.token_us: Input should be less than"),
        (("--costs", "docs/costs/h100-8b-assumed.yaml"), "as scripts/measure_stages.py writes"),
        (("colect.token_us=3",), "setting colect: unknown"),
        (("--costs", "none.json"), "costs none.json: cannot be read"),
    ],
)
def test_a_mistake_is_one_clear_line(capsys, words: tuple[str, ...], reason: str) -> None:
    code, _, said = run(capsys, *words)
    assert code == 2
    assert reason in said


def test_every_count_takes_the_same_form(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--tokens",
        "1e6",
        "--workers",
        "4e0",
        "--shards",
        "1e2",
        "--trials",
        "1e1",
        "--trace-tokens",
        "1e3",
    ]
    code, shown, _ = run(capsys, *words, "--json")
    load = json.loads(shown)["load"]
    assert code == 0
    assert (load["num_tokens"], load["trace_tokens"], load["num_traces"]) == (10**6, 1000, 1000)


def test_few_tokens_make_short_traces(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, _ = run(capsys, "--tokens", "100", "--json")
    assert (code, json.loads(shown)["load"]["trace_tokens"]) == (0, 100)


def test_a_stage_that_costs_nothing_has_no_limit_to_divide_by() -> None:
    parts = ("token_us", "trace_us", "worker_start_s", "shard_s", "driver_s", "driver_trace_us")
    costs = load_stage_costs(None, tuple(f"tune.{part}=0" for part in parts))
    assert Plan(costs, Load(1000), Machines(1)).limit("tune").num_workers == 1
