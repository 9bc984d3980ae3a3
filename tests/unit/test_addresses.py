"""Addresses and empty words on the command line: local ones become paths, others are refused."""

from pathlib import Path

import pytest

from hvd_ray.addresses import with_local_paths
from hvd_ray.cli import main
from hvd_ray.errors import NotSupportedError, UserError


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("file:///shared/traces", "/shared/traces"),
        ("--out=file:///shared/my%20labels", "--out=/shared/my labels"),
        ("file://localhost/shared", "/shared"),
        ("/shared/traces", "/shared/traces"),
        ("s3/traces", "s3/traces"),
        ("tracking.uri=sqlite:////shared/runs.db", "tracking.uri=sqlite:////shared/runs.db"),
        ("tracking.uri=http://mlflow:5000", "tracking.uri=http://mlflow:5000"),
        ("tracking.uri=", "tracking.uri="),
        ("C:\\traces", "C:\\traces"),
        ("models:/hvd-payoff-tiny@champion", "models:/hvd-payoff-tiny@champion"),
    ],
)
def test_local_addresses_are_paths_and_the_rest_stays(word: str, expected: str) -> None:
    assert with_local_paths([word]) == [expected]


@pytest.mark.parametrize(
    "word",
    [
        *("s3://b/traces", "--out=s3://b/t", "memory://x", "gs://b/x", "S3://B/x"),
        *(
            "file://host/share",
            "http://b/x",
            "https://b/x",
            "--eagle3=ftp://b/x",
            "dbfs://x",
            "x-y://x",
        ),
    ],
)
def test_other_addresses_are_refused_by_name(word: str) -> None:
    address = word.rpartition("=")[2]
    with pytest.raises(NotSupportedError, match=f"not supported: {address}: traces"):
        with_local_paths([word])


def test_the_command_line_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["traces", "label", "s3://bucket/traces", "--out", "/tmp/labels"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("hvd: error: not supported: s3://bucket/traces")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "culprit"),
    [
        (["train", "labels", "--out", ""], "--out is empty"),
        (["train", "labels", "--out", " "], "--out is empty"),
        (["train", "labels", "--out="], "--out is empty"),
        (["train", ""], "an argument is empty"),
        (["fetch", "--", ""], "an argument is empty"),
        ([""], "an argument is empty"),
    ],
)
def test_empty_words_are_refused_by_name(words: list[str], culprit: str) -> None:
    with pytest.raises(UserError, match=f"^{culprit}; is a variable unset"):
        with_local_paths(words)


def test_an_unset_variable_fills_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for place in ("", "http://b/x"):
        with pytest.raises(SystemExit) as ended:
            main(["traces", "label", "traces", "--out", place])
        assert ended.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
