"""Addresses of storage on the command line: local ones become paths, others are refused."""

import pytest

from hvd_ray.addresses import with_local_paths
from hvd_ray.cli import main
from hvd_ray.errors import NotSupportedError


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("file:///shared/traces", "/shared/traces"),
        ("--out=file:///shared/my%20labels", "--out=/shared/my labels"),
        ("file://localhost/shared", "/shared"),
        ("/shared/traces", "/shared/traces"),
        ("s3/traces", "s3/traces"),
        ("tracking.uri=sqlite:////shared/runs.db", "tracking.uri=sqlite:////shared/runs.db"),
        ("http://mlflow:5000", "http://mlflow:5000"),
        ("models:/hvd-payoff-tiny@champion", "models:/hvd-payoff-tiny@champion"),
    ],
)
def test_local_addresses_are_paths_and_the_rest_stays(word: str, expected: str) -> None:
    assert with_local_paths([word]) == [expected]


@pytest.mark.parametrize(
    "word",
    ["s3://b/traces", "--out=s3://b/t", "memory://x", "gs://b/x", "S3://B/x", "file://host/share"],
)
def test_object_stores_are_refused_by_name(word: str) -> None:
    address = word.removeprefix("--out=")
    with pytest.raises(NotSupportedError, match=f"not supported: {address}: traces"):
        with_local_paths([word])


def test_the_command_line_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["traces", "label", "s3://bucket/traces", "--out", "/tmp/labels"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("hvd: error: not supported: s3://bucket/traces")
    assert said.count("\n") == 1
