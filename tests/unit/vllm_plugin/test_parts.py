"""What a worker will need is looked for before one starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvd_ray.errors import UserError
from hvd_ray.vllm_plugin.options import HvdOptions, Target, TraceOptions
from hvd_ray.vllm_plugin.parts import check_parts


@pytest.fixture
def target(hvd_home: Path, monkeypatch: pytest.MonkeyPatch, tiny_llama_path: Path) -> Target:  # noqa: ARG001
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    model = str(tiny_llama_path)
    return Target(model, model, vocab_size=256, max_model_len=64, has_head=False)


@pytest.mark.parametrize(
    ("given", "culprit"),
    [
        ({"payoff": "nowhere"}, r"setting hvd\.payoff: predictor nowhere: .*'own' needs no"),
        ({"payoff": "models:/no@champion"}, r"setting hvd\.payoff: no payoff predictor models:/no"),
        ({}, r"setting hvd\.payoff: no payoff predictor models:"),
        ({"payoff": "own", "costs": "nowhere.json"}, r"setting hvd\.costs: .*nowhere\.json"),
        ({"policy": "off", "traces": "."}, None),
        ({"policy": "off", "traces": "a file"}, r"setting hvd\.traces\.folder: cannot write "),
    ],
)
def test_what_cannot_be_had_is_named(
    target: Target, tmp_path: Path, given: dict[str, Any], culprit: str | None
) -> None:
    (tmp_path / "a file").write_text("")
    if "traces" in given:
        given = given | {"traces": TraceOptions(folder=str(tmp_path / given["traces"]))}
    options = HvdOptions(**given)
    if culprit is None:
        check_parts(options, target)
        return
    with pytest.raises(UserError, match=culprit):
        check_parts(options, target)


def test_policies_that_ask_nobody_need_nobody(target: Target) -> None:
    check_parts(HvdOptions(policy="match"), target)
    check_parts(HvdOptions(payoff="own"), target)


def test_the_look_loads_no_compiled_code(tiny_llama_path: Path) -> None:
    """vLLM's start looks into every module, and trips over llvmlite's."""
    look = """
import sys
from hvd_ray.errors import UserError
from hvd_ray.shipped import shipped_folder
from hvd_ray.vllm_plugin.options import HvdOptions, Target
from hvd_ray.vllm_plugin.parts import check_parts
model = sys.argv[1]
payoff = str(shipped_folder("smollm2-135m", "payoff"))
try:
    check_parts(HvdOptions(payoff=payoff), Target(model, model, 256, 64, False))
except UserError as error:
    print(error)
sys.exit("llvmlite" in sys.modules)
"""
    command = [sys.executable, "-c", look, str(tiny_llama_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "another tokenizer" in done.stdout, "the predictor was found and looked at"
