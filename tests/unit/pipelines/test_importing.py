"""Importing without Ray: parts, counts, bad rows, kills, and what the folder says of itself."""

import json
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from hvd_ray.errors import UserError
from hvd_ray.pipelines import import_transcripts as adapter
from hvd_ray.pipelines import importing
from hvd_ray.pipelines.import_transcripts import ImportOptions, ImportTokenizer, import_transcripts
from hvd_ray.pipelines.importing import import_part, summarise
from hvd_ray.pipelines.output import read_manifest
from hvd_ray.traces import transcripts_plan as plan
from hvd_ray.traces.store import read_trace_part, read_traces
from hvd_ray.traces.transcripts import ImportRules, TranscriptImporter
from hvd_ray.traces.transcripts_plan import find_sources, plan_import
from tests.unit.traces.transcript_fakes import TEMPLATES, FakeTokenizer

RULES = ImportRules(model="m", tokenizer_sha="sha")


def chat(*texts: str, **fields: object) -> dict:
    roles = ("user", "assistant") * len(texts)
    turns = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    return {"messages": turns, **fields}


def write_log(path: Path, rows: list) -> Path:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("\n".join(lines) + "\n")
    return path


GOOD = [chat("a", "b", "c", "d" * k, id=f"c{k}") for k in range(1, 6)]
MIXED = [GOOD[0], "broken", chat("only a question"), GOOD[1], {"messages": 5}, GOOD[2]]


class Recorder:
    """A `RunProgress` that remembers."""

    def __init__(self):
        self.stages, self.total, self.done = [], 0, 0

    def stage(self, text):
        self.stages.append(text)

    def expect(self, total, *, unit=None):
        self.total, self.unit = total, unit

    def advance(self, done, text):
        self.done, self.text = done, text


@pytest.fixture
def tokenizer(monkeypatch) -> FakeTokenizer:
    """A tokenizer of characters, in the place of the one that is named."""
    fake = FakeTokenizer()
    fake.has_template, fake.template_hash = True, "plain"
    found = ImportTokenizer("fake", "fake", "sha", "fake")
    monkeypatch.setattr(adapter, "find_tokenizer", lambda _: found)
    monkeypatch.setattr(ImportTokenizer, "load", lambda _: fake)
    return fake


def run(tmp_path: Path, rows: list, **fields: object) -> dict:
    log = write_log(tmp_path / "log.jsonl", rows)
    options = {"logs": (log,), "out": tmp_path / "out", "tokenizer": "fake"} | fields
    return import_transcripts(ImportOptions(**options), progress=Recorder())


@pytest.mark.usefixtures("tokenizer")
def test_every_row_is_accounted_for_and_bad_ones_are_named(tmp_path):
    result = run(tmp_path, MIXED, on_bad_line="skip")
    assert {key: result[key] for key in result if key.startswith("rows")} == {
        "rows": 6,
        "rows_imported": 3,
        "rows_without_answer": 1,
        "rows_bad": 2,
    }
    assert result["traces"] == 6
    assert [name.split("log.jsonl:")[1].split(": ")[0] for name in result["bad_lines"]] == [
        "2",
        "5",
    ]
    assert (tmp_path / "out" / "bad_lines.txt").read_text().splitlines() == result["bad_lines"]
    traces = read_traces(tmp_path / "out")
    assert [trace.prompt_id for trace in traces] == ["c1#1", "c1#3", "c2#1", "c2#3", "c3#1", "c3#3"]
    assert sum(len(trace.output_token_ids) for trace in traces) == result["output_tokens"]
    assert sum(len(trace.prompt_token_ids) for trace in traces) == result["prompt_tokens"]
    assert {trace.split for trace in traces} <= {"train", "test"}
    manifest = read_manifest(tmp_path / "out")
    assert (manifest["complete"], manifest["model"]) == (True, "fake")


@pytest.mark.usefixtures("tokenizer")
def test_a_bad_row_ends_the_run_before_it_begins(tmp_path):
    with pytest.raises(UserError, match=r"log\.jsonl:2: is no JSON"):
        run(tmp_path, MIXED)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("tokenizer")
def test_a_dialogue_that_the_template_refuses_is_a_bad_row(tmp_path, monkeypatch):
    strict = FakeTokenizer(TEMPLATES["strict"])
    strict.has_template, strict.template_hash = True, "strict"
    monkeypatch.setattr(ImportTokenizer, "load", lambda _: strict)
    refused = {"messages": [*GOOD[0]["messages"], {"role": "assistant", "content": "a"}]}
    with pytest.raises(UserError, match=r"log\.jsonl:2: the chat template refuses"):
        run(tmp_path, [GOOD[0], refused, GOOD[1]])
    result = run(tmp_path, [GOOD[0], refused, GOOD[1]], on_bad_line="skip")
    assert (result["traces"], result["rows_bad"]) == (4, 1)
    with pytest.raises(UserError, match="refuses the dialogue"):  # found earlier, still a bad row
        run(tmp_path, [GOOD[0], refused, GOOD[1]])


@pytest.mark.usefixtures("tokenizer")
def test_a_run_that_was_killed_ends_with_the_same_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "PART_BYTES", 200)
    whole = run(tmp_path, GOOD, out=tmp_path / "whole")
    assert whole["parts"] > 2

    calls = Counter()

    def dying(*args, **kwargs):
        calls["parts"] += 1
        if calls["parts"] == 2:
            raise KeyboardInterrupt
        return import_part(*args, **kwargs)

    monkeypatch.setattr(adapter, "import_part", dying)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, GOOD)
    assert read_manifest(tmp_path / "out")["complete"] is False
    first = tmp_path / "out" / "traces" / "p00000.parquet"
    before = first.stat().st_mtime_ns
    result = run(tmp_path, GOOD)
    assert result["resumed"] is True
    assert first.stat().st_mtime_ns == before
    assert calls["parts"] == whole["parts"] + 1
    assert read_traces(tmp_path / "out") == read_traces(tmp_path / "whole")
    assert {key: result[key] for key in ("rows", "traces", "prompt_tokens")} == {
        key: whole[key] for key in ("rows", "traces", "prompt_tokens")
    }


@pytest.mark.usefixtures("tokenizer")
def test_other_logs_or_rules_are_refused_in_the_same_folder(tmp_path):
    run(tmp_path, GOOD)
    for change in ({"context_length": 100}, {"turns": "last"}, {"limit": 2}):
        with pytest.raises(UserError, match="was filled with"):
            run(tmp_path, GOOD, **change)
    with pytest.raises(UserError, match="was filled with"):
        run(tmp_path, GOOD[::-1])
    assert run(tmp_path, GOOD, on_bad_line="skip", num_workers=2)["resumed"] is True


def test_a_failed_row_leaves_no_part(tmp_path):
    log = write_log(tmp_path / "log.jsonl", MIXED)
    planned = plan_import(find_sources([log]), refuse_bad_rows=False)
    importer = TranscriptImporter(FakeTokenizer(), RULES)
    with pytest.raises(UserError, match=r"log\.jsonl:2: "):
        import_part(planned.parts[0], importer=importer, out=tmp_path / "out", on_bad_line="fail")
    assert list((tmp_path / "out").rglob("*")) == [tmp_path / "out" / "traces"]


def test_row_groups_are_written_as_tokens_come(tmp_path, monkeypatch):
    monkeypatch.setattr(importing, "ROW_GROUP_TOKENS", 100)
    log = write_log(tmp_path / "log.jsonl", GOOD)
    planned = plan_import(find_sources([log]))
    importer = TranscriptImporter(FakeTokenizer(), RULES)
    import_part(planned.parts[0], importer=importer, out=tmp_path, on_bad_line="fail")
    file = planned.parts[0].traces_file(tmp_path)
    assert pq.read_metadata(file).num_row_groups > 2
    assert len(read_trace_part(file)) == 10


def test_bad_rows_are_named_up_to_a_number_and_all_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(importing, "MAX_NAMED", 2)
    log = write_log(tmp_path / "log.jsonl", [GOOD[0], *["broken"] * 5])
    planned = plan_import(find_sources([log]), refuse_bad_rows=False)
    importer = TranscriptImporter(FakeTokenizer(), RULES)
    import_part(planned.parts[0], importer=importer, out=tmp_path, on_bad_line="skip")
    summary, named = summarise(tmp_path, planned.parts)
    assert (summary.rows_bad, len(named)) == (5, 3)
    assert named[-1] == f"and 3 more after {log}:3"


@pytest.mark.usefixtures("tokenizer")
def test_answers_without_room_are_counted(tmp_path):
    assert run(tmp_path, GOOD)["answers_left_out"] == 0
    result = run(tmp_path, GOOD, context_length=30, out=tmp_path / "short")
    assert result["traces"] + result["answers_left_out"] == 10
    assert result["answers_left_out"] > 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"logs": ()}, "no log was named"),
        ({"context_length": 0}, "--context-length must be 1 or more, got 0"),
        ({"limit": -1}, "--limit must be 1 or more"),
        ({"num_workers": 0}, "--workers must be 1 or more"),
        ({"log_format": "csv"}, "--format must be one of chat, requests"),
        ({"on_bad_line": "stop"}, "--on-bad-line must be one of fail, skip, got 'stop'"),
        ({"turns": "first"}, "--turns must be one of all, last"),
    ],
)
def test_options_out_of_range_are_refused(change, reason, tmp_path):
    with pytest.raises(UserError, match=reason):
        ImportOptions(**{"logs": (tmp_path,), "out": tmp_path, "tokenizer": "x"} | change)


@pytest.mark.usefixtures("tokenizer")
def test_logs_without_any_answer_are_no_success(tmp_path):
    said = r"no trace in 2 rows: 1 without an answer, 1 bad, 0 answ.*log\.jsonl:2: messages must"
    with pytest.raises(UserError, match=said):
        run(tmp_path, [chat("a question"), {"messages": 5}], on_bad_line="skip")
    assert visible(tmp_path / "out") == []
    assert run(tmp_path, GOOD)["resumed"] is False


def visible(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if not path.name.startswith(".")]


@pytest.mark.usefixtures("tokenizer")
def test_a_refused_import_claims_only_a_folder_that_it_filled(tmp_path, monkeypatch):
    strict = FakeTokenizer(TEMPLATES["strict"])
    strict.has_template, strict.template_hash = True, "strict"
    monkeypatch.setattr(ImportTokenizer, "load", lambda _: strict)
    monkeypatch.setattr(plan, "PART_BYTES", 1)
    refused = {"messages": [*GOOD[0]["messages"], {"role": "assistant", "content": "a"}]}
    with pytest.raises(UserError, match=r"log\.jsonl:1: the chat template refuses"):
        run(tmp_path, [refused, GOOD[0]])
    assert visible(tmp_path / "out") == []
    with pytest.raises(UserError, match=r"log\.jsonl:2: the chat template refuses"):
        run(tmp_path, [GOOD[0], refused])
    assert read_manifest(tmp_path / "out")["complete"] is False
    with pytest.raises(UserError, match="was filled with"):
        run(tmp_path, GOOD)
    assert run(tmp_path, [GOOD[0], refused], on_bad_line="skip")["resumed"] is True


def test_dialogues_need_a_chat_template(tmp_path, tokenizer):
    tokenizer.has_template = False
    with pytest.raises(UserError, match=r"has no chat template, and .*log\.jsonl holds dialogues"):
        run(tmp_path, GOOD)
    result = run(tmp_path, [{"prompt": "Once ", "completion": "upon"}])
    assert (result["traces"], result["formats"]) == (1, ["completions"])


@pytest.mark.usefixtures("tokenizer")
def test_progress_is_told_in_rows(tmp_path):
    progress = Recorder()
    log = write_log(tmp_path / "log.jsonl", GOOD)
    options = ImportOptions((log,), tmp_path / "out", "fake")
    import_transcripts(options, progress=progress)
    assert (progress.total, progress.done, progress.unit) == (5, 5, "rows")
    assert progress.stages[0] == "looking through the logs"
