"""Small JSON files with a format version: read whole and valid, or refused in one clear line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from hvd_ray.errors import UserError, own_words, shown

Model = TypeVar("Model", bound=BaseModel)


def read_versioned(
    path: Path, model: type[Model], *, what: str, version: int, remedy: str, absent: str = ""
) -> Model:
    """The file as its model.

    Args:
        path: of the file; its field `format_version` must be `version`.
        model: what it holds.
        what: what such a file is called in a message.
        version: the one that this version of hvd_ray reads and writes.
        remedy: what to type where the file cannot be used.
        absent: said where there is none; by default "no `what` at `path`".

    Raises:
        UserError: absent, no JSON, of another version, or a field is wrong.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(absent or f"no {what} at {path}; {remedy}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{what} {path}: cannot be read ({error}); {remedy}") from None
    found = raw.get("format_version") if isinstance(raw, dict) else None
    if found != version:
        raise UserError(
            f"{what} {path}: format version {shown(found)}, this version reads {version}; {remedy}"
        )
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{what} {path}: {where}: {own_words(first['msg'])}; {remedy}") from None
