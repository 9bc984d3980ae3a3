"""The plugin in the real engine: same tokens in float32, whoever drafts.

One engine a process: vLLM sets threads and global state for good, so each runs in its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.model]
pytest.importorskip("vllm")

HEAD = Path(__file__).parents[2] / "hvd_ray" / "assets" / "smollm2-135m" / "eagle3"
QUESTIONS = (
    "List five planets as JSON with name and radius.",
    "Write a Python class Stack with push, pop and peek.",
    "Repeat three times: the quick brown fox jumps over the lazy dog.",
)

SERVE = """
import json, sys
from pathlib import Path
from hvd_ray.vllm_plugin.plugin import register
register()
register()
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError
from hvd_ray.text import HFTextCodec

model, task, out = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
llm = LLM(model=model, dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=4,
          distributed_executor_backend="uni", **task["engine"])
codec = HFTextCodec(model)

def run(questions, hvd=None, salt=None, **sampling):
    prompts = [{"prompt_token_ids": codec.encode_chat([{"role": "user", "content": q}])}
               for q in questions]
    for prompt in prompts:
        if salt is not None:
            prompt["cache_salt"] = salt
    extra = None if hvd is None else {"hvd": hvd}
    params = SamplingParams(temperature=0, max_tokens=48, extra_args=extra, **sampling)
    try:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    except VLLMValidationError as error:
        return {"error": str(error)}
    session = getattr(getattr(runner, "drafter", None), "_session", None)
    return {"tokens": [list(o.outputs[0].token_ids) for o in outputs],
            "counts": session.counts() if session else {}}

runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
results = [run(**call) for call in task["calls"]]
out.write_text(json.dumps({"proposer": type(getattr(runner, "drafter", None)).__name__,
                           "results": results}))
"""


def serve(tmp_path: Path, model: Path, engine: dict[str, Any], calls: list[dict[str, Any]]) -> Any:
    """Start an engine in a process of its own and make these calls."""
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_PLUGINS": "none",  # registered by hand above, installed or not
    }
    out = tmp_path / "results.json"
    task = json.dumps({"engine": engine, "calls": calls})
    done = subprocess.run(
        [sys.executable, "-c", SERVE, str(model), task, str(out)],
        env=os.environ | settings,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, default_model_path: Path) -> list[list[int]]:
    """What vLLM says without us: the plugin is loaded and not configured."""
    folder = tmp_path_factory.mktemp("plain")
    calls = [{"questions": [question]} for question in QUESTIONS]
    done = serve(folder, default_model_path, {}, calls)
    assert done["proposer"] == "NoneType"
    return [result["tokens"][0] for result in done["results"]]


def test_every_source_gives_the_tokens_of_plain_vllm(
    tmp_path: Path, default_model_path: Path, plain: list[list[int]]
) -> None:
    engine = {
        "speculative_config": {
            "method": "eagle3",
            "model": str(HEAD),
            "num_speculative_tokens": 12,
        },
        "additional_config": {"hvd": {"policy": "cost", "payoff": "own"}},
    }
    words = ("auto", "cache", "eagle3", "off")
    calls = [{"questions": [q], "hvd": word, "salt": word} for word in words for q in QUESTIONS]
    calls += [{"questions": list(QUESTIONS), "hvd": "auto"}, {"questions": ["Hi"], "hvd": "on"}]
    done = serve(tmp_path, default_model_path, engine, calls)
    assert done["proposer"] == "HybridEagleProposer"
    *results, together, refused = done["results"]
    for index, result in enumerate(results):
        assert result["tokens"][0] == plain[index % len(QUESTIONS)], calls[index]
    assert together["tokens"] == plain
    assert "auto, cache, eagle3, off" in refused["error"]


def test_a_cache_alone_drafts_within_a_scope_and_never_across(
    tmp_path: Path, default_model_path: Path, plain: list[list[int]]
) -> None:
    engine = {
        "speculative_config": {"method": "suffix", "num_speculative_tokens": 12},
        "additional_config": {"hvd": {"policy": "cache"}},
    }
    salts = ("mine", "theirs", "mine", "mine")
    words = (None, None, None, "off")
    calls = [
        {"questions": [QUESTIONS[0]], "salt": salt, "hvd": word}
        for salt, word in zip(salts, words, strict=True)
    ]
    done = serve(tmp_path, default_model_path, engine, calls)
    assert done["proposer"] == "HybridSuffixProposer"
    assert all(result["tokens"][0] == plain[0] for result in done["results"])
    accepted = [r["counts"].get("hvd_accepted_tokens_total suffix", 0) for r in done["results"]]
    first, other_scope, same_scope, off = [
        b - a for a, b in zip([0, *accepted], accepted, strict=False)
    ]
    assert other_scope == first, "another scope starts as cold as the first request did"
    assert same_scope > first + 10
    assert off == 0
