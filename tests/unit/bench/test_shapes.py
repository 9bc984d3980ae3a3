"""Cost tables of shapes: measured on a tiny one, and one line where there is no GPU."""

import json
from pathlib import Path

import pytest
import torch

from hvd_ray.bench import shapes
from hvd_ray.cli import main
from hvd_ray.payoff.cost_file import read_costs
from hvd_ray.types import Source

Captured = pytest.CaptureFixture[str]


def calibrate(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["calibrate", *map(str, words)])
    return int(ended.value.code or 0)


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "ROWS", (1, 5, 17, 64, 256))
    monkeypatch.setattr(shapes, "CONTEXTS", (64,))
    monkeypatch.setattr(shapes, "NUM_TREE_DRAFTS", 3)


@pytest.mark.usefixtures("few_rows")
def test_a_tiny_shape_is_measured_on_the_cpu(tmp_path: Path, capsys: Captured) -> None:
    given = ("--shapes", "tiny", "--device", "cpu", "--repeats", 1)
    assert calibrate(*given, "--out", tmp_path) == 0
    assert "1 tables written" in capsys.readouterr().out
    costs = read_costs(tmp_path / "tiny-context64-torch.json")
    assert (costs.key.model, costs.key.dtype) == ("shape:tiny", "float32")
    assert set(costs.draft_ms) == {Source.NGRAM, Source.SUFFIX, Source.EAGLE3}
    assert costs.provenance["context_len"] == 64
    assert costs.provenance["tree"]["draft_ms"] > 0


@pytest.mark.usefixtures("few_rows")
def test_a_shape_that_fails_does_not_lose_the_others(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shapes.build

    def build(name: str, device: str):  # type: ignore[no-untyped-def]
        if name == "qwen3-4b":
            raise torch.OutOfMemoryError("CUDA out of memory\nand more")
        return real(name, device)

    monkeypatch.setattr(shapes, "build", build)
    given = ("--shapes", "qwen3-4b,tiny", "--device", "cpu", "--repeats", 1, "--json")
    assert calibrate(*given, "--out", tmp_path) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["failed"] == {"qwen3-4b": "CUDA out of memory"}
    assert [Path(path).name for path in answer["written"]] == ["tiny-context64-torch.json"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--shapes", "huge", "--out", "o"), "--shapes huge: expected some of qwen3-4b"),
        (("--shapes", "tiny", "--device", "tpu", "--out", "o"), "expected cuda or cpu"),
        (("--shapes", "tiny", "--device", "cpu"), "--shapes needs --out DIR"),
        (("--device", "cpu"), "--device goes with --shapes only"),
        (("--shapes", "tiny", "--out", "o", "dtype=float32"), "--shapes takes no settings"),
    ],
)
def test_what_is_refused(words: tuple[str, ...], message: str, capsys: Captured) -> None:
    assert calibrate(*words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(capsys: Captured) -> None:
    assert calibrate("--shapes", "qwen3-4b,llama-3.1-8b", "--out", "o") == 2
    error = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(error) == 1
    assert "needs a CUDA GPU" in error[0]
