"""The latest settings that a deployment took on, for replicas that start after a refused change.

Serve gives a new replica the latest `user_config`, also one that running replicas have refused: a
replica that replaced a dead one could then never start. It starts with what the others serve.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_ray.home import atomic_path, hvd_home


@dataclass(frozen=True, slots=True)
class KeptSettings:
    """A small file under HVD_HOME, one for a deployment of a Ray session."""

    path: Path

    @classmethod
    def of(cls, session: str, app: str, lasting: dict[str, Any]) -> KeptSettings:
        """That of a Serve application with these lasting settings in a Ray session."""
        word = json.dumps([session, app, lasting], sort_keys=True)
        digest = hashlib.sha256(word.encode()).hexdigest()[:16]
        return cls(hvd_home() / "serving" / f"settings-{digest}.json")

    def keep(self, tree: dict[str, Any]) -> None:
        """Remember a `user_config` that holds."""
        with atomic_path(self.path) as draft:
            draft.write_text(json.dumps(tree), encoding="utf-8")

    def last(self) -> dict[str, Any] | None:
        """The one that held last; None: none ever did."""
        try:
            tree = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        return tree if isinstance(tree, dict) else None
