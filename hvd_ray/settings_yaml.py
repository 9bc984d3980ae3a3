"""The one way to read YAML: safe types only, every key once, nothing that grows when it is read.

YAML's own rules would let a repeated key lose what stood under it before, in silence, and a few
nested aliases stand for gigabytes. No settings file needs either.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from hvd_ray.errors import UserError

MAX_BYTES = 256 * 1024
"""More is no file of settings."""

_NOT_YAML = (yaml.YAMLError, ValueError, AttributeError, RecursionError)
"""What the YAML reader raises for hostile text: bad dates and tags, nesting without end."""


class _NotTakenError(UserError):
    """YAML that is whole and that no settings are written in."""


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, and aliases."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.get_event()  # type: ignore[no-untyped-call]  # yaml is half typed
            raise _NotTakenError(
                f"{_line(event.start_mark)}: *{event.anchor} is an alias, and none is read; write "
                "out what it stands for"
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        found = super().construct_mapping(node, deep)
        if len(found) < len(node.value):
            self._refuse_repeated(node)
        return found

    def _refuse_repeated(self, node: yaml.MappingNode) -> None:
        first: dict[Any, yaml.Mark] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in first:
                raise _NotTakenError(
                    f"{_line(key_node.start_mark)}: the key {str(key)[:80]!r} stands a second time "
                    f"(first in {_line(first[key])}), and only one can hold; join them"
                )
            first[key] = key_node.start_mark


def read_yaml_file(path: Path) -> Any:
    """What a YAML or JSON file holds; None where it is empty.

    Raises:
        UserError: it cannot be read, is no YAML, repeats a key or has an alias.
    """
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise UserError(f"config {path}: {size:,} bytes, settings have {MAX_BYTES:,} at most")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no UTF-8 text"
        raise UserError(f"config {path}: cannot be read ({reason})") from None
    try:
        return _load(text)
    except _NotTakenError as error:
        raise UserError(f"config {path}: {error}") from None
    except _NOT_YAML as error:
        where = str(error).replace("\n", " ")
        raise UserError(f"config {path}: not valid YAML ({where})") from None


def read_yaml_value(text: str, *, setting: str) -> Any:
    """The value in a word such as `policy.tau=4`.

    Args:
        text: what stands behind the sign.
        setting: the whole word, to be named.

    Raises:
        UserError: it is no YAML, repeats a key or has an alias.
    """
    try:
        return _load(text)
    except _NotTakenError as error:
        raise UserError(f"setting {setting}: {error}") from None
    except _NOT_YAML:
        raise UserError(f"setting {setting}: {text[:80]!r} is not a value") from None


def _load(text: str) -> Any:
    return yaml.load(text, _Loader)  # a SafeLoader that takes less


def _line(mark: yaml.Mark) -> str:
    return f"line {mark.line + 1}"
