"""Scores against greedy's own answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hvd_ray.bench.prompt_rows import Message, Prompt
from hvd_ray.bench.quality import SCORERS, agreement, chrf, rouge_l, same_number, valid_json
from tests.unit.bench import conftest

SCHEMA = '{"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}'


def prompt(text: str = "x") -> Prompt:
    plain = conftest.prompt("x")
    return replace(plain, prompt=None, messages=(Message("user", text),))


def test_the_last_number_counts() -> None:
    assert same_number(prompt(), "First 3, so 1,200.50 in all", "that is 1200.5") == 1
    assert same_number(prompt(), "12", "13") == 0
    assert same_number(prompt(), "none", "none either") == 1


def test_overlap_scores() -> None:
    for score in (chrf, rouge_l):
        assert score(prompt(), "the cat sat", "the cat sat") == pytest.approx(1)
        assert score(prompt(), "zq xv", "the cat sat") < 0.1
        assert 0.2 < score(prompt(), "the cat stood", "the cat sat") < 1


@pytest.mark.parametrize(
    ("text", "worth"),
    [
        ('{"a": 1}', 1),
        ('```json\n{"a": 1}\n```', 1),
        ('{"a": "one"}', 0),
        ("{}", 0),
        ("no JSON", 0),
    ],
)
def test_json_is_held_against_the_prompts_schema(text: str, worth: int) -> None:
    assert valid_json(prompt(f"Answer by this schema.\n{SCHEMA}"), text, "") == worth


def test_a_foreign_reference_is_never_fetched() -> None:
    schema = '{"$ref": "http://127.0.0.1:9/schema.json"}'
    assert valid_json(prompt(schema), "1", "") == 0


def test_agreement_counts_positions() -> None:
    assert agreement((1, 2, 3), (1, 2, 3)) == agreement((), ()) == 1
    assert agreement((1, 9, 3), (1, 2, 3)) == pytest.approx(2 / 3)
    assert agreement((1,), (1, 2)) == 0.5


def test_every_score_has_a_name() -> None:
    assert {name for name, _ in SCORERS.values()} == {
        *("same_number", "chrf", "rouge_l", "valid_json")
    }
