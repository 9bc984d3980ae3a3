"""The quick part of `make fuzz`: a few odd requests of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.asking import JSON, Amount, runs
from tests.fuzz.served import Served, served


@pytest.fixture(scope="module")
def target(tiny_llama_path: Path) -> Iterator[Served]:
    with served(tiny_llama_path) as found:
        yield found


def test_nothing_asked_is_a_fault_a_hang_or_left_behind(target: Served) -> None:
    names = set()
    for name, run in runs(target, Amount(examples=12, seed=1)):
        run()
        names.add(name)
    assert len(names) > 15
    target.check_idle()


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "a", "user": "\\ud800"}',
        b'{"prompt": "\\udfff"}',
        b'{"prompt": "a", "\\ud800": 1}',
        b'{"prompt": "a", "model": "\\ud83d"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "a", "stop": ["\\ud800"]}',
    ],
)
def test_half_a_surrogate_pair_is_refused_wherever_it_stands(target: Served, body: bytes) -> None:
    for path in ("/v1/completions", "/tokenize"):
        answer = target.ask("POST", path, content=body, headers=JSON)
        assert answer.status_code == 400


def test_a_whole_surrogate_pair_is_text(target: Served) -> None:
    body = b'{"prompt": "\\ud83d\\ude00", "max_tokens": 1, "echo": true}'
    answer = target.ask("POST", "/v1/completions", content=body, headers=JSON)
    assert answer.json()["choices"][0]["text"].startswith("😀")
