"""Log files to rows and parts: every row once, with its line, in constant memory."""

import json
from pathlib import Path

import pytest

from hvd_ray.errors import UserError
from hvd_ray.traces import transcripts_files as files
from hvd_ray.traces import transcripts_plan as plan
from hvd_ray.traces.transcripts_files import labels_of, layout_of, log_files, rows_of
from hvd_ray.traces.transcripts_plan import find_sources, plan_import


def chat(text: str, **fields: object) -> dict:
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": f'"}}{{ {text}'}]
    return {"messages": turns, **fields}


ROWS = [chat("a"), chat("b\nb"), chat('c"\\'), chat("d" * 50), chat("ü")]


def as_lines(rows) -> bytes:
    texts = [json.dumps(row, ensure_ascii=False) for row in rows]
    return f"\ufeff\n{texts[0]}\r\n\n  {texts[1]} \n{texts[2]}\n{texts[3]}\n{texts[4]}".encode()


def as_array(rows) -> bytes:
    return b" " + json.dumps(rows, indent=2, ensure_ascii=False).encode()


WRITERS = {"lines": (as_lines, [2, 4, 5, 6, 7]), "array": (as_array, [2, 14, 26, 38, 50])}


@pytest.fixture(params=WRITERS)
def log(request, tmp_path) -> tuple[Path, str, list[int]]:
    """A file of `ROWS`, its layout and the lines that its rows begin at."""
    write, lines = WRITERS[request.param]
    path = tmp_path / "log.json"
    path.write_bytes(write(ROWS))
    return path, request.param, lines


@pytest.mark.parametrize("buffer_bytes", [1, 7, 64, 2**20])
def test_every_row_comes_once_with_its_line(log, buffer_bytes, monkeypatch):
    monkeypatch.setattr(files, "_READ_BYTES", buffer_bytes)
    path, layout, lines = log
    rows = list(rows_of(path, layout))
    assert [json.loads(row.text) for row in rows] == ROWS
    assert [row.line for row in rows] == lines
    assert layout_of(path) == layout


def test_a_stretch_gives_the_rows_that_begin_in_it(log):
    path, layout, _ = log
    rows = list(rows_of(path, layout))
    for first in range(len(rows)):
        for last in range(first, len(rows)):
            begin, end = rows[first], rows[last]
            num_bytes = end.offset + end.num_bytes - begin.offset
            found = rows_of(path, layout, offset=begin.offset, line=begin.line, num_bytes=num_bytes)
            assert list(found) == rows[first : last + 1]


def test_a_broken_object_in_an_array_does_not_spoil_the_others(tmp_path):
    path = tmp_path / "log.json"
    path.write_text('[{"a": {}}, {"b": nonsense}, "text", [{"c": 1}]]')
    texts = [row.text for row in rows_of(path, "array")]
    assert texts == [b'{"a": {}}', b'{"b": nonsense}', b'"text"', b'{"c": 1}']


TWICE = '{"messages": {"role": "user"}]}'
"""Its list would end before it has begun: what follows is named by itself."""
ONE, TWO = json.dumps(chat("a {", id="one")), json.dumps(chat("b", id="two"))


@pytest.mark.parametrize("buffer_bytes", [1, 7, 2**20])
@pytest.mark.parametrize("space", [" ", "\n"])
@pytest.mark.parametrize(
    "broken",
    [
        '{"messages": oops " }',
        '{"messages": "oops }',
        '{"messages: [1] }',
        '{"messages": [{"role": "user", "content": "he said "no", and left"}]}',
        '{"messages": [{"role": "user"}]',
        '{"messages": [{"role": "user"}',
        '{"messages": [{"role": "user", "content": "a',
        '{"messages": [{"role": "user"]}',
        '{"messages": [{"role": "user"}}',
        TWICE,
        "1",
        "null",
        "true",
        '"text"',
        "[]",
        "[ ]",
        "}",
        "oops",
        '"',
        "{",
        "{}",
    ],
)
def test_a_broken_element_spoils_neither_the_rows_nor_their_lines(
    broken, space, buffer_bytes, tmp_path, monkeypatch
):
    monkeypatch.setattr(files, "_READ_BYTES", buffer_bytes)
    path = tmp_path / "log.json"
    for elements in ([ONE, broken, TWO], [ONE, TWO, broken], [broken, ONE, TWO]):
        path.write_text(f"[{f',{space}'.join(elements)}]")
        rows = list(rows_of(path, "array"))
        lines = {row.text.decode(): row.line for row in rows}
        step = space == "\n"
        assert lines[ONE] == 1 + step * elements.index(ONE)
        assert lines[TWO] == 1 + step * elements.index(TWO)
        bad = [row for row in rows if row.text.decode() not in (ONE, TWO)]
        assert bad, "it is accounted for"
        assert bad[0].line == 1 + step * elements.index(broken)
        assert len(bad) == 1 + (broken == TWICE)


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_truncated_array_keeps_its_whole_objects(cut, tmp_path):
    path = tmp_path / "log.json"
    path.write_text(f"[{ONE},\n{TWO},\n{TWO[:-cut]}")
    one, two, last = rows_of(path, "array")
    assert [one.text.decode(), two.text.decode()] == [ONE, TWO]
    assert (last.line, last.text.decode()) == (3, TWO[:-cut].rstrip())


def test_a_line_without_end_is_passed_over_unread(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_ROW_BYTES", 50)
    monkeypatch.setattr(files, "_READ_BYTES", 16)
    path = tmp_path / "log.jsonl"
    path.write_text('{"a": 1}\n' + "x" * 1000 + '\n{"b": 2}\n')
    rows = list(rows_of(path, "lines"))
    assert [row.text for row in rows] == [b'{"a": 1}', None, b'{"b": 2}']
    assert [row.line for row in rows] == [1, 2, 3]
    assert sum(row.num_bytes for row in rows) == path.stat().st_size


EVENT = {"source": "user", "action": "message", "args": {"content": "go"}}


@pytest.mark.parametrize(
    ("name", "text", "layout"),
    [
        ("log.jsonl", '{"a": 1}', "lines"),
        ("log.jsonl", "{broken\n", "lines"),
        ("log.txt", '{"a": 1}\n{"b": 2}\n', "lines"),
        ("run.traj", '{\n  "a": 1\n}\n', "document"),
        ("run.traj", '{"a": 1}', "document"),
        ("run.json", '[{"a": 1}]', "array"),
        ("run.json", "[]", "array"),
        ("events.json", json.dumps([EVENT, EVENT]), "document"),
        ("events.json", json.dumps([EVENT, EVENT], indent=1), "document"),
    ],
)
def test_how_rows_lie(name, text, layout, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    assert layout_of(path) == layout


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"id,text\n1,a\n", "expected JSON lines"),
        ('{"a": 1}\n'.encode("utf-16"), "expected UTF-8"),
        ('{"a": 1}\n'.encode("utf-16-le"), "expected UTF-8"),
        ('{"a": 1}\n'.encode("utf-32-be"), "expected UTF-8"),
    ],
)
def test_what_is_no_log_is_refused(text, reason, tmp_path):
    path = tmp_path / "log.csv"
    path.write_bytes(text)
    with pytest.raises(UserError, match=reason):
        layout_of(path)


def test_folders_are_searched_and_files_come_once(tmp_path):
    for name in ("b/2.traj", "b/1.jsonl", "a.json", "b/notes.txt", ".hidden.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    one = tmp_path / "b" / "2.traj"
    found = log_files([one, tmp_path])
    names = [file.relative_to(tmp_path).as_posix() for file in found]
    assert names == ["b/2.traj", "a.json", "b/1.jsonl"]
    with pytest.raises(UserError, match="no such file"):
        log_files([tmp_path / "absent.jsonl"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"holds no logs: expected \*\.jsonl"):
        log_files([tmp_path / "empty"])


def test_labels_are_names_or_paths_where_names_repeat():
    assert labels_of([Path("x/a.jsonl"), Path("y/b.jsonl")]) == ["a.jsonl", "b.jsonl"]
    assert labels_of([Path("x/a.jsonl"), Path("y/a.jsonl")]) == ["x/a.jsonl", "y/a.jsonl"]


@pytest.fixture
def two_logs(tmp_path) -> list[Path]:
    """Two files with 7 rows each."""
    paths = [tmp_path / "one.jsonl", tmp_path / "two.json"]
    rows = [chat("x" * 100, id=str(k)) for k in range(7)]
    paths[0].write_text("\n".join(map(json.dumps, rows)))
    paths[1].write_text(json.dumps(rows))
    return paths


def ids_of(part: plan.ImportPart) -> list[str]:
    return [json.loads(row.text)["id"] for stretch in part.stretches for row in stretch.rows()]


@pytest.mark.parametrize("part_bytes", [1, 500, 700, 10**6])
def test_parts_hold_every_row_once_in_order(two_logs, part_bytes, monkeypatch):
    monkeypatch.setattr(plan, "PART_BYTES", part_bytes)
    planned = plan_import(find_sources(two_logs))
    assert [row_id for part in planned.parts for row_id in ids_of(part)] == list("01234560123456")
    assert [part.number for part in planned.parts] == list(range(len(planned.parts)))
    assert [part.num_rows for part in planned.parts] == [len(ids_of(p)) for p in planned.parts]
    assert planned.num_rows == 14
    assert (len(planned.parts) == 1) == (part_bytes == 10**6)


def test_a_limit_is_of_each_file(two_logs):
    planned = plan_import(find_sources(two_logs), limit=2)
    assert ids_of(planned.parts[0]) == list("0101")
    assert planned.logs_hash != plan_import(find_sources(two_logs)).logs_hash


def test_the_hash_names_rows_labels_and_order(two_logs):
    hashes = {plan_import(find_sources(two_logs)).logs_hash}
    hashes.add(plan_import(find_sources(two_logs[::-1])).logs_hash)
    renamed = two_logs[0].rename(two_logs[0].with_name("three.jsonl"))
    hashes.add(plan_import(find_sources([renamed, two_logs[1]])).logs_hash)
    renamed.write_text(renamed.read_text().replace("x", "y"))
    hashes.add(plan_import(find_sources([renamed, two_logs[1]])).logs_hash)
    assert len(hashes) == 4


def test_a_bad_row_is_named_before_anything_is_written(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(chat("a")) + '\n\n{"messages": 5}\n')
    sources = find_sources([path])
    with pytest.raises(UserError, match=r"log\.jsonl:3: messages must be a list .* \(read as chat"):
        plan_import(sources)
    assert plan_import(sources, refuse_bad_rows=False).num_rows == 2


def test_a_format_that_cannot_be_told_is_asked_for(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"text": "a"}\nbroken\n')
    with pytest.raises(UserError, match="of no known format; expected one of chat, requests"):
        find_sources([path])
    for text, reason in (
        ('{"a":' * 2000, "log.jsonl:1: is nested too deeply"),
        ("\n" + "1" * 6000, "log.jsonl:2: holds a number with too many digits"),
        ("{broken\n", "log.jsonl:1: is no JSON"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=reason):
            find_sources([path])
    empty = tmp_path / "log.json"
    empty.write_text("[]")
    with pytest.raises(UserError, match="holds no rows"):
        find_sources([empty])
    (source,) = find_sources([path], log_format="sharegpt")
    assert (source.log_format, source.workload) == ("sharegpt", "log")


def test_a_document_is_named_by_its_folder(tmp_path):
    path = tmp_path / "runs" / "task-1.traj"
    path.parent.mkdir()
    history = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "ok"}]
    path.write_text(json.dumps({"history": history}, indent=1))
    (source,) = find_sources([path])
    (row,) = rows_of(path, source.layout)
    (entry,) = source.entries(row)
    assert (entry.workload, entry.id) == ("runs", "task-1.traj")
