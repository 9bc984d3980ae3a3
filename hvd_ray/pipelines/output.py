"""A folder that a long run fills: one run at a time, the same settings every time, resumable.

`manifest.json` holds the settings that decide the rows. A run that was killed and is started
again with the same settings goes on; one with others is refused before anything is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_ray.errors import UserError
from hvd_ray.home import atomic_path, ensure_dir, file_lock

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class OutputFolder:
    """A folder that is ours for the time of a run."""

    path: Path
    manifest: Mapping[str, Any]
    is_resumed: bool
    """Whether an earlier run with these settings has been here."""

    def withdraw(self) -> None:
        """Give the claim up: nothing was filled, so another run may have the folder."""
        (self.path / MANIFEST).unlink(missing_ok=True)

    def finish(self, result: Mapping[str, Any], *, about: Mapping[str, Any]) -> None:
        """Say that the folder is complete, with what it holds and where it comes from."""
        done = {"complete": True, "result": result, "provenance": about}
        _write(self.path, {**self.manifest, **done})


@contextmanager
def claimed(
    path: Path, settings: Mapping[str, Any], *, notes: Mapping[str, Any] | None = None
) -> Iterator[OutputFolder]:
    """Hold `path` for a run with these settings; the claim ends with the process at the latest.

    Args:
        path: made if it is absent.
        settings: JSON values; everything that decides the rows, and nothing else.
        notes: further entries of the manifest, which a later run may have otherwise.

    Raises:
        UserError: another run holds it, it was filled with other settings, it holds something
            else, or it cannot be written.
    """
    settings = json.loads(json.dumps(settings))
    check_settings(path, settings)
    ensure_dir(path)

    def refuse() -> None:
        raise UserError(
            f"{path}: another run is writing there; wait for it or choose another --out"
        )

    with file_lock(path / MANIFEST, on_wait=refuse):
        was_there = check_settings(path, settings)
        _remove_drafts(path)
        manifest = {"complete": False, **(notes or {}), "settings": settings}
        _write(path, manifest)
        yield OutputFolder(path, manifest, was_there)


def check_settings(path: Path, settings: Mapping[str, Any]) -> bool:
    """Whether a run with these settings has been at `path` already; touches nothing.

    Raises:
        UserError: it was filled with other settings, or holds something else.
    """
    found = read_manifest(path)
    if found is None:
        if any(path.glob("**/*.parquet")):
            raise UserError(f"{path}: holds Parquet files but no {MANIFEST}; choose another --out")
        return False
    difference = _first_difference(found["settings"], settings)
    if difference is not None:
        key, before, now = difference
        raise UserError(
            f"{path}: was filled with {key}={before}, and this run has {key}={now}; "
            "choose another --out, or repeat the command as it was to go on"
        )
    return True


def read_manifest(path: Path) -> dict[str, Any] | None:
    """What stands in the folder's manifest; None where there is none.

    Raises:
        UserError: it is there and cannot be read.
    """
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: cannot be read as JSON ({error})") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("settings"), dict):
        raise UserError(f"{file}: is no manifest of hvd; choose another --out")
    return manifest


def _write(path: Path, manifest: Mapping[str, Any]) -> None:
    with atomic_path(path / MANIFEST) as draft:
        text = json.dumps(manifest, indent=2, ensure_ascii=False)
        draft.write_text(text + "\n", encoding="utf-8")


def _remove_drafts(path: Path) -> None:
    """Half-written parts of killed runs; nobody else writes here while the folder is ours."""
    for draft in path.glob("**/.*.tmp*"):
        draft.unlink(missing_ok=True)


def _first_difference(
    before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = ""
) -> tuple[str, object, object] | None:
    """`(key, old value, new value)` of the first setting that differs."""
    for key in dict.fromkeys((*before, *now)):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found = _first_difference(old, new, f"{prefix}{key}.")
            if found is not None:
                return found
        elif old != new:
            return f"{prefix}{key}", old, new
    return None
