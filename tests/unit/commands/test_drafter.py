"""`hvd drafter`: curves of a training in MLflow, and a head's figures by workload or family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hvd_ray.cli import main
from hvd_ray.config import Config
from hvd_ray.drafting.eagle3_checkpoint import save_head
from hvd_ray.tracking import open_tracker
from tests.unit.drafting.eagle3_heads import SMALL, random_head


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, tiny_llama_path: Path) -> Path:
    """A target of the small heads' width, with the tiny model's tokenizer beside it."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=SMALL.vocab_size,
        hidden_size=SMALL.hidden_size,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=2,
    )
    folder = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_llama_path).save_pretrained(folder)
    return folder


def _row(seed: int) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, SMALL.vocab_size, (26,), generator=rng).tolist()
    return {
        "prompt_id": f"p{seed}",
        "family": ("code", "chat")[seed % 2],
        "workload": ("edits", "talk", "sql", "talk")[seed % 4],
        "temperature": 0.0,
        "split": "test" if seed >= 100 else "train",
        "prompt_token_ids": tokens[:6],
        "output_token_ids": tokens[6:],
    }


def _responses(folder: Path, seeds: range) -> Path:
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist([_row(seed) for seed in seeds]), folder / "part-0.parquet")
    return folder


@pytest.fixture(autouse=True)
def home(hvd_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return hvd_home


def _hvd(*arguments: object) -> int:
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_training_leaves_curves_in_mlflow(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = _responses(tmp_path / "responses", range(60))
    words = (
        "drafter", "train", data, "--run", tmp_path / "run", "--target", target, "--steps", 21,
        "--rows-per-step", 32, "--chain-steps", 2, "--draft-vocab", 32, "--regression-steps", 2,
        "--json", "tracking.experiment=heads",
    )  # fmt: skip
    code = _hvd(*words)
    said = capsys.readouterr()
    assert code == 0, said.err
    assert json.loads(said.out)["head"] == str(tmp_path / "run" / "head")
    client, run = _only_run("heads")
    assert (run.info.run_name, run.info.status) == ("eagle3-run", "FINISHED")
    assert run.data.params["train.num_steps"] == "21"
    losses = client.get_metric_history(run.info.run_id, "loss")
    assert [point.step for point in losses] == [0, 10, 20]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(21))
    assert _typed_again(words, tmp_path / "run", capsys) == json.loads(said.out)
    _only_run("heads")
    other = [22 if word == 21 else word for word in words]
    made = (tmp_path / "run" / "head" / "model.safetensors").stat().st_mtime_ns
    assert _hvd(*other) == 0
    assert (tmp_path / "run" / "head" / "model.safetensors").stat().st_mtime_ns > made


def _typed_again(words: Any, run: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """As after a kill before the MLflow run's end, and after one between that and the answer."""
    note = run / "tracking_run"
    note.write_text(_key_of_only_run("heads"))
    answers = []
    for _ in range(2):
        assert _hvd(*words) == 0
        assert not note.exists()
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == answers[1]
    return answers[0]


def _key_of_only_run(experiment: str) -> str:
    """What the note held while the run was on."""
    return str(_only_run(experiment)[1].data.tags["hvd_ray_key"])


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_token_that_the_target_does_not_have_is_refused_before_anything_begins(
    command: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "responses"
    data.mkdir()
    row = {**_row(100), "output_token_ids": [3, SMALL.vocab_size]}
    pq.write_table(pa.Table.from_pylist([_row(1), row]), data / "part-0.parquet")
    save_head(random_head(), tmp_path / "head")
    place = ("--run", tmp_path / "run") if command == "train" else ("--head", tmp_path / "head")
    assert _hvd("drafter", command, data, *place, "--target", target) == 2
    assert f"knows no token beyond {SMALL.vocab_size - 1}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def _only_run(experiment: str) -> tuple[Any, Any]:
    """The one run of an experiment, but for those that opening the store makes."""
    config = Config.model_validate({"tracking": {"experiment": experiment}})
    tracker = open_tracker(config, run_name="looking")
    client = tracker.store.client  # type: ignore[attr-defined]
    mine = client.get_run(tracker.run_id)
    runs = client.search_runs([mine.info.experiment_id])
    (found,) = [run for run in runs if run.info.run_name != "looking"]
    return client, found


def test_measurements_are_logged_at_any_step(tmp_path: Path) -> None:
    from hvd_ray.commands.drafter import _tracked_run, _training_log

    run, config = tmp_path / "run", Config.model_validate({"tracking": {"experiment": "measured"}})
    with (
        _tracked_run(run, {}, config) as tracker,
        _training_log(100, run, tracker) as log_metrics,
    ):
        log_metrics({"loss": 1.0}, 7)
        log_metrics({"accuracy/position_1": 0.5, "emitted_per_pass/all": 1.7}, 7)
    client, found = _only_run("measured")
    points = client.get_metric_history(found.info.run_id, "accuracy/position_1")
    assert [(point.step, point.value) for point in points] == [(7, 0.5)]
    assert "loss" not in found.data.metrics


@pytest.mark.parametrize(
    ("by", "groups"),
    [("workload", {"edits", "talk", "sql", "all"}), ("family", {"code", "chat", "all"})],
)
def test_a_head_is_measured_by_group_on_held_out_responses(
    by: str, groups: set[str], target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = _responses(tmp_path / "held_out", range(100, 108))
    save_head(random_head(), tmp_path / "head")
    words = ("drafter", "eval", data, "--head", tmp_path / "head", "--target", target, "--by", by)
    assert _hvd(*words, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == groups
    assert report["all"]["tokens"] == 8 * 20
    assert _hvd(*words) == 0
    assert by in capsys.readouterr().out


def test_an_unknown_grouping_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _hvd("drafter", "eval", tmp_path, "--by", "colour") == 2
    assert "--by must be workload or family, got 'colour'" in capsys.readouterr().err


def test_without_a_head_the_shipped_one_is_measured_or_none_is_named(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _hvd("drafter", "eval", tmp_path, "--target", target) == 2
    assert "no EAGLE-3 head ships for" in capsys.readouterr().err


@pytest.mark.parametrize(("accepted_in_vllm", "code"), [(4, 0), (5, 1)])
def test_a_comparison_with_vllm_fails_beyond_three_percent(
    accepted_in_vllm: int,
    code: int,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The engines themselves are stood in for; 1.4 against 1.4 or 1.5 tokens a pass."""
    from hvd_ray.pipelines import eagle3_vllm
    from hvd_ray.pipelines.eagle3_vllm import Acceptance

    asked: list[Any] = []

    def in_torch(prompts: Any, *_: Any) -> Acceptance:
        asked.extend(prompts)
        return Acceptance(((1, 2),), num_drafts=10, num_accepted=4)

    in_vllm = Acceptance(((1, 2),), num_drafts=10, num_accepted=accepted_in_vllm)
    monkeypatch.setattr(eagle3_vllm, "_in_torch", in_torch)
    monkeypatch.setattr(eagle3_vllm, "_in_vllm", lambda *_: in_vllm)
    rows = [{"id": s, "prompt": f"Say {s}", "split": s} for s in ("train", "test")]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    words = ("drafter", "compare", "--prompts", file, "--target", target)
    assert _hvd(*words, "--json") == code
    report = json.loads(capsys.readouterr().out)
    assert (report["prompts"], report["identical_outputs"], len(asked)) == (1, 1, 1)
    assert report["vllm"]["mean_acceptance_length"] == 1 + accepted_in_vllm / 10
    assert _hvd(*words) == code
    assert "1 of 1 outputs identical" in capsys.readouterr().out
