"""A file that is the right one only if its content is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PinnedFile:
    """One file of one release, known by its content."""

    project: str
    version: str
    filename: str
    sha256: str
    num_bytes: int

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"
