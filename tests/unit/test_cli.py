"""The command line's manners: exit codes, one line for a user's mistake, quick help."""

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer

from hvd_ray import cli
from hvd_ray.errors import UserError

HEAVY = {"torch", "transformers", "ray", "mlflow", "vllm", "numba", "scipy", "sklearn", "pandas"}


def run_hvd(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from hvd_ray.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )


@pytest.fixture
def failing_app(monkeypatch: pytest.MonkeyPatch) -> None:
    """`hvd fail NAME` raises the error of that name."""
    errors: dict[str, BaseException] = {
        "user": UserError("file.jsonl:3: no prompt;\nexpected a string"),
        "bug": KeyError("ours"),
        "interrupt": KeyboardInterrupt(),
    }

    def build() -> typer.Typer:
        app = typer.Typer(pretty_exceptions_enable=False)
        app.callback()(lambda: None)

        @app.command()
        def fail(name: str) -> None:
            raise errors[name]

        return app

    monkeypatch.setattr(cli, "build_app", build)


@pytest.mark.usefixtures("failing_app")
def test_a_users_mistake_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["fail", "user"])
    assert stop.value.code == 2
    said = capsys.readouterr()
    assert said.err == "hvd: error: file.jsonl:3: no prompt; expected a string\n"
    assert said.out == ""


@pytest.mark.usefixtures("failing_app")
def test_a_bug_of_ours_keeps_its_traceback() -> None:
    with pytest.raises(KeyError):
        cli.main(["fail", "bug"])


@pytest.mark.usefixtures("failing_app")
def test_an_interrupt_is_130() -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["fail", "interrupt"])
    assert stop.value.code == 130


@pytest.mark.parametrize("arguments", [["no-such-command"], ["fetch", "--no-such-option"], []])
def test_a_wrong_call_is_exit_code_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("hvd ")


def test_help_of_every_command_shows_an_example_and_whole_words_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    missing, cut = [], []
    for path in _commands(typer.main.get_command(cli.build_app())):
        with pytest.raises(SystemExit):
            cli.main([*path, "--help"])
        said = capsys.readouterr().out
        missing += [] if "xample" in said else [" ".join(path)]
        cut += [line for line in said.splitlines() if "…" in line or len(line) > 80]
    assert not missing, f"without an example in their help: {missing}"
    assert not cut, f"cut in their help: {cut}"


def test_every_option_says_what_it_is() -> None:
    root = typer.main.get_command(cli.build_app())
    silent = [
        (*path, option.opts[0])
        for path in _commands(root)
        for option in _found(root, path).params
        if option.opts[0].startswith("-") and not option.help
    ]
    assert not silent


def _found(command: Any, path: tuple[str, ...]) -> Any:
    return _found(command.commands[path[0]], path[1:]) if path else command


def _commands(command: object, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    children = getattr(command, "commands", None)
    if children is None:
        return [path]
    return [leaf for name, child in children.items() for leaf in _commands(child, (*path, name))]


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from hvd_ray.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.replace("'", "").strip("[]\n").split(", "))
    assert "hvd_ray.cli" in loaded
    assert loaded & HEAVY == set()
    assert min(_seconds_of_help() for _ in range(3)) < 1.5  # 0.3 s on an idle machine


def _seconds_of_help() -> float:
    start = time.perf_counter()
    run_hvd("--help")
    return time.perf_counter() - start


def test_a_closed_pipe_is_quiet(tmp_path: Path) -> None:
    script = tmp_path / "pipe.sh"
    script.write_text(f"{sys.executable} -c 'from hvd_ray.cli import main; main()' --help | true\n")
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench", "--limit", "x"], "--limit.*integer.*hvd bench --help"),
        (["bench", "--nope"], "--nope"),
        (["nonsense"], "nonsense.*hvd --help"),
        (["train"], "LABELS.*hvd train --help"),
    ],
)
def test_wrong_usage_is_one_line_that_names_the_culprit(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert re.search(message, said.err)
