"""What `hvd traces import` tells people: short lines, and only what there is to tell."""

from hvd_ray.commands.traces_import import _lines

CLEAN = {
    "out": "traces",
    "rows": 311_345,
    "files": 1,
    "formats": ["chat"],
    "traces": 793_875,
    "prompt_tokens": 1_768_641_445,
    "output_tokens": 89_541_435,
    "rows_without_answer": 0,
    "answers_left_out": 0,
    "rows_bad": 0,
    "bad_lines": [],
}


def test_a_clean_import_is_told_in_three_lines():
    assert _lines(CLEAN) == [
        "311,345 rows of 1 file (chat)",
        "793,875 traces: 1,768,641,445 prompt tokens, 89,541,435 output tokens",
        "written: traces",
    ]


def test_what_was_not_imported_is_told_with_names():
    names = [f"log.jsonl:{k}: is no JSON" for k in range(20)]
    odd = {"files": 2, "rows_without_answer": 1200, "answers_left_out": 3, "rows_bad": 20}
    lines = _lines(CLEAN | odd | {"bad_lines": names, "formats": ["chat", "sharegpt"]})
    assert lines[0] == "311,345 rows of 2 files (chat, sharegpt)"
    assert lines[2:8] == [
        "1,200 rows without an answer",
        "3 answers left out: empty, or no room for them",
        "20 bad rows skipped, named in bad_lines.txt:",
        *(f"  {name}" for name in names[:3]),
    ]
    assert all(len(line) <= 80 for line in lines)
