"""How a fetch tells what it is doing."""

import logging
from typing import Protocol

_log = logging.getLogger(__name__)


class FetchProgress(Protocol):
    """Hears how a fetch goes on; called from the fetching thread, a stage before its advances."""

    def stage(self, text: str, *, total: int | None = None) -> None:
        """A new stage begins; `total` in bytes where it is known."""

    def advance(self, done: int) -> None:
        """The stage has reached `done` bytes."""


class LoggedProgress:
    """For callers without a terminal: stages go to the log."""

    def stage(self, text: str, *, total: int | None = None) -> None:
        del total
        _log.info("%s", text)

    def advance(self, done: int) -> None:
        del done
