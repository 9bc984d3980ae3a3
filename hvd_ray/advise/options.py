"""What `hvd advise` is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hvd_ray.config import DEFAULT_MODEL
from hvd_ray.errors import UserError
from hvd_ray.pipelines.importing import OnBadLine
from hvd_ray.traces.transcripts import Turns
from hvd_ray.traces.transcripts_formats import LogFormat

LEARN = "learn"
NO_PREDICTOR = "none"
PASS = "pass"
TAUS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)


@dataclass(frozen=True, slots=True)
class AdviceOptions:
    """Each field is a flag of `hvd advise`.

    Raises:
        UserError: a value is out of range or unknown, or contradicts another.
    """

    logs: tuple[Path, ...]
    """Files and folders of logs, or folders of traces."""
    tokenizer: str = DEFAULT_MODEL
    costs: str | None = None
    """A cost table's file, `pass`, or None: this machine's own, else `pass`."""
    predictor: str = LEARN
    """A folder, `models:/NAME@ALIAS`, `champion`, `learn`: from the log itself, or `none`."""
    save_predictor: Path | None = None
    eagle3: str | None = None
    """Chances by position, a folder of traces and steps, `none`, or None: assumed."""
    concurrency: int = 1
    split: Literal["test", "all"] = "test"
    judged_tokens: int = 40_000
    """Output tokens to judge on, in whole sessions."""
    learned_tokens: int = 100_000
    keep_loops: bool = False
    log_format: LogFormat | None = None
    turns: Turns = "all"
    on_bad_line: OnBadLine = "fail"
    limit: int | None = None
    """Rows of each file."""
    num_workers: int = 1

    def __post_init__(self) -> None:
        numbers = {
            "--concurrency": self.concurrency,
            "--judged-tokens": self.judged_tokens,
            "--learned-tokens": self.learned_tokens,
        }
        for flag, value in numbers.items():
            if value < 1:
                raise UserError(f"{flag} must be 1 or more, got {value}")
        if self.split not in ("test", "all"):
            raise UserError(f"--split must be test or all, got {self.split!r}")
        if self.split == "all" and self.predictor == LEARN:
            raise UserError(
                "--split all would judge a predictor on what it learned from; name one with "
                "--predictor, or leave it out with --predictor none"
            )
        if self.save_predictor is not None and self.predictor != LEARN:
            raise UserError(
                "--save-predictor keeps a predictor learned here, and --predictor names one"
            )
