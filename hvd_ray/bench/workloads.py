"""Prompts to measure on: the six workloads that ship with the project, or files of the user's.

A prompt file is JSONL, one prompt a line: `id`, `workload`, `family`, `session_id`, `split`, one of
`messages` (OpenAI chat form, text content), `prompt` (raw text) and `prompt_token_ids`, and an
optional `sampling` object. Only the prompt itself is required.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

from hvd_ray.bench.prompt_rows import (
    MAX_LINE_BYTES,
    BadRowError,
    Message,
    Prompt,
    Split,
    parse_row,
)
from hvd_ray.errors import UserError

__all__ = [
    "SHIPPED",
    "Message",
    "Prompt",
    "PromptSet",
    "load_prompts",
    "load_shipped",
    "select",
    "shipped_workloads",
    "split_of",
    "workload_hash",
]

SHIPPED = ("doc_edit", "tool_loop", "code_edit", "extraction", "sql_schema", "open_chat")
_SHIPPED_FOLDER = Path(__file__).parent.parent / "assets" / "workloads"
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class PromptSet:
    """What was read: the prompts in file order, and the lines that were skipped."""

    prompts: tuple[Prompt, ...]
    bad_lines: tuple[str, ...] = ()
    """`FILE:LINE: reason`, one for each line skipped."""


def split_of(key: str) -> Split:
    """The split of a session (or of a prompt without one), about half and half.

    The key's hash alone decides, so prompts added later never move the others.
    """
    return "test" if hashlib.sha256(key.encode()).digest()[0] & 1 else "train"


def shipped_workloads() -> tuple[str, ...]:
    """The names of the workloads that ship with the project, in the order of the report."""
    return SHIPPED


def load_shipped(names: Sequence[str] | None = None) -> PromptSet:
    """The prompts of shipped workloads, all of them or those named, in the order named.

    Raises:
        UserError: a workload is unknown or none was named; the message lists the known ones.
    """
    wanted = tuple(dict.fromkeys(SHIPPED if names is None else names))
    unknown = [name for name in wanted if name not in SHIPPED]
    if unknown or not wanted:
        what = f"unknown workload {unknown[0]!r}" if unknown else "no workload was named"
        raise UserError(f"{what}: known are {', '.join(SHIPPED)}; other files go by --prompts FILE")
    return load_prompts([_SHIPPED_FOLDER / f"{name}.jsonl" for name in wanted])


def load_prompts(
    paths: Sequence[Path | str], *, on_bad_line: Literal["fail", "skip"] = "fail"
) -> PromptSet:
    """Read prompt files, in the order given.

    A byte-order mark and blank lines are tolerated. Besides what `parse_row` refuses, a line is
    bad if its id was seen before in the same file or the same workload, if it carries a split
    where its file does not (or the reverse), or if its session lies in the other split.

    Raises:
        UserError: a file cannot be opened or holds no prompt; with `on_bad_line="fail"` also
            for the first bad line. The message is one line that names file and line.
    """
    if on_bad_line not in ("fail", "skip"):
        raise UserError(f"on_bad_line must be fail or skip, got {on_bad_line!r}")
    seen = _Seen()
    prompts: list[Prompt] = []
    bad_lines: list[str] = []
    for path in map(Path, paths):
        num_before = len(prompts)
        for number, line in _lines(path):
            try:
                prompt = _prompt_at(path, number, line)
                seen.admit(prompt, path)
            except BadRowError as error:
                bad_lines.append(f"{path}:{number}: {error}")
                if on_bad_line == "fail":
                    raise UserError(bad_lines[-1]) from None
            else:
                prompts.append(prompt)
        if len(prompts) == num_before:
            raise UserError(_nothing_in(path, bad_lines))
    return PromptSet(tuple(prompts), tuple(bad_lines))


def select(
    prompts: Iterable[Prompt],
    *,
    split: Literal["train", "test", "all"] = "test",
    limit: int | None = None,
) -> tuple[Prompt, ...]:
    """The prompts of one split, at most `limit` of each workload, in file order.

    The first ones of a workload are taken, so a session is kept whole as far as the limit
    allows and never loses its beginning. Prompts without a split belong to every split.

    Raises:
        UserError: the limit is no positive number, or a workload has no prompt in the split.
    """
    if split not in ("train", "test", "all"):
        raise UserError(f"split must be train, test or all, got {split!r}")
    if limit is not None and limit < 1:
        raise UserError(f"the limit of prompts a workload must be 1 or more, got {limit}")
    by_workload: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_workload.setdefault(prompt.workload, []).append(prompt)
    chosen: list[Prompt] = []
    for workload, rows in by_workload.items():
        of_split = [row for row in rows if split == "all" or row.split in (None, split)]
        if not of_split:
            others = ", ".join(f"{n} {name}" for name, n in Counter(r.split for r in rows).items())
            raise UserError(
                f"workload {workload!r} has no {split} prompt ({others}): choose another --split"
            )
        chosen.extend(islice(of_split, limit))
    return tuple(chosen)


def workload_hash(prompts: Iterable[Prompt]) -> str:
    """SHA-256, in hex, of the prompts and their order: the provenance of a result.

    `origin` does not count; everything else does.
    """
    rows = [{k: v for k, v in asdict(prompt).items() if k != "origin"} for prompt in prompts]
    canonical = json.dumps(rows, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


@dataclass(slots=True)
class _Seen:
    """What the lines read so far say about the next one."""

    id_places: dict[tuple[str, str], str] = field(default_factory=dict)
    """(file or workload, id) -> where it was seen first."""
    session_splits: dict[tuple[str, str], Split | None] = field(default_factory=dict)
    file_has_split: dict[Path, bool] = field(default_factory=dict)

    def admit(self, prompt: Prompt, path: Path) -> None:
        """Remember a prompt.

        Raises:
            BadRowError: it contradicts the earlier ones; nothing is remembered then.
        """
        has_split = prompt.split is not None
        if self.file_has_split.get(path, has_split) != has_split:
            here, earlier = ("a", "none") if has_split else ("no", "one")
            raise BadRowError(
                f"this line has {here} split and the earlier ones of the file have {earlier}"
            )
        id_keys = [(f"file {path}", prompt.id), (f"workload {prompt.workload}", prompt.id)]
        for key in id_keys:
            if key in self.id_places:
                raise BadRowError(f"id {prompt.id!r} was seen before at {self.id_places[key]}")
        session = (prompt.workload, prompt.session_id or "")
        if prompt.session_id and self.session_splits.get(session, prompt.split) != prompt.split:
            raise BadRowError(f"session {prompt.session_id!r} has other rows in the other split")
        self.file_has_split[path] = has_split
        self.id_places |= dict.fromkeys(id_keys, prompt.origin)
        self.session_splits[session] = prompt.split


def _prompt_at(path: Path, number: int, line: bytes) -> Prompt:
    return parse_row(
        line,
        origin=f"{path}:{number}",
        default_id=f"{path.stem}:{number}",
        default_workload=path.stem,
    )


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1; an endless one is cut."""
    try:
        file = path.open("rb")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(f"cannot read {path}: {reason}; expected a JSONL file of prompts") from None
    with file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 2):
            number += 1
            if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
                while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                    pass
            if number == 1:
                line = line.removeprefix(_BOM)
            if line := line.strip():
                yield number, line


def _nothing_in(path: Path, bad_lines: Sequence[str]) -> str:
    first_bad = next((line for line in bad_lines if line.startswith(f"{path}:")), None)
    if first_bad:
        return f"{path} holds no good line; the first bad one: {first_bad}"
    return f"{path} is empty: expected one prompt a line, as JSON"
