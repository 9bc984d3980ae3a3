"""What is asked: bodies by the served description, right and wrong, and bytes by nobody's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis.generation import GenerationMode

from tests.fuzz.served import MODEL, Served

Run = Callable[[], None]
JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Amount:
    """How much is asked of each operation, and from which seed."""

    examples: int
    seed: int

    def settings(self) -> settings:
        return settings(
            max_examples=self.examples,
            deadline=None,
            database=None,
            derandomize=False,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )


def runs(served: Served, amount: Amount) -> Iterator[tuple[str, Run]]:
    """Named runs, each of `amount.examples` requests; a run raises what it found."""
    schema = schemathesis.openapi.from_dict(served.description)
    for result in schema.get_all_operations():
        operation = result.ok()
        for mode in GenerationMode:
            if mode is GenerationMode.NEGATIVE and operation.method.upper() == "GET":
                continue
            name = f"{operation.method.upper()} {operation.path} {mode.value}"
            cases = operation.as_strategy(generation_mode=mode)
            yield name, _by_description(served, amount, cases)
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        yield f"POST {path} odd values", _bodies(served, amount, path, _odd_bodies(served, path))
        yield f"POST {path} bytes", _bodies(served, amount, path, _broken(served, path))
    yield "headers", _headers(served, amount)


def _by_description(served: Served, amount: Amount, cases: Any) -> Run:
    @seed(amount.seed)
    @amount.settings()
    @given(cases)
    def run(case: Any) -> None:
        given: dict[str, Any] = {}
        if case.method.upper() == "POST":
            given = {"content": _encoded(case.body), "headers": JSON}
        served.ask(case.method, case.formatted_path, **given)

    return run


def _bodies(served: Served, amount: Amount, path: str, bodies: st.SearchStrategy[bytes]) -> Run:
    @seed(amount.seed)
    @amount.settings()
    @given(bodies)
    def run(body: bytes) -> None:
        served.ask("POST", path, content=body, headers=JSON)

    return run


def _headers(served: Served, amount: Amount) -> Run:
    names = st.sampled_from(
        ["x-request-id", "x-session-id", "authorization", "content-type", "accept", "host"]
    )
    values = st.binary(max_size=40).map(_as_header)
    body = _encoded({"prompt": "the name", "max_tokens": 2})

    @seed(amount.seed)
    @amount.settings()
    @given(st.dictionaries(names, values, max_size=3))
    def run(headers: dict[str, bytes]) -> None:
        served.ask("POST", "/v1/completions", content=body, headers=JSON | headers)

    return run


def _as_header(value: bytes) -> bytes:
    """What a server lets through to the application."""
    return bytes(byte for byte in value if byte >= 0x20 and byte != 0x7F).strip()


def _encoded(body: Any) -> bytes:
    """As a client would; what is no JSON at all goes out as an empty body."""
    try:
        return json.dumps(body).encode()
    except (TypeError, ValueError):
        return b""


# -- values that a description does not think of -------------------------------------------------

_odd: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(st.characters(codec=None), max_size=20),  # halves of surrogate pairs included
    st.sampled_from(["", "\u0000", "\ud800", "1e999", " ", "-0", "９"]),
)
_values = st.recursive(
    _odd,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(codec=None), max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)


def _valid(path: str) -> dict[str, Any]:
    chat = [{"role": "user", "content": "the name"}]
    return {
        "/v1/completions": {"model": MODEL, "prompt": "the name", "max_tokens": 4},
        "/v1/chat/completions": {"messages": chat, "max_tokens": 4},
        "/tokenize": {"prompt": "the name"},
        "/detokenize": {"tokens": [5, 6]},
    }[path]


def _odd_bodies(served: Served, path: str) -> st.SearchStrategy[bytes]:
    """A good body with one to three fields set to anything."""
    operation = served.description["paths"][path]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    names = st.sampled_from([*schema["properties"], "unknown", "", "\ud800"])
    changes = st.dictionaries(names, _values, min_size=1, max_size=3)
    return changes.map(lambda changed: _encoded({**_valid(path), **changed}))


def _broken(served: Served, path: str) -> st.SearchStrategy[bytes]:
    """Bytes that are no body: cut, damaged, nested without end, of another kind."""
    good = json.dumps(_valid(path)).encode()
    cuts = st.integers(0, len(good)).map(lambda end: good[:end])
    places = st.tuples(st.integers(0, len(good) - 1), st.binary(min_size=1, max_size=3))
    damaged = places.map(lambda place: good[: place[0]] + place[1] + good[place[0] + 1 :])
    fixed = st.sampled_from(
        [
            *(b"", b"null", b"[]", b'"x"', b"1", b"\xff\xfe", b"\xef\xbb\xbf" + good),
            *(b"[" * 50_000, b'{"a":' * 20_000, b'{"prompt": ' + b"9" * 5000 + b"}"),
            *(good.decode().encode("utf-16"), good + good, b'{"prompt": "\xed\xa0\x80"}'),
            b'{"prompt": "' + b"a" * (served.replica.facts.context_length * 8) + b'"}',
            b" " * 300_000,
        ]
    )
    return st.one_of(cuts, damaged, st.binary(max_size=60), fixed)
