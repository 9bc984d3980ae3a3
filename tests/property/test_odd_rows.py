"""Whatever stands in a row of a log: it is imported, has no answer or is named, and is readable."""

import copy
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_ray.pipelines.importing import import_part, summarise
from hvd_ray.traces.store import read_traces
from hvd_ray.traces.transcripts import ImportRules, TranscriptImporter
from hvd_ray.traces.transcripts_plan import find_sources, plan_import
from tests.unit.traces.test_transcripts_formats import CHAT, EVENTS, REQUEST, ROWS
from tests.unit.traces.transcript_fakes import TEMPLATES, FakeTokenizer

TOOLS = [{"type": "function", "function": {"name": "find", "description": "finds"}}]
TIMES = [{**CHAT, "created_at": "2026-01-01T00:00:00Z"}, {**CHAT, "tools": TOOLS}]
SEEDED = REQUEST | {"request": REQUEST["request"] | {"seed": 1, "tools": TOOLS, "top_p": 0.5}}
ROWS_OF = {**ROWS, "chat": [CHAT, *TIMES], "requests": [SEEDED], "openhands": [{"history": EVENTS}]}
HALF = "\ud800"
ODD_NUMBERS = [0, -1, 7, 2**53 + 1, 2**63, 10**400, 1e308, float("nan"), float("inf")]
ODD_TEXTS = ["", "a", HALF, "x\udfffü", "\x00", '{"a": "\\ud800"}', '["\\udc00"]', "<|e|>"]
ODD_LISTS = [[], [[]], [1], [{}], [HALF]]
ODD_OBJECTS = [{}, {HALF: 1}, {"type": HALF}, {"name": "a", "arguments": [2]}]
ODD_TIMES = ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59.999999", "0001-01-01", -62135596800]
ODD = st.sampled_from([None, True, *ODD_NUMBERS, *ODD_TEXTS, *ODD_LISTS, *ODD_OBJECTS, *ODD_TIMES])


class StrictTokenizer(FakeTokenizer):
    """One that dies of half a character, as real ones do."""

    def _ids(self, text):
        text.encode("utf-8")
        return super()._ids(text)


def places_in(value, path=()):
    """Every place in a JSON value that something else may stand at."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items if isinstance(value, dict | list) else ():
        yield from (
            places_in(item, (*path, key)) if isinstance(item, dict | list) else [(*path, key)]
        )


@st.composite
def odd_logs(draw):
    """A format, and a log of a good row, rows with something odd in them, and a good row."""
    name = draw(st.sampled_from(sorted(ROWS_OF)))
    good = draw(st.sampled_from(ROWS_OF[name]))
    rows = [good]
    for _ in range(draw(st.integers(1, 4))):
        row = copy.deepcopy(good)
        *way, last = draw(st.sampled_from(list(places_in(row))))
        place = row
        for key in way:
            place = place[key]
        place[last] = draw(ODD)
        rows.append(row)
    return name, [*rows, good]


@settings(max_examples=40)
@given(log=odd_logs(), template=st.sampled_from(["plain", "native tools", "strict"]))
def test_an_odd_row_spoils_nothing(log, template):
    log_format, rows = log
    importer = TranscriptImporter(
        StrictTokenizer(TEMPLATES[template]), ImportRules(model="m", tokenizer_sha="sha")
    )
    with TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources = find_sources([path], log_format=log_format)
        planned = plan_import(sources, refuse_bad_rows=False)
        for part in planned.parts:
            import_part(part, importer=importer, out=Path(folder), on_bad_line="skip")
        summary, bad_rows = summarise(Path(folder), planned.parts)
        traces = read_traces(Path(folder) / "traces")
    assert (summary.rows, summary.traces) == (len(rows), len(traces))
    assert len(bad_rows) == summary.rows_bad
    assert all("\n" not in name for name in bad_rows)

    if template == "plain":
        assert summary.rows_imported >= 2, "the good rows are there"
