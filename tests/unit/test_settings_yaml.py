"""The one YAML reader: every key once, no alias, short messages."""

from __future__ import annotations

import ast
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from hvd_ray.config import load_config, read_settings
from hvd_ray.errors import UserError, shown
from hvd_ray.payoff.cost_by_hand import read_any_costs
from hvd_ray.serving.settings import serve_config
from hvd_ray.settings_yaml import MAX_BYTES
from hvd_ray.tuning.space import load_sweep

PACKAGE = Path(__file__).parents[2] / "hvd_ray"
READERS: dict[str, Callable[[Path], object]] = {
    "config": load_config,
    "serve": lambda path: serve_config(read_settings(path)),
    "sweep": load_sweep,
    "costs": read_any_costs,
}
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "given.yaml"


@pytest.mark.parametrize("reader", READERS)
def test_v04_a_key_that_stands_twice_is_named_with_its_lines(file: Path, reader: str) -> None:
    """YAML's own rule keeps the last one and loses the first in silence."""
    file.write_text("policy: {name: suffix}\nseed: 1\npolicy: {tau: 2}\n")
    with pytest.raises(UserError, match=r"line 3: the key 'policy' .*line 1") as caught:
        READERS[reader](file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("policy:\n  tau: 2\n  min_match: 3\n  tau: 2\n", "line 4: the key 'tau'"),
        ('{"policy": {"tau": 2,\n "tau": 3}}', "line 2: the key 'tau'"),
        ("policy:\n  <<: {tau: 2}\n  tau: 3\n", "the key 'tau'"),
    ],
)
def test_v04_within_a_section_in_json_and_by_a_merge(file: Path, text: str, key: str) -> None:
    file.write_text(text)
    with pytest.raises(UserError, match=key):
        load_config(file)


def test_v04_a_word_may_not_repeat_a_key_nor_take_another_back() -> None:
    with pytest.raises(UserError, match="the key 'tau' stands a second time"):
        load_config(None, ["policy={tau: 1, tau: 2}"])
    with pytest.raises(UserError, match=r"takes 'policy\.name=suffix' back"):
        load_config(None, ["policy.name=suffix", "policy={min_match: 2}"])
    config = load_config(None, ["policy={name: hvd_tau}", "policy.tau=3", "policy.tau=4"])
    assert (config.policy.name, config.policy.tau) == ("hvd_tau", 4)


@pytest.mark.parametrize("reader", READERS)
def test_nested_aliases_are_refused_before_they_expand(file: Path, reader: str) -> None:
    """Under a kilobyte that stands for a thousand million strings."""
    file.write_text(BOMB)
    assert len(BOMB) < 1000
    tracemalloc.start()
    with pytest.raises(UserError, match=r"line 2: \*a is an alias") as caught:
        READERS[reader](file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 * 2**20
    assert len(str(caught.value)) < 400


def test_advise_refuses_the_bomb_in_one_line(file: Path) -> None:
    from hvd_ray.cli import main

    file.write_text(BOMB)
    log = file.with_name("log.jsonl")
    log.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    with pytest.raises(SystemExit) as ended:
        main(["advise", str(log), "--costs", str(file)])
    assert ended.value.code == 2


@pytest.mark.parametrize("key", ["seed", "policy.tau", "policy.name", "nonsense"])
@pytest.mark.parametrize(
    "value", ["[" + "x, " * 2_000 + "]", "y" * 5_000, "0x" + "f" * 5_000], ids=["list", "s", "n"]
)
def test_a_long_value_is_shown_in_part(file: Path, key: str, value: str) -> None:
    name, _, leaf = key.partition(".")
    file.write_text(f"{name}: {{{leaf}: {value}}}\n" if leaf else f"{name}: {value}\n")
    for read in (lambda: load_config(file), lambda: load_config(None, [f"{key}={value}"])):
        with pytest.raises(UserError, match=f"(?s)setting {key}: ") as caught:
            read()
        assert len(str(caught.value)) < 1000


def test_a_file_beyond_the_bound_is_not_read(file: Path) -> None:
    file.write_text("#" * (MAX_BYTES + 1))
    with pytest.raises(UserError, match="settings have 262,144 at most"):
        load_config(file)


def test_shown_is_cut() -> None:
    assert shown("abc") == "'abc'"
    assert shown([1] * 10_000) == str([1] * 10_000)[:120] + "..."
    assert shown(16**10_000) == "a int of more digits than can be written"


def test_nothing_else_reads_yaml() -> None:
    """A second reader would have YAML's own rules again."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_yaml = isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "yaml"
            if is_yaml and "load" in node.attr.lower():
                assert path.name == "settings_yaml.py", path
