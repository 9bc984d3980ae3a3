"""The suite inside vLLM, on a stand-in for its engines: one folder a load, resumable."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hvd_ray.bench import vllm_engines
from hvd_ray.bench.engine_process import Answer
from hvd_ray.bench.report import title
from hvd_ray.bench.session import BenchOptions
from hvd_ray.config import load_config
from hvd_ray.paper.report import paper_markdown
from hvd_ray.paper.suite import suite_options
from hvd_ray.paper.vllm_suite import Loaded, run_vllm_suite
from hvd_ray.types import Request
from tests.unit.bench.test_vllm_run import DRAFTED, PLAIN, Silent

STARTED: list[dict[str, Any]] = []


class Stand:
    def __init__(self, arguments: dict[str, Any]) -> None:
        self.answer = DRAFTED if arguments["system"] == "suffix" else PLAIN
        STARTED.append(arguments)

    def start(self) -> None: ...

    def wait_ready(self) -> None: ...

    def reset(self) -> None: ...

    def close(self) -> None: ...

    def serve(self, requests: Sequence[Request]) -> tuple[float, list[Answer]]:
        return 0.5 * len(requests), [self.answer for _ in requests]


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_llama_path: Path) -> Any:
    for workload in ("a", "b"):
        lines = [
            f'{{"id": "{i}", "workload": "{workload}", "family": "chat", "session_id": "s{i}", '
            f'"split": "test", "prompt_token_ids": [{i + 1}, 2, 3]}}'
            for i in range(9)
        ]
        (tmp_path / f"{workload}.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(
        vllm_engines,
        "engine_arguments",
        lambda system, _, wave: {"system": system, "max_num_seqs": wave.concurrency},
    )
    STARTED.clear()
    bench = BenchOptions(systems=("suffix",), engine="vllm", limit=2, max_tokens=4, concurrency=4)
    options = suite_options(bench, prompts_dir=tmp_path, out=tmp_path / "out", concurrencies=(1, 4))
    config = load_config(None, [f"model={tiny_llama_path}", "tracking.uri=none"])

    def run() -> list[Loaded]:
        return run_vllm_suite(options, config, progress=Silent(), open_engine=Stand)

    return run


def test_each_load_has_its_folder_and_the_engines_are_loaded_once(suite: Any) -> None:
    alone, four = suite()
    assert [s["system"] for s in STARTED] == ["greedy", "suffix"]
    assert {s["max_num_seqs"] for s in STARTED} == {4}
    assert (alone.folder.name, four.folder.name) == ("at-1", "at-4")
    assert {row.prompts for row in alone.result.rows} == {2}, "two waves of one"
    assert {row.prompts for row in four.result.rows} == {8}, "two waves of four"
    assert "4 requests at once" in title(four.result)
    assert "at once" not in title(alone.result)
    page = paper_markdown(four.result, four.own)
    assert "Beside the papers" in page
    assert "What a cycle costs" not in page, "vLLM does not tell"
    assert "hvd_cost against" not in page, "it was not measured"
    STARTED.clear()
    again = suite()
    assert STARTED == [], "all of it was stored"
    assert [one.result.rows for one in again] == [alone.result.rows, four.result.rows]
