"""What an answer is worth where decoding may change it: a score against greedy's own answer.

The baseline is the target itself, so the question is what a lossy system loses against it, not how
good the target is. JSON answers are held against their schema instead, greedy's as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from hvd_ray.bench.prompt_rows import Prompt

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_FENCE = re.compile(r"^```(?:json)?\s*|\s*```$")


def same_number(prompt: Prompt, text: str, reference: str) -> float:
    """Whether the last number is that of greedy's answer."""
    del prompt
    return float(_last_number(text) == _last_number(reference))


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def chrf(prompt: Prompt, text: str, reference: str) -> float:
    """chrF (sacrebleu) against greedy's answer, 0..1."""
    from sacrebleu.metrics import CHRF

    del prompt
    return float(CHRF().sentence_score(text, [reference]).score) / 100


def rouge_l(prompt: Prompt, text: str, reference: str) -> float:
    """ROUGE-L's F measure (rouge-score) against greedy's answer, 0..1."""
    from rouge_score.rouge_scorer import RougeScorer

    del prompt
    return float(RougeScorer(["rougeL"]).score(reference, text)["rougeL"].fmeasure)


def valid_json(prompt: Prompt, text: str, reference: str) -> float:
    """Whether the answer is JSON that its prompt's schema allows."""
    del reference
    schema = _schema_in(prompt)
    try:
        answer = json.loads(_FENCE.sub("", text.strip()))
    except (ValueError, RecursionError):
        return 0.0
    return float(schema is None or _is_valid(answer, schema))


def _schema_in(prompt: Prompt) -> dict[str, Any] | None:
    """The first JSON object that stands at the beginning of a line of the last message."""
    text = prompt.messages[-1].content if prompt.messages else prompt.prompt or ""
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                schema = json.loads(line)
            except (ValueError, RecursionError):
                continue
            return schema if isinstance(schema, dict) else None
    return None


def _is_valid(answer: object, schema: dict[str, Any]) -> bool:
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    kind = validator_for(schema)
    try:  # a registry of its own: nothing is fetched for a reference
        return bool(kind(schema, registry=Registry()).is_valid(answer))
    except (SchemaError, Unresolvable, re.error):
        return False


Scorer = Callable[[Prompt, str, str], float]
SCORERS: Mapping[str, tuple[str, Scorer]] = MappingProxyType(
    {
        "gsm8k": ("same_number", same_number),
        "wmt14_de_en": ("chrf", chrf),
        "cnn_dailymail": ("rouge_l", rouge_l),
        "json_schema": ("valid_json", valid_json),
        "extraction": ("valid_json", valid_json),
    }
)
"""By workload: the metric's name and its function of prompt, answer and greedy's answer."""


def agreement(token_ids: tuple[int, ...], reference: tuple[int, ...]) -> float:
    """Share of positions at which two outputs hold the same token; a missing one differs."""
    longest = max(len(token_ids), len(reference))
    equal = sum(a == b for a, b in zip(token_ids, reference, strict=False))
    return equal / longest if longest else 1.0
