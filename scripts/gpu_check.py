"""What a GPU makes of it, in ten minutes and offline: `make gpu-check`.

Each part is a process of its own with a bound on its time, the most telling first, so that what
fails or takes too long costs nothing of the others:

- exactness: every system of the torch engine against plain decoding, whatever a request asks for;
- speed: vLLM plain, with a head, and with the plugin, as they are served, with CUDA graphs; in
  float32 the plugin's outputs must be plain vLLM's as often as those of vLLM's own drafts;
- acceptance: the same head in vLLM and in the torch engine;
- costs: passes and drafts of 4B- and 8B-shaped targets with random weights.

    make gpu-check                                                      # the default model
    make gpu-check ARGS="--dtype bfloat16 model=Qwen/Qwen3-8B drafting.eagle3.head=FOLDER"
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

ROOT = Path(__file__).parents[1]
HVD = ("-m", "hvd_ray.cli")
SHAPES = "qwen3-4b,llama-3.1-8b"
SYSTEMS = "greedy,eagle3,hvd_cost"
OWN = ("greedy", "ngram", "suffix", "eagle3")
"""vLLM's own systems; greedy agrees with itself."""
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TRITON_F32_DEFAULT": "ieee",  # else attention in float32 rounds its factors to TF32
}
LOG_LINES = 12


@dataclass(frozen=True, slots=True)
class Part:
    """One command, and what its answer says."""

    name: str
    arguments: tuple[str, ...]
    """Of Python."""
    limit_s: float
    judge: Callable[[str], tuple[bool, list[str]]] = lambda _: (True, [])
    """From the command's stdout: whether it is as it should be, and lines to show."""
    lacking: str = ""
    """Why it cannot be run here; empty where it can."""


@dataclass(slots=True)
class Outcome:
    """What became of a part."""

    name: str
    status: str
    seconds: float = 0.0
    lines: list[str] = field(default_factory=list)


def parts(given: argparse.Namespace) -> Iterator[Part]:
    """What is run, in order; together within ten minutes."""
    out, settings = given.out.absolute(), tuple(given.settings)
    lacking = "" if find_spec("vllm") else "vLLM is not installed"
    lacking = lacking or _lacking_model(settings)
    yield Part("exactness", ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"), 100)
    bench = ("bench", "--engine", "vllm", "--systems", given.systems, "--limit", str(given.prompts))
    greedy = ("--temperature", "0")  # some of the shipped prompts are sampled
    yield Part(
        "speed",
        (*HVD, *bench, *greedy, "--max-tokens", "64", "--dtype", given.dtype, "--json", *settings),
        270,
        partial(judge_speed, is_exact=given.dtype == "float32"),
        lacking,
    )
    compare = ("drafter", "compare", "--limit", "2", "--max-tokens", "64", "--json")
    target = [s.removeprefix("model=") for s in settings if s.startswith("model=")]
    others = [s for s in settings if not s.startswith("model=")]
    named = ("--target", target[-1]) if target else ()
    if given.dtype != "float32":
        lacking = lacking or "it compares in float32"
    yield Part("acceptance", (*HVD, *compare, *named, *others), 100, judge_acceptance, lacking)
    costs = ("calibrate", "--shapes", SHAPES, "--out", str(out))
    yield Part("costs", (*HVD, *costs), 110)


def _lacking_model(settings: Sequence[str]) -> str:
    from hvd_ray.config import DEFAULT_MODEL
    from hvd_ray.fetch import is_present

    if any(setting.startswith("model=") for setting in settings) or is_present(DEFAULT_MODEL):
        return ""
    return f"{DEFAULT_MODEL} is not there: hvd fetch {DEFAULT_MODEL}"


def judge_speed(said: str, *, is_exact: bool) -> tuple[bool, list[str]]:
    """Speed and accepted tokens of each system; in float32 the plugin's outputs are held to be
    greedy's as often as those of vLLM's own systems."""
    rows = json.loads(said)["aggregate"]
    lines = [
        f"{row['system']:10} {row['tokens_per_second']:8.1f} tokens/s, "
        f"{row['speedup_vs_greedy']:.2f}x, {row['emitted_per_pass']:.2f} tokens a pass, "
        f"{row['identical_to_greedy']:.0%} of the outputs greedy's"
        for row in rows
    ]
    same = {row["system"]: row["identical_to_greedy"] for row in rows}
    bar = min(share for name, share in same.items() if name in OWN)
    return not is_exact or min(same.values()) >= bar, lines


def judge_acceptance(said: str) -> tuple[bool, list[str]]:
    """The mean lengths side by side; that they are close the command's exit code says."""
    found = json.loads(said)
    lengths = [f"{name} {found[name]['mean_acceptance_length']:.3f}" for name in ("torch", "vllm")]
    same = f"{found['identical_outputs']} of {found['prompts']} outputs identical"
    return True, [f"mean acceptance length: {', '.join(lengths)}; {same}"]


def run(part: Part, out: Path) -> Outcome:
    """Run a part within its time, with all that it starts; its log goes to `out`."""
    if part.lacking:
        return Outcome(part.name, f"left out: {part.lacking}")
    started = monotonic()
    log = out / f"{part.name}.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, *part.arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=ROOT,
            env=SETTINGS | os.environ,
            start_new_session=True,
        )
        try:
            said = process.communicate(timeout=part.limit_s)[0].decode(errors="replace")
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, code = process.communicate()[0].decode(errors="replace"), None
    (out / f"{part.name}.out").write_text(said, encoding="utf-8")
    return _outcome(part, said, code, monotonic() - started, log)


def _outcome(part: Part, said: str, code: int | None, seconds: float, log: Path) -> Outcome:
    if code is None:
        return Outcome(part.name, f"FAILED: not done in {part.limit_s:g} s", seconds, _tail(log))
    try:
        is_right, lines = part.judge(said)
    except (ValueError, KeyError, TypeError):  # it ended before it could answer
        is_right, lines = False, []
    if code == 0 and is_right:
        return Outcome(part.name, "passed", seconds, lines or said.strip().splitlines()[-1:])
    shown = lines or said.strip().splitlines()[-LOG_LINES:]
    return Outcome(part.name, f"FAILED: exit code {code}", seconds, [*shown, *_tail(log)])


def _tail(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LOG_LINES:]


def gpu_name() -> str | None:
    """The GPU that torch uses; None without one, or without torch."""
    if find_spec("torch") is None:
        return None
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def report(outcomes: Sequence[Outcome], gpu: str, out: Path) -> int:
    """Write the summary; the exit code."""
    tree: dict[str, Any] = {"gpu": gpu, "parts": [asdict(outcome) for outcome in outcomes]}
    (out / "summary.json").write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    print(f"on {gpu}; logs and summary.json in {out}")
    return int(any(outcome.status.startswith("FAILED") for outcome in outcomes))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="model=, ... of hvd bench")
    parser.add_argument("--out", type=Path, default=Path("out/gpu-check"))
    parser.add_argument("--systems", default=SYSTEMS)
    parser.add_argument("--prompts", type=int, default=1, help="of each workload, in vLLM")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    given = parser.parse_intermixed_args()
    gpu = gpu_name()
    if gpu is None:
        print("gpu-check needs a CUDA GPU and torch, which sees none here; hvd doctor says why")
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for part in parts(given):
        print(f"{part.name} ...", flush=True)
        outcomes.append(run(part, given.out))
        print(f"  {outcomes[-1].status} ({outcomes[-1].seconds:.0f} s)")
        print("".join(f"  {line}\n" for line in outcomes[-1].lines), end="", flush=True)
    return report(outcomes, gpu, given.out)


if __name__ == "__main__":
    sys.exit(main())
