"""What `ray job submit --working-dir` would upload, told before Ray refuses it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_ray.errors import UserError

LIMIT_BYTES = 100 * 2**20
"""Ray's job server answers 413 to anything larger; the archive is stored, not compressed."""
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Upload:
    """The files of a working directory that travel with a job."""

    folder: Path
    sizes: tuple[tuple[Path, int], ...]
    """`(path below the folder, bytes)`."""

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self.sizes)

    @property
    def is_too_large(self) -> bool:
        return self.num_bytes > LIMIT_BYTES

    def largest(self, count: int) -> list[tuple[str, int]]:
        """The places that weigh most: folders directly below, and what lies in none."""
        weights: Counter[str] = Counter()
        for path, size in self.sizes:
            weights["/".join(path.parts[:2]) + ("/" if len(path.parts) > 2 else "")] += size
        return weights.most_common(count)


def plan_upload(folder: Path, *, excludes: Sequence[str] = ()) -> Upload:
    """What Ray would pack: all but its default excludes, `.gitignore`, `.rayignore`, `excludes`.

    Raises:
        UserError: there is no such folder.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name the one for --working-dir")
    # Ray's own walk, so that the answer is Ray's: it has no public name for it.
    from ray._private.ray_constants import get_runtime_env_default_excludes
    from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

    root = folder.absolute()
    sizes: list[tuple[Path, int]] = []

    def note(path: Path) -> None:
        if path.is_file():
            sizes.append((path.relative_to(root), path.stat().st_size))

    patterns = [*get_runtime_env_default_excludes(), *excludes]
    _dir_travel(
        root, [_get_excludes(root, patterns)], note, True, logging.getLogger(f"{__name__}.quiet")
    )
    return Upload(folder, tuple(sorted(sizes)))


def upload_lines(upload: Upload, *, num_shown: int = 8) -> list[str]:
    """What stands in the way, or that nothing does; one fact a line."""
    whole = f"{upload.num_bytes / MIB:.1f} MiB in {len(upload.sizes)} files"
    rows = [f"{size / MIB:8.1f} MiB  {place}" for place, size in upload.largest(num_shown)]
    if not upload.is_too_large:
        return [f"{upload.folder}: {whole}, of {LIMIT_BYTES // MIB} MiB that Ray takes", *rows]
    return [
        f"{upload.folder}: {whole}; Ray refuses more than {LIMIT_BYTES // MIB} MiB",
        *rows,
        "name what a job does not need in .rayignore (as in .gitignore), and keep data and models",
        "on storage that every node sees",
    ]
