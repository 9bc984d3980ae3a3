"""Elements of JSON arrays: each once and whole, wherever the buffer ends."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_ray.traces import transcripts_files as files

LEAF = (
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(alphabet='a"\\\\{}[],: \n', max_size=6)
)
VALUE = st.recursive(
    LEAF,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


def elements_of(value):
    """What an array counts as its elements: those of lists in it are its own."""
    for item in value:
        if isinstance(item, list) and item:
            yield from elements_of(item)
        else:
            yield item


@pytest.mark.parametrize("buffer_bytes", [1, 5, 2**20])
@given(array=st.lists(VALUE, min_size=1, max_size=4), indent=st.sampled_from([None, 1]))
def test_every_element_of_a_whole_array_comes_once(array, indent, buffer_bytes):
    text = json.dumps(array, indent=indent)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_READ_BYTES", buffer_bytes)
        path = Path(folder) / "log.json"
        path.write_text(text)
        rows = list(files.rows_of(path, "array"))
    if array != [[]]:
        assert [json.loads(row.text) for row in rows] == list(elements_of(array))
    for row in rows:
        assert text.encode()[row.offset :].startswith(row.text)
        assert row.line == 1 + text.encode()[: row.offset].count(b"\n")


@given(text=st.text(alphabet='a"\\\\{}[],: \n1', max_size=40), buffer_bytes=st.sampled_from([1, 3]))
def test_where_the_buffer_ends_changes_nothing(text, buffer_bytes):
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder) / "log.json"
        path.write_text("[" + text)
        whole = list(files.rows_of(path, "array"))
        patch.setattr(files, "_READ_BYTES", buffer_bytes)
        assert list(files.rows_of(path, "array")) == whole
        for first, row in enumerate(whole):
            size = whole[-1].offset + whole[-1].num_bytes - row.offset
            stretch = files.rows_of(path, "array", offset=row.offset, line=row.line, num_bytes=size)
            assert list(stretch) == whole[first:]
