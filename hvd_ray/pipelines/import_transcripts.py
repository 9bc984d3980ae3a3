"""`hvd traces import`: logs of conversations to traces, in this process or on Ray Data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hvd_ray.bench.workloads import split_of
from hvd_ray.errors import UserError
from hvd_ray.fetch import resolve_tokenizer, tokenizer_sha
from hvd_ray.home import atomic_path
from hvd_ray.pipelines.importing import ImportSummary, OnBadLine, import_part, summarise
from hvd_ray.pipelines.output import OutputFolder, claimed
from hvd_ray.pipelines.shards import KEPT, Counts, Report, RunProgress, run_shards
from hvd_ray.provenance import provenance
from hvd_ray.text import HFTextCodec
from hvd_ray.traces.schema import SCHEMA_VERSION
from hvd_ray.traces.transcripts import ImportRules, TranscriptImporter, Turns
from hvd_ray.traces.transcripts_files import log_files
from hvd_ray.traces.transcripts_formats import LOG_FORMATS, LogFormat
from hvd_ray.traces.transcripts_plan import (
    ImportPart,
    ImportPlan,
    LogSource,
    find_sources,
    plan_import,
)
from hvd_ray.traces.transcripts_tokenizer import HFTranscriptTokenizer

BAD_LINES = "bad_lines.txt"
MAX_SHOWN = 20
"""Bad lines that the result names; the file names more."""


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """What an import is asked for; each field is a flag of `hvd traces import`.

    Raises:
        UserError: a value is out of range or unknown.
    """

    logs: tuple[Path, ...]
    """Files, and folders of them."""
    out: Path
    tokenizer: str
    """A model's name, a hub id or a folder with a tokenizer."""
    log_format: LogFormat | None = None
    context_length: int | None = None
    on_bad_line: OnBadLine = "fail"
    turns: Turns = "all"
    limit: int | None = None
    """Rows of each file."""
    num_workers: int = 1

    def __post_init__(self) -> None:
        if not self.logs:
            raise UserError("no log was named: expected files or folders of conversations")
        numbers = {
            "--context-length": self.context_length,
            "--limit": self.limit,
            "--workers": self.num_workers,
        }
        for flag, value in numbers.items():
            if value is not None and value < 1:
                raise UserError(f"{flag} must be 1 or more, got {value}")
        choices = {
            "--format": (self.log_format, (None, *LOG_FORMATS)),
            "--on-bad-line": (self.on_bad_line, ("fail", "skip")),
            "--turns": (self.turns, ("all", "last")),
        }
        for flag, (given, known) in choices.items():
            if given not in known:
                names = ", ".join(str(name) for name in known if name)
                raise UserError(f"{flag} must be one of {names}, got {given!r}")


@dataclass(frozen=True, slots=True)
class ImportTokenizer:
    """Which tokenizer an import uses, for whoever has to load it."""

    name: str
    path_or_id: str
    sha: str
    findable: str
    """As it can be named from any folder."""

    def load(self) -> HFTranscriptTokenizer:
        return HFTranscriptTokenizer(HFTextCodec(self.path_or_id))


def import_transcripts(options: ImportOptions, *, progress: RunProgress) -> dict[str, Any]:
    """Turn the logs into `traces/` under `options.out`.

    The traces do not depend on the number of workers. A run that was killed is taken up again by
    the same call and ends with the same rows.

    Returns:
        What the folder holds now and what became of every row, as JSON values.

    Raises:
        UserError: a log cannot be read or, if bad lines are not to be skipped, holds one that is
            no conversation: nothing has been written then. A dialogue that only the chat template
            refuses is found later, and so is that no row holds an answer; what is finished is
            kept, and where nothing is the folder stays free. Another run or other settings in it.
    """
    progress.stage("looking through the logs")
    sources = find_sources(log_files(options.logs), log_format=options.log_format)
    is_strict = options.on_bad_line == "fail"
    plan = plan_import(sources, limit=options.limit, refuse_bad_rows=is_strict)
    progress.stage(f"loading the tokenizer of {options.tokenizer}")
    tokenizer = find_tokenizer(options.tokenizer)
    loaded = tokenizer.load()
    _refuse_without_template(loaded, sources, options.tokenizer)
    settings = _settings(options, plan, tokenizer, loaded)
    with claimed(options.out, settings, notes={"model": tokenizer.findable}) as folder:
        with _unclaimed_if_empty(folder, plan):
            _run(plan, options, tokenizer, loaded, progress)
            summary, bad_rows = summarise(options.out, plan.parts)
            if is_strict and bad_rows:
                raise UserError(f"{bad_rows[0]} (`--on-bad-line skip` goes on without such rows)")
            if not summary.traces:
                _remove_parts(options.out, plan)
                raise UserError(_nothing_found(summary, options.logs[0], bad_rows))
        _write_bad_rows(options.out, bad_rows)
        result = {**summary.as_json(), "files": len(sources), "parts": len(plan.parts)}
        folder.finish(result, about=provenance(logs_hash=plan.logs_hash))
    return {
        "out": str(options.out),
        "resumed": folder.is_resumed,
        **result,
        "formats": sorted({source.log_format for source in sources}),
        "bad_lines": bad_rows[:MAX_SHOWN],
    }


def find_tokenizer(name: str) -> ImportTokenizer:
    """Where a tokenizer lies; a folder needs no weights.

    Raises:
        UserError: there is no such model or folder.
    """
    model = resolve_tokenizer(name)
    sha = tokenizer_sha(model.path_or_id) if model.is_local else ""
    is_folder = Path(name).expanduser().is_dir()
    return ImportTokenizer(
        model.name, model.path_or_id, sha, model.path_or_id if is_folder else name
    )


class ImportWorker:
    """Imports parts with one tokenizer."""

    def __init__(self, importer: TranscriptImporter, *, out: Path, on_bad_line: OnBadLine) -> None:
        self._import = partial(import_part, importer=importer, out=out, on_bad_line=on_bad_line)
        self._out = out

    @classmethod
    def loading(
        cls,
        tokenizer: ImportTokenizer,
        rules: ImportRules,
        *,
        out: Path,
        on_bad_line: OnBadLine,
    ) -> ImportWorker:
        """A worker with a tokenizer of its own, as another process needs one."""
        importer = TranscriptImporter(tokenizer.load(), rules)
        return cls(importer, out=out, on_bad_line=on_bad_line)

    def run(self, shard: ImportPart, report: Report) -> None:
        if not shard.traces_file(self._out).exists():
            counts = self._import(shard)
            report({"done": counts["rows"], "traces": counts["traces"], KEPT: 1})


def _run(
    plan: ImportPlan,
    options: ImportOptions,
    tokenizer: ImportTokenizer,
    loaded: HFTranscriptTokenizer,
    progress: RunProgress,
) -> None:
    out = options.out.absolute()
    todo = [part for part in plan.parts if not part.traces_file(out).exists()]
    if not todo:
        return
    progress.expect(sum(part.num_rows for part in todo), unit="rows")
    rules = _rules(options, tokenizer)
    totals = dict.fromkeys(("done", "traces"), 0)

    def on_counts(counts: Counts) -> None:
        progress.advance(counts.get("done", 0), f"{counts.get('traces', 0):,} traces")

    def add(counts: Counts) -> None:
        totals.update({name: totals[name] + counts[name] for name in totals})
        on_counts(totals)

    if options.num_workers == 1 or len(todo) == 1:
        importer = TranscriptImporter(loaded, rules)
        worker = ImportWorker(importer, out=out, on_bad_line=options.on_bad_line)
        for part in todo:
            worker.run(part, add)
        return
    progress.stage("starting Ray")
    make_worker = partial(
        ImportWorker.loading, tokenizer, rules, out=out, on_bad_line=options.on_bad_line
    )
    run_shards(todo, make_worker, num_workers=options.num_workers, on_counts=on_counts)


def _rules(options: ImportOptions, tokenizer: ImportTokenizer) -> ImportRules:
    return ImportRules(
        model=tokenizer.name,
        tokenizer_sha=tokenizer.sha,
        context_length=options.context_length,
        turns=options.turns,
        split_of=split_of,
    )


def _refuse_without_template(
    tokenizer: HFTranscriptTokenizer, sources: Sequence[LogSource], name: str
) -> None:
    needing = next((s for s in sources if s.log_format != "completions"), None)
    if needing is not None and not tokenizer.has_template:
        raise UserError(
            f"the tokenizer of {name} has no chat template, and {needing.path} holds dialogues; "
            "choose another --tokenizer"
        )


def _settings(
    options: ImportOptions,
    plan: ImportPlan,
    tokenizer: ImportTokenizer,
    loaded: HFTranscriptTokenizer,
) -> Mapping[str, Any]:
    """What decides the rows; workers do not, nor does it matter what bad lines would have done."""
    return {
        "command": "traces import",
        "schema_version": SCHEMA_VERSION,
        "model": tokenizer.name,
        "tokenizer_sha": tokenizer.sha,
        "chat_template": loaded.template_hash,
        "context_length": options.context_length,
        "turns": options.turns,
        "files": len(plan.sources),
        "rows": plan.num_rows,
        "logs_hash": plan.logs_hash,
    }


@contextmanager
def _unclaimed_if_empty(folder: OutputFolder, plan: ImportPlan) -> Iterator[None]:
    """Give the folder up where a refused import leaves no part in it."""
    try:
        yield
    except UserError:
        if not any(part.traces_file(folder.path).exists() for part in plan.parts):
            _remove_parts(folder.path, plan)
            (folder.path / BAD_LINES).unlink(missing_ok=True)
            folder.withdraw()
        raise


def _remove_parts(out: Path, plan: ImportPlan) -> None:
    for part in plan.parts:
        part.traces_file(out).unlink(missing_ok=True)
    with suppress(OSError):  # absent, or something else lies there
        (out / "traces").rmdir()


def _nothing_found(summary: ImportSummary, log: Path, bad_rows: Sequence[str]) -> str:
    first = f"; the first bad one is {bad_rows[0]}" if bad_rows else ""
    return (
        f"{log}: no trace in {summary.rows:,} rows: {summary.rows_without_answer:,} without an "
        f"answer, {summary.rows_bad:,} bad, {summary.answers_left_out:,} answers left out; "
        f"expected conversations with turns of the assistant{first}"
    )


def _write_bad_rows(out: Path, bad_rows: Sequence[str]) -> None:
    """Keep the names of the bad rows beside the traces; no file where there is none."""
    file = out / BAD_LINES
    if not bad_rows:
        file.unlink(missing_ok=True)
        return
    with atomic_path(file) as draft:
        draft.write_text("\n".join(bad_rows) + "\n", encoding="utf-8")
