"""The demo's plan: which commands, with which sizes, and what a second run keeps."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from hvd_ray import cli
from hvd_ray.commands import demo
from hvd_ray.commands.demo import FAST, Sizes, plan_demo
from hvd_ray.errors import UserError
from hvd_ray.home import file_lock


def _plan(sizes: Sizes = FAST, **options: object) -> list[demo.Stage]:
    return plan_demo(sizes, model="m", folder=Path("d"), **options)  # type: ignore[arg-type]


def _value(command: tuple[str, ...], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_the_stages_are_the_main_job_in_its_order() -> None:
    names = [stage.command[:2] for stage in _plan()]
    assert [name[0] for name in names] == [
        *("fetch", "calibrate", "calibrate", "traces", "traces"),
        *("train", "bench", "bench", "report"),
    ]
    assert [name[1] for name in names if name[0] == "traces"] == ["collect", "label"]


def test_every_stage_is_a_command_that_hvd_understands() -> None:
    """A renamed flag must fail here, not ten minutes into the demo."""
    app = typer.main.get_command(cli.build_app())
    for stage in _plan(replace(FAST, collect_limit=3), num_workers=2):
        words = list(stage.command)
        command = app
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        command.make_context("hvd", words).close()


def test_each_stage_starts_from_what_the_one_before_made() -> None:
    _, _, _, collect, label, train, exact, speed, report = (stage.command for stage in _plan())
    assert _value(collect, "--out") == label[2]
    assert _value(label, "--out") == train[1]
    for bench in (exact, speed):
        assert _value(bench, "--predictor") == _value(train, "--out")
        assert _value(bench, "--out") in report
    assert _value(exact, "--dtype") == "float32"


def test_the_sizes_reach_the_commands() -> None:
    sizes = Sizes(limit=7, max_tokens=55, exact_limit=2, exact_tokens=9, collect_limit=4)
    _, _, _, collect, _, _, exact, speed, _ = (stage.command for stage in _plan(sizes))
    assert (_value(collect, "--limit"), _value(collect, "--max-tokens")) == ("4", "55")
    assert (_value(speed, "--limit"), _value(speed, "--max-tokens")) == ("7", "55")
    assert (_value(exact, "--limit"), _value(exact, "--max-tokens")) == ("2", "9")


@pytest.mark.usefixtures("hvd_home")
def test_runs_of_other_sizes_keep_apart_and_of_the_same_sizes_go_on() -> None:
    first = demo._folder(Sizes(), "m")
    assert demo._folder(Sizes(), "m") == first
    assert demo._folder(Sizes(limit=9), "m") == first, "how much is measured changes no trace"
    assert demo._folder(Sizes(max_tokens=9), "m") != first
    assert demo._folder(Sizes(), "other") != first


def test_what_is_done_before_is_not_done_again_unless_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr(demo, "_hvd", ran.append)
    stage = demo.Stage("train", ("train", "labels"), done=tmp_path / "trained")

    def fail(_: object) -> None:
        raise UserError("no labels")

    with monkeypatch.context() as patch:
        patch.setattr(demo, "_hvd", fail)
        with pytest.raises(UserError):
            demo._run(stage, 1, 1)
    demo._run(stage, 1, 1)
    demo._run(stage, 1, 1)
    assert ran == [("train", "labels")]
    demo._run(replace(stage, command=("train", "labels", "--kind", "survival")), 1, 1)
    assert len(ran) == 2, "another command is not done yet"


@pytest.mark.parametrize(
    ("raised", "seen"), [(KeyboardInterrupt, KeyboardInterrupt), (typer.Exit(3), typer.Exit)]
)
def test_a_stage_that_was_interrupted_or_failed_ends_the_demo_and_is_not_done(
    raised: BaseException,
    seen: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def build_app() -> typer.Typer:
        app = typer.Typer()

        @app.command("train")
        def train() -> None:
            raise raised

        app.command("other")(lambda: None)  # with one command alone there is no name to type
        return app

    monkeypatch.setattr(cli, "build_app", build_app)
    stage = demo.Stage("train", ("train",), done=tmp_path / "trained")
    with pytest.raises(seen):
        demo._run(stage, 1, 1)
    assert not stage.is_done()


@pytest.mark.usefixtures("hvd_home")
def test_a_second_demo_of_the_same_sizes_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    folder = demo._folder(demo.FAST, "smollm2-135m")
    with file_lock(folder), pytest.raises(SystemExit) as stop:
        cli.main(["demo", "--fast"])
    assert stop.value.code == 2
    assert "another demo of these sizes is running" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--limit", "--max-tokens"])
def test_a_size_of_nothing_is_refused_before_anything_runs(
    flag: str, hvd_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["demo", flag, "0"])
    assert stop.value.code == 2
    assert f"{flag} must be 1 or more, got 0" in capsys.readouterr().err
    assert not hvd_home.exists()


def test_an_output_that_differs_in_float32_is_no_success(tmp_path: Path) -> None:
    row = json.loads(_ROW)
    result = {"format": 1, "provenance": {}, "notes": [], "rows": [row], "aggregate": []}
    (tmp_path / "bench-float32.json").write_text(json.dumps(result))
    assert "NOT EXACT" in (demo._first_inexact(tmp_path) or "")
    row |= {"differences": [], "identical_to_greedy": 1.0}
    (tmp_path / "bench-float32.json").write_text(json.dumps(result | {"rows": [row]}))
    assert demo._first_inexact(tmp_path) is None


_ROW = """{
  "workload": "w", "family": "f", "system": "suffix", "engine": "torch", "cache": "cold",
  "dtype": "float32", "temperatures": [0.0], "prompts": 1, "tokens": 9, "target_passes": 3,
  "tokens_per_second": 3.0, "speedup_vs_greedy": 1.5, "speedup_ci": [1.5, 1.5],
  "ci_unit": "prompt", "ci_is_degenerate": true, "emitted_per_pass": 3.0,
  "mean_accepted_drafted_only": 2.0, "cycles_per_1k_tokens": 333.3, "drafted_cycles": 3,
  "drafted": 9, "accepted": 6, "source_share": {"suffix": 1.0}, "draft_ms_per_cycle": 0.1,
  "verify_ms_per_cycle": 30.0, "identical_to_greedy": 0.0,
  "differences": [{"prompt_id": "p", "position": 1, "margin": 0.5}],
  "identical_in_one_pass": null, "loops": 0.0, "without_loops": null
}"""
