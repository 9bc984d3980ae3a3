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
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "radius": {"enum": [1, 2, 3]}},
    "required": ["name", "radius"],
    "additionalProperties": False,
}
SPECIAL: tuple[dict[str, Any], ...] = (
    {"logprobs": 2},
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"min_tokens": 45},
    {"stop": ["radius"]},
    {"schema": SCHEMA},
    {"bad_words": ["planets"]},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 1, "n": 2},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 0.8, "seed": 7, "top_p": 0.9, "n": 2},
)
"""What vLLM verifies in ways of its own."""
REFUSED: tuple[dict[str, Any], ...] = ({"logit_bias": {"5": 3.0}},)
"""What vLLM refuses to speculate with; `min_p` too, but greedy requests have none."""

SERVE = """
import json, sys
from pathlib import Path
from hvd_ray.vllm_plugin.plugin import register
register()
register()
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from hvd_ray.text import HFTextCodec

model, task, out = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
llm = LLM(model=model, dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=4,
          distributed_executor_backend="uni", **task["engine"])
codec = HFTextCodec(model)

def run(questions, hvd=None, salt=None, adapter=None, **sampling):
    prompts = [{"prompt_token_ids": codec.encode_chat([{"role": "user", "content": q}])}
               for q in questions]
    for prompt in prompts:
        if salt is not None:
            prompt["cache_salt"] = salt
    extra = None if hvd is None else {"hvd": hvd}
    if "schema" in sampling:
        structured = StructuredOutputsParams(json=sampling.pop("schema"))
        sampling["structured_outputs"] = structured
    if "logit_bias" in sampling:
        sampling["logit_bias"] = {int(key): bias for key, bias in sampling["logit_bias"].items()}
    try:
        sampling = {"temperature": 0, "max_tokens": 48, "extra_args": extra} | sampling
        params = SamplingParams(**sampling)
        lora = None if adapter is None else LoRARequest(adapter[0], adapter[1], adapter[2])
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=lora)
    except (VLLMValidationError, ValueError) as error:
        return {"error": str(error)}
    session = getattr(getattr(runner, "drafter", None), "_session", None)
    completions = [o.outputs[0] for o in outputs]
    return {"tokens": [list(c.token_ids) for c in completions],
            "ends": [[c.finish_reason, c.stop_reason] for c in completions],
            "logprobs": [len(c.logprobs or ()) for c in completions],
            "told": [c.spec_decode_metrics and c.spec_decode_metrics.to_dict()
                     for c in completions],
            "all": [[list(c.token_ids) for c in o.outputs] for o in outputs],
            "reused": [o.num_cached_tokens for o in outputs],
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
def unconfigured(tmp_path_factory: pytest.TempPathFactory, default_model_path: Path) -> Any:
    """What vLLM says without us: the plugin is loaded and not configured."""
    folder = tmp_path_factory.mktemp("plain")
    calls: list[dict[str, Any]] = [{"questions": [question]} for question in QUESTIONS]
    calls += [{"questions": [QUESTIONS[0]], **special} for special in SPECIAL]
    done = serve(folder, default_model_path, {}, calls)
    assert done["proposer"] == "NoneType"
    return done["results"]


@pytest.fixture(scope="module")
def plain(unconfigured: Any) -> list[list[int]]:
    return [result["tokens"][0] for result in unconfigured[: len(QUESTIONS)]]


def test_every_source_gives_what_plain_vllm_gives(
    tmp_path: Path, default_model_path: Path, plain: list[list[int]], unconfigured: Any
) -> None:
    engine = {
        "speculative_config": {
            "method": "eagle3",
            "model": str(HEAD),
            "num_speculative_tokens": 12,
        },
        "additional_config": {"hvd": {"policy": "cost", "payoff": "own"}},
        "per_request_spec_decode_metrics": "summary",
    }
    words = ("auto", "cache", "eagle3", "off")
    calls: list[dict[str, Any]] = [
        {"questions": [q], "hvd": word, "salt": word} for word in words for q in QUESTIONS
    ]
    calls += [{"questions": list(QUESTIONS), "hvd": "auto"}, {"questions": ["Hi"], "hvd": "on"}]
    calls += [{"questions": [QUESTIONS[0]], **special} for special in (*SPECIAL, *REFUSED)]
    done = serve(tmp_path, default_model_path, engine, calls)
    assert done["proposer"] == "HybridEagleProposer"
    results = iter(done["results"])
    for call in calls[: len(words) * len(QUESTIONS)]:
        found = next(results)
        assert found["tokens"][0] == plain[QUESTIONS.index(call["questions"][0])], call
        check_told(found["told"][0], call["hvd"], len(found["tokens"][0]))
    assert next(results)["tokens"] == plain
    assert "auto, cache, eagle3, off" in next(results)["error"]
    for special, expected in zip(SPECIAL, unconfigured[len(QUESTIONS) :], strict=True):
        found = next(results)
        for what in ("tokens", "ends", "logprobs", "all"):
            assert found[what] == expected[what], (special, what)
    for special in REFUSED:
        assert next(iter(special)) in next(results)["error"]


def check_told(told: dict[str, Any], word: str, num_tokens: int) -> None:
    """A request's own figures, as its response gives them."""
    shares = told["source_share"]
    allowed = {"off": set(), "cache": {"suffix"}, "eagle3": {"eagle3"}}.get(word, set(shares))
    assert set(shares) <= {"none", *allowed}, (word, shares)
    assert word != "eagle3" or shares["eagle3"] > 0.8
    assert sum(shares.values()) == pytest.approx(1)
    assert told["num_target_passes"] * told["emitted_per_pass"] == pytest.approx(num_tokens)


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


@pytest.mark.usefixtures("default_model_path")
def test_systems_are_compared_inside_vllm(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = f"bench --engine vllm --systems hvd_cost --workloads sql_schema --limit 2 --out {out}"
    flags = "--max-tokens 24 --dtype float32 --concurrency 2 tracking.uri=none"
    done = subprocess.run(
        [sys.executable, "-m", "hvd_ray.cli", *command.split(), *flags.split()],
        env=os.environ | {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    rows = {row["system"]: row for row in json.loads(out.read_text())["rows"]}
    assert set(rows) == {"greedy", "hvd_cost"}
    assert rows["hvd_cost"]["engine"] == "vllm"
    assert rows["hvd_cost"]["identical_to_greedy"] == 1.0
    assert rows["hvd_cost"]["tokens"] == rows["greedy"]["tokens"] > 0
    assert rows["hvd_cost"]["target_passes"] <= rows["greedy"]["target_passes"]
