"""The elements of a JSON array, found without parsing: a broken one does not spoil the next.

In whole JSON a text is followed by one of `, : } ]`, and in an object no `{` follows a comma. Where
that does not hold something is broken, and reading goes on as near to it as can be:

- a quote whose text would end before anything else is no quote, and is passed over;
- an object in which a comma is followed by `{` has lost its end: it ends before the comma;
- so has one that meets the end of the array, or of the file; there the next element begins where
  an object begins with the same key as this one.

What is broken is an element too: whoever parses it says what is wrong with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_TEXT = rb'"[^"\\]*(?:\\.[^"\\]*)*'
_WHOLE_TEXT = _TEXT + rb'"(?=[ \t\r\n]*(?:[,:}\]]|\Z))'
# Inside an object: a text, one that the end of the buffer cuts, a comma before `{`, a bracket.
_TOKEN = re.compile(
    rb"%b|%b\\?\Z|,[ \t\r\n]*\{|[\[\]{}]" % (_WHOLE_TEXT, _TEXT),
    re.DOTALL,
)
_LAST_TOKEN = re.compile(rb"%b|,[ \t\r\n]*\{|[\[\]{}]" % _WHOLE_TEXT, re.DOTALL)
# Between elements: a text, an object's begin, an empty list, a list's begin, or anything else.
_BEGIN = re.compile(
    rb'%b|"|\{|\[[ \t\r\n]*\]|\[[ \t\r\n]*|[^ \t\r\n,\[\]{"]+' % _WHOLE_TEXT, re.DOTALL
)
_NOTHING = re.compile(rb"[ \t\r\n]*\Z")
_FIRST_KEY = re.compile(rb"\{[ \t\r\n]*(%b\")[ \t\r\n]*:" % _TEXT, re.DOTALL)


def element_spans(buffer: bytes, *, is_last: bool) -> Iterator[tuple[int, int]]:
    """Start and end of every element, in order, as far as the buffer tells.

    Lists in the list count by their own elements, and as one where they hold none. Numbers, texts,
    words and stray characters are elements like objects.

    Args:
        buffer: begins in the array's list, or before it.
        is_last: whether nothing follows it; otherwise an element that reaches the end of the
            buffer, or might, is left for a longer one.
    """
    position = 0
    while (begin := _BEGIN.search(buffer, position)) is not None:
        start, stop = begin.span()
        mark = buffer[start : start + 1]
        if mark == b"{":
            found = _object_end(buffer, start, is_last=is_last)
            if found is None:
                return
            stop = found
        elif not is_last and (mark == b'"' or stop == len(buffer)) and _is_cut(buffer, begin):
            return
        position = stop
        if mark != b"[" or buffer[stop - 1 : stop] == b"]":
            yield start, stop


def _is_cut(buffer: bytes, begin: re.Match[bytes]) -> bool:
    """Whether what follows the buffer may make another element of its last one."""
    return begin.group() == b'"' or _NOTHING.match(buffer, begin.end()) is not None


def _object_end(buffer: bytes, start: int, *, is_last: bool) -> int | None:
    """Where the object that begins at `start` ends; None where that lies beyond the buffer."""
    opened = bytearray()
    for token in (_LAST_TOKEN if is_last else _TOKEN).finditer(buffer, start):
        mark = token.group()[:1]
        if mark == b'"':
            if token.end() == len(buffer) and not is_last:
                return None
        elif mark == b",":
            if opened[-1:] == b"{":
                return token.start()
            opened += b"{"
        elif mark in b"{[":
            opened += mark
        else:
            opener = b"{" if mark == b"}" else b"["
            if opener not in opened:  # the array's own end
                return token.start()
            del opened[opened.rindex(opener) :]
            if not opened:
                return token.end()
    return _next_begin(buffer, start) if is_last else None


def _next_begin(buffer: bytes, start: int) -> int:
    """Where an element after one that is not closed may begin: where its first key comes again."""
    key = _FIRST_KEY.match(buffer, start)
    if key is not None:
        alike = rb",[ \t\r\n]*\{[ \t\r\n]*" + re.escape(key.group(1))
        again = re.compile(alike).search(buffer, key.end())
        if again is not None:
            return again.start()
    return len(buffer.rstrip())
