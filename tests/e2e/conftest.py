"""The command line in this process, as several end-to-end tests use it."""

import pytest

from hvd_ray import cli


@pytest.fixture
def hvd(hvd_home, tmp_path, monkeypatch, capsys):  # noqa: ARG001
    """Run `hvd` in an empty folder with an HVD_HOME of its own: (exit code, stdout, stderr)."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def run(*arguments):
        capsys.readouterr()
        try:
            cli.main([str(argument) for argument in arguments])
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        said = capsys.readouterr()
        return code, said.out, said.err

    return run
