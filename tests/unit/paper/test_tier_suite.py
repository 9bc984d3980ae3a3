"""What the suite of tiers asks for by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_ray.bench.quality import SCORERS
from hvd_ray.bench.session import BenchOptions
from hvd_ray.config import Config
from hvd_ray.paper.suite import settings_of
from hvd_ray.paper.tier_suite import MAX_TOKENS, TASKS, tier_options


@pytest.fixture
def prompts_dir(tmp_path: Path) -> Path:
    for task in TASKS:
        (tmp_path / f"{task}.jsonl").write_text('{"prompt": "abc"}\n')
    return tmp_path


def test_every_task_has_a_score_and_room_for_its_answers(prompts_dir: Path) -> None:
    assert set(TASKS) == set(MAX_TOKENS)
    assert set(TASKS) <= set(SCORERS)
    asked = tier_options(BenchOptions(), prompts_dir=prompts_dir)
    prompts = asked.load().prompts
    found = {prompt.workload: asked.sampling(0).of(prompt).max_tokens for prompt in prompts}
    assert found == dict(MAX_TOKENS)


def test_a_limit_that_was_given_is_everyones(prompts_dir: Path) -> None:
    asked = tier_options(BenchOptions(max_tokens=48), prompts_dir=prompts_dir)
    assert {asked.sampling(0).of(prompt).max_tokens for prompt in asked.load().prompts} == {48}


def test_folders_from_before_there_were_limits_by_task_can_be_gone_on_with(
    prompts_dir: Path,
) -> None:
    given, by_task = (
        tier_options(BenchOptions(max_tokens=limit), prompts_dir=prompts_dir)
        for limit in (48, None)
    )
    assert "max_tokens_of" not in settings_of("tiers", given, Config())
    assert settings_of("tiers", by_task, Config())["max_tokens_of"]["json_schema"] == 256
