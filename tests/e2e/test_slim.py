"""`hvd slim` on a tiny Llama: search, gate, calibrate, and a bench with what came of it."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_ray.cli import main
from hvd_ray.config import Config
from hvd_ray.engines.torch_engine import TorchEngine
from hvd_ray.systems import build_decoder
from hvd_ray.text import HFTextCodec
from hvd_ray.traces.schema import Trace
from hvd_ray.traces.store import write_traces
from hvd_ray.types import Request, SamplingParams
from hvd_ray.verify.slim_file import read_slim

Captured = pytest.CaptureFixture[str]
NUM_TRACES = 10


@pytest.fixture
def traces(tiny_llama_path: Path, tmp_path: Path) -> Path:
    """Greedy outputs of repetitive prompts, so that a cache has something to draft."""
    engine = TorchEngine.load(tiny_llama_path, dtype="float32")
    codec = HFTextCodec(tiny_llama_path)
    decoder = build_decoder("greedy", engine=engine, codec=codec, config=Config())
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    recorded = []
    for number in range(NUM_TRACES):
        ids = np.random.default_rng(number).integers(5, 200, 6)
        prompt = tuple(int(token) for token in np.tile(ids, 4))
        completion = decoder.generate(Request(f"r{number}", prompt, sampling))
        recorded.append(trace(number, prompt, completion.token_ids, sampling))
    path = tmp_path / "traces" / "p0.parquet"
    write_traces(recorded, path)
    return path.parent


def trace(
    number: int, prompt: tuple[int, ...], output: tuple[int, ...], sampling: SamplingParams
) -> Trace:
    values: dict[str, Any] = {
        "trace_id": f"t{number}",
        "prompt_id": f"p{number}",
        "workload": "toy",
        "family": "toy",
        "scope": "default",
        "session_id": f"s{number}",
        "created_at": datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=number),
        "model": "tiny",
        "tokenizer_sha": "x",
        "prompt_token_ids": prompt,
        "output_token_ids": output,
        "finish_reason": "length",
        "sampling": sampling,
        "context_length": 2048,
        "policy": "greedy",
        "engine": "torch",
        "split": "train",
        "error": None,
    }
    return Trace(**values)


def run(capsys: Captured, *words: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--json"])
    captured = capsys.readouterr()
    assert ended.value.code == 0, captured.err
    answer: dict[str, Any] = json.loads(captured.out)
    return answer


@pytest.mark.ray
def test_from_traces_to_a_bench_with_tiers(
    traces: Path,
    tiny_llama_path: Path,
    tmp_path: Path,
    hvd_home: Path,
    ray_session: object,
    capsys: Captured,
) -> None:
    del hvd_home, ray_session
    target = (f"model={tiny_llama_path}", "dtype=float32")
    out = tmp_path / "slim"
    options = ("--out", str(out), "--skip", "0.5", "--trials", "3", "--tokens", "900")
    found = run(capsys, "slim", "search", str(traces), *options, *target)
    assert [row["method"] for row in found["rows"]] == ["prefix", "dp", "knapsack", "dimr", "ours"]
    best = min(row["wrong_accepts"] for row in found["rows"])
    kept = next(row for row in found["rows"] if row["method"] == found["best"])
    assert kept["wrong_accepts"] == best
    slim = read_slim(out / "slim.json")
    assert slim.method == found["best"]
    assert slim.provenance["held_out_blocks"] > 0

    with pytest.raises(SystemExit) as drawn:
        main(["slim", "plot", str(out), "--all", "--out", str(tmp_path / "frontier.png")])
    assert drawn.value.code == 0
    assert "of 100 points is at" in capsys.readouterr().out, "five methods, twenty thresholds"
    assert (tmp_path / "frontier.png").stat().st_size > 1000

    with_slim = (*target, f"tiers.slim={out / 'slim.json'}")
    gate = run(capsys, "slim", "gate", str(traces), *with_slim)
    assert [point["escalated"] for point in gate["curve"]] == sorted(
        point["escalated"] for point in gate["curve"]
    )

    costs = run(capsys, "calibrate", "--repeats", "1", *with_slim)
    assert costs["slim"] == slim.key
    assert len(costs["slim_ms"]) == len(costs["rows"])

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the same and the same and the same and"}\n', encoding="utf-8")
    systems = "nested,self_spec,tiered,tiered_learned,cascade_diff,hvd_cost+nested"
    flags = ("--prompts", str(prompts), "--max-tokens", "24")
    with pytest.raises(SystemExit) as refused:
        main(["bench", *flags, "--systems", "hvd_cost+nested", *with_slim])
    assert refused.value.code == 2, "no predictor is registered"
    capsys.readouterr()
    systems = systems.removesuffix(",hvd_cost+nested")
    forced = ("tiers.is_forced=true", "tiers.max_miss_rate=1")
    result = run(capsys, "bench", *flags, "--systems", systems, *with_slim, *forced)
    rows = {row["system"]: row for row in result["rows"]}
    assert rows["nested"]["identical_to_greedy"] == rows["self_spec"]["identical_to_greedy"] == 1
    assert rows["self_spec"]["slim_passes_per_token"] > 0
    assert rows["greedy"]["slim_passes_per_token"] == 0
    assert not any("NOT EXACT" in note for note in result["notes"])
