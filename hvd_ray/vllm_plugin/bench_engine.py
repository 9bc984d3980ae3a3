"""One engine of a comparison, in a process of its own (`bench/engine_process.py` starts it).

vLLM sets threads and global state for good, so each engine that is compared gets a process. The
first line on stdin is the engine's arguments; every further line is a wave of requests that are
served together, or a reset; each is answered by one line. All lines are JSON.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, field
from threading import Thread
from time import perf_counter, sleep
from typing import Any, TextIO


@dataclass(slots=True)
class _Asked:
    """What one request has brought so far."""

    token_ids: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    """Tokens of each target pass."""
    drafts: list[tuple[int, int]] = field(default_factory=list)
    """Drafted and accepted tokens of each pass that verified a draft."""
    steps: list[dict[str, Any]] | None = None
    """The cycles, as the plugin tells of them; None where vLLM drafts itself."""
    finish_reason: str | None = None


def main() -> None:
    """Serve until stdin ends."""
    end_with_parent()
    lines = _own_stdout()
    arguments = json.loads(sys.stdin.readline())
    engine = _start(arguments)
    _say(lines, {"ready": True})
    for line in sys.stdin:
        call = json.loads(line)
        if call.get("reset"):
            _reset(engine)
            _say(lines, {"reset": True})
        else:
            _say(lines, _serve(engine, call["requests"]))


def end_with_parent() -> None:
    """Watch the parent: one that is killed closes stdin, but a loading engine does not read it."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            sleep(1)
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def _own_stdout() -> TextIO:
    """The real stdout for answers alone; whatever else is printed goes to stderr."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return lines


def _say(lines: TextIO, answer: dict[str, Any]) -> None:
    lines.write(json.dumps(answer) + "\n")
    lines.flush()


def _start(arguments: dict[str, Any]) -> Any:
    from vllm import LLM
    from vllm.platforms import current_platform

    arguments = _settled(arguments, is_cpu=current_platform.is_cpu())
    return LLM(**arguments).llm_engine


def _settled(arguments: dict[str, Any], *, is_cpu: bool) -> dict[str, Any]:
    """The arguments with what all engines of a comparison share.

    A GPU runs CUDA graphs, as it does for its users; its engines share its memory.
    """
    own = dict(arguments)
    if is_cpu:  # it would mean the machine's memory there
        own.pop("gpu_memory_utilization", None)
        own["enforce_eager"] = True
    if "speculative_config" in own:  # vLLM refuses to measure what does not happen
        own["per_request_spec_decode_metrics"] = "detailed"
    return own | {
        "distributed_executor_backend": "uni",
        "enable_prefix_caching": False,
        "disable_log_stats": True,
    }


def _serve(engine: Any, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Answer a wave; its time is that of the whole wave."""
    from vllm import SamplingParams

    asked = {request["id"]: _Asked() for request in requests}
    _listen(engine, asked)
    started = perf_counter()
    for request in requests:
        prompt = {"prompt_token_ids": request["prompt_token_ids"]}
        params = SamplingParams(**request["sampling"], detokenize=bool(request["sampling"]["stop"]))
        engine.add_request(request["id"], prompt, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            _take_in(asked[output.request_id], output)
    seconds = perf_counter() - started
    answers = {
        name: {
            "token_ids": one.token_ids,
            "emitted": one.emitted,
            "drafts": one.drafts,
            "steps": one.steps,
            "finish_reason": one.finish_reason,
        }
        for name, one in asked.items()
    }
    return {"seconds": seconds, "answers": answers}


def _listen(engine: Any, asked: dict[str, _Asked]) -> None:
    """Have the plugin, where it drafts, tell of the cycles of these requests."""
    from hvd_ray.vllm_plugin.compat_runner import watch_steps

    steps: dict[str, list[dict[str, Any]]] = {name: [] for name in asked}
    if watch_steps(_runner(engine), lambda name, step: steps[name].append(asdict(step))):
        for name, one in asked.items():
            one.steps = steps[name]


def _runner(engine: Any) -> Any:
    return engine.model_executor.driver_worker.worker.model_runner


def _take_in(asked: _Asked, output: Any) -> None:
    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    new = len(tokens) - len(asked.token_ids)
    if new > 0:
        asked.token_ids = tokens
        asked.emitted.append(new)
    if output.finished:
        asked.finish_reason = completion.finish_reason
        if (stats := completion.spec_decode_metrics) is not None:
            # the plugin's own figures stand behind the drafts
            drafted_K = stats.per_step_drafted[: len(stats.per_step_accepted)]
            pairs = zip(drafted_K, stats.per_step_accepted, strict=True)
            asked.drafts = [(int(drafted), int(accepted)) for drafted, accepted in pairs]


def _reset(engine: Any) -> None:
    """Empty whatever the engine's drafter remembers of earlier requests."""
    from hvd_ray.vllm_plugin.compat_runner import forget_outputs

    forget_outputs(_runner(engine))


if __name__ == "__main__":
    main()
