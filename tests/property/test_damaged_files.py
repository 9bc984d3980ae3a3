"""Files that were cut, overwritten or made up: one clear line of a `UserError`, or a good read."""

from __future__ import annotations

import hashlib
import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_ray.bench.workloads import load_prompts
from hvd_ray.config import Config, load_config
from hvd_ray.drafting.eagle3_checkpoint import TargetShape, load_head, save_head
from hvd_ray.errors import UserError
from hvd_ray.payoff.cost_file import CostFile, CostKey, read_costs
from hvd_ray.payoff.predictor import CARD_FILE, WEIGHTS_FILE, MlpPredictor
from hvd_ray.traces.schema import Trace, steps_to_table, traces_to_table
from hvd_ray.traces.store import num_rows, read_steps, read_traces, write_steps, write_traces
from hvd_ray.traces.transcripts_entries import BadLogRowError
from hvd_ray.traces.transcripts_formats import LOG_FORMATS, RowDefaults, entries_of, parse_json
from hvd_ray.traces.transcripts_plan import find_sources
from hvd_ray.tracking import resolve_predictor
from hvd_ray.tuning.space import load_sweep
from hvd_ray.types import SamplingParams, Source, Step
from tests.unit.drafting.eagle3_heads import SMALL, random_head
from tests.unit.payoff.networks import random_predictor

some = settings(max_examples=60)
NESTED = b'{"a":' * 20_000


def read_or_refused(read: Callable[[], object]) -> None:
    """A good read or one line; whatever else is raised is a fault."""
    with suppress(UserError):
        read()


@dataclass(frozen=True)
class Damage:
    """What happens to the bytes of a file."""

    cut: float | None
    flips: tuple[tuple[float, int], ...]
    added: bytes

    def of(self, whole: bytes) -> bytes:
        end = len(whole) if self.cut is None else int(self.cut * len(whole))
        broken = bytearray(whole[:end])
        for place, value in self.flips:
            if broken:
                broken[int(place * (len(broken) - 1))] = value
        return bytes(broken) + self.added


damages = st.builds(
    Damage,
    cut=st.one_of(st.none(), st.none(), st.floats(0, 1)),
    flips=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=4).map(tuple),
    added=st.one_of(st.just(b""), st.just(b""), st.binary(max_size=8)),
)
damaged_ends = st.builds(  # where Parquet and safetensors keep what their bytes mean
    Damage,
    cut=st.none(),
    flips=st.lists(
        st.tuples(st.one_of(st.floats(0.9, 1), st.floats(0, 0.1)), st.integers(0, 255)),
        min_size=1,
        max_size=6,
    ).map(tuple),
    added=st.just(b""),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged")


def trace(number: int) -> Trace:
    sampling = SamplingParams(stop=("x",), logit_bias={3: 1.0}, max_tokens=4)
    values: dict[str, Any] = {
        **{"trace_id": f"t{number}", "prompt_id": "p", "workload": "w", "family": "f"},
        **{"scope": "s", "session_id": "é", "created_at": datetime(2026, 1, 1, tzinfo=UTC)},
        **{"model": "m", "tokenizer_sha": "x", "prompt_token_ids": (1, 2, 3)},
        **{"output_token_ids": (4, 5), "finish_reason": "length", "sampling": sampling},
        "context_length": 64,
    }
    return Trace(**values)


# -- Parquet -------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["traces", "steps"])
def test_damaged_parquet(folder: Path, table: str) -> None:
    path = folder / f"{table}.parquet"
    if table == "traces":
        write_traces([trace(number) for number in range(3)], path)
    else:
        step = Step(0, 0, Source.SUFFIX, drafted=2, accepted=1, emitted=2)
        write_steps([(f"t{number}", step) for number in range(3)], path)
    whole = path.read_bytes()
    read = {"traces": read_traces, "steps": read_steps}[table]

    @some
    @given(st.one_of(damages, damaged_ends))
    def try_it(damage: Damage) -> None:
        path.write_bytes(damage.of(whole))
        read_or_refused(lambda: read(path))

    try_it()


@pytest.mark.parametrize("place", range(4))
def test_parquet_whose_beginning_was_written_over(tmp_path: Path, place: int) -> None:
    """Arrow reads the end alone, and took it as whole."""
    path = tmp_path / "traces.parquet"
    write_traces([trace(0)], path)
    whole = bytearray(path.read_bytes())
    whole[place] ^= 1
    path.write_bytes(whole)
    for read in (read_traces, num_rows):
        with pytest.raises(UserError, match=r"traces\.parquet: no readable .*begins with"):
            read(path)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("sampling", {"temperature": -1.0}),
        ("sampling", {"stop": [""]}),
        ("sampling", {"max_tokens": 0}),
        ("source", "nonsense"),
    ],
)
def test_whole_parquet_with_rows_that_are_none(tmp_path: Path, column: str, value: Any) -> None:
    path = tmp_path / "odd.parquet"
    if column == "source":
        table, read = steps_to_table([("t", Step(0, 0, Source.NONE, 0, 0, 1))]), read_steps
    else:
        table, read = traces_to_table([trace(0)]), read_traces  # type: ignore[assignment]
    (row,) = table.to_pylist(maps_as_pydicts="strict")
    row[column] = {**row[column], **value} if isinstance(value, dict) else value
    if isinstance(value, dict):
        row[column]["logit_bias"] = list(row[column]["logit_bias"].items())
    pq.write_table(pa.Table.from_pylist([row], schema=table.schema), path)
    with pytest.raises(UserError, match=r"odd\.parquet"):
        read(path)


# -- JSONL and logs ------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=10,
)
LOG_KEYS = (
    *("messages", "conversations", "history", "trajectory", "prompt", "completion", "response"),
    *("request", "body", "choices", "model", "id", "created_at", "timestamp", "tools", "split"),
    *("role", "content", "from", "value", "tool_calls", "function", "arguments", "action"),
)
log_rows = st.recursive(
    st.none() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(LOG_KEYS) | st.text(max_size=4), inner, max_size=6)
    ),
    max_leaves=24,
)


@some
@given(st.sampled_from(LOG_FORMATS), log_rows)
def test_a_made_up_log_row_is_bad_by_name(log_format: Any, row: object) -> None:
    with suppress(BadLogRowError):
        entries_of(row, log_format=log_format, line=1, defaults=RowDefaults("i", "w"))


@some
@given(st.one_of(st.binary(max_size=80), json_values.map(lambda v: json.dumps(v).encode())))
def test_bytes_are_json_or_a_bad_row(text: bytes) -> None:
    with suppress(BadLogRowError):
        parse_json(text)


def test_damaged_prompts(folder: Path) -> None:
    path = folder / "prompts.jsonl"
    row = {"id": "a", "messages": [{"role": "user", "content": "é"}], "sampling": {"top_k": 3}}
    whole = (json.dumps(row, ensure_ascii=False) + "\n").encode() * 2

    @some
    @given(damages)
    def try_it(damage: Damage) -> None:
        path.write_bytes(damage.of(whole))
        read_or_refused(lambda: load_prompts([path]))

    try_it()


@pytest.mark.parametrize("suffix", ["jsonl", "json", "traj"])
def test_damaged_logs(folder: Path, suffix: str) -> None:
    path = folder / f"log.{suffix}"
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    whole = (json.dumps({"id": "a", "messages": said}) + "\n").encode() * 2

    @some
    @given(st.one_of(damages, st.just(Damage(0.0, (), NESTED)), st.just(Damage(0.0, (), b"[["))))
    def try_it(damage: Damage) -> None:
        path.write_bytes(damage.of(whole))
        read_or_refused(lambda: find_sources([path]))

    try_it()


@pytest.mark.parametrize("text", [NESTED, b"[" * 20_000, b'[{"a":' + b"[" * 20_000])
def test_logs_nested_without_end(folder: Path, text: bytes) -> None:
    for name in ("deep.jsonl", "deep.json"):
        path = folder / name
        path.write_bytes(text + b"\n" + text)
        with pytest.raises(UserError):
            find_sources([path])


# -- YAML and JSON of ours -----------------------------------------------------------------------

yaml_texts = st.one_of(
    st.binary(max_size=60),
    st.text(st.characters(codec="utf-8"), max_size=60).map(str.encode),
    json_values.map(lambda value: json.dumps(value).encode()),
    st.sampled_from(
        [b"a: &a [*a]", b"? {a: b}\n: c", b"!!python/object:os.system x", b"a: 2026-99-99",
         b"<<: 1", b"- " * 3000, b"policy: {tau: .nan}", b"policy: {? [1] : 2}", b"1: 2"]
    ),
)  # fmt: skip


def test_made_up_settings(folder: Path) -> None:
    path = folder / "made.yaml"

    @some
    @given(yaml_texts)
    def try_it(text: bytes) -> None:
        path.write_bytes(text)
        read_or_refused(lambda: load_config(path))
        read_or_refused(lambda: load_sweep(path))

    try_it()


def test_damaged_cost_tables(folder: Path) -> None:
    path = folder / "costs.json"
    key = CostKey(model="m", dtype="float32", engine="torch", device="cpu", num_threads=1)
    costs = CostFile(key=key, rows=(1, 8), verify_ms=(1.0, 2.0), draft_ms={Source.EAGLE3: 1.0})
    whole = costs.model_dump_json().encode()

    @some
    @given(st.one_of(damages, json_values.map(lambda v: Damage(0.0, (), json.dumps(v).encode()))))
    def try_it(damage: Damage) -> None:
        path.write_bytes(damage.of(whole))
        read_or_refused(lambda: read_costs(path).table())

    try_it()


# -- safetensors ---------------------------------------------------------------------------------


def test_damaged_predictors(folder: Path) -> None:
    place = folder / "predictor"
    random_predictor("survival", hidden=(5,)).save(place)
    card, whole = json.loads((place / CARD_FILE).read_text()), (place / WEIGHTS_FILE).read_bytes()

    @settings(max_examples=30)
    @given(st.one_of(damages, damaged_ends), st.booleans())
    def try_it(damage: Damage, is_signed: bool) -> None:
        """Also where whoever damaged the weights has corrected the card."""
        broken = damage.of(whole)
        (place / WEIGHTS_FILE).write_bytes(broken)
        sha = hashlib.sha256(broken).hexdigest() if is_signed else card["weights_sha256"]
        (place / CARD_FILE).write_text(json.dumps(card | {"weights_sha256": sha}))
        read_or_refused(lambda: MlpPredictor.load(place))

    try_it()


def test_damaged_heads(folder: Path) -> None:
    place = folder / "head"
    save_head(random_head(), place)
    shape = TargetShape(hidden_size=SMALL.hidden_size, vocab_size=SMALL.vocab_size, num_layers=4)
    files = {name: (place / name).read_bytes() for name in ("config.json", "model.safetensors")}

    @some
    @given(st.one_of(damages, damaged_ends), st.sampled_from(sorted(files)))
    def try_it(damage: Damage, name: str) -> None:
        for other, whole in files.items():
            (place / other).write_bytes(damage.of(whole) if other == name else whole)
        read_or_refused(lambda: load_head(place, target=shape))

    try_it()


@pytest.mark.parametrize(
    "text",
    ["[]", "{}", "1", NESTED.decode(), '{"hidden_size": "wide"}', '{"transformer_layer_config": 1}',
     '{"hidden_size": 32, "num_attention_heads": 0, "intermediate_size": 4, "vocab_size": 9}'],
)  # fmt: skip
def test_a_heads_configuration_of_another_form(tmp_path: Path, text: str) -> None:
    save_head(random_head(), tmp_path / "head")
    (tmp_path / "head" / "config.json").write_text(text)
    shape = TargetShape(hidden_size=SMALL.hidden_size, vocab_size=SMALL.vocab_size, num_layers=4)
    with pytest.raises(UserError):
        load_head(tmp_path / "head", target=shape)


# -- answers of a tracking server ----------------------------------------------------------------

ANSWERS = (
    (200, b""),
    (200, b"<html>a portal</html>"),
    (200, b"[]"),
    (200, b'"text"'),
    (200, b'{"registered_model": 3}'),
    (200, b'{"model_version": {"version": [1]}, "registered_model": {"aliases": 7}}'),
    (200, b'{"registered_model": {"name": "x", "aliases": [{"alias": "champion"}]}}'),
    (200, b"\xff\xfe\x00"),
    (200, NESTED),
    (401, b"no"),
    (404, b'{"error_code": "NOPE"}'),
    (500, b'{"error_code": 5, "message": null}'),
)


@pytest.fixture
def server() -> Iterator[tuple[str, list[tuple[int, bytes]]]]:
    """A server on loopback that answers everything with what stands last in the list."""
    says: list[tuple[int, bytes]] = [(200, b"")]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = says[-1]
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_PATCH = do_GET

        def log_message(self, format: str, *args: object) -> None: ...

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as found:
        threading.Thread(target=found.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{found.server_address[1]}", says
        found.shutdown()


def test_a_tracking_server_cannot_name_a_path(
    server: tuple[str, list[tuple[int, bytes]]], hvd_home: Path
) -> None:
    """The version that it answers with becomes a part of a folder's name."""
    uri, says = server
    found = {"name": "x", "version": "1/../../../../elsewhere", "source": "file:///etc"}
    says.append((200, json.dumps({"model_version": found}).encode()))
    config = Config.model_validate({"model": "toy", "tracking": {"uri": uri}})
    with pytest.raises(UserError, match="answers with version"):
        resolve_predictor("models:/x/1", config=config)
    assert not hvd_home.exists() or not list(hvd_home.rglob("elsewhere*"))


@pytest.mark.parametrize("said", ANSWERS, ids=range(len(ANSWERS)))
def test_a_tracking_server_that_talks_nonsense(
    server: tuple[str, list[tuple[int, bytes]]],
    said: tuple[int, bytes],
    hvd_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    uri, says = server
    says.append(said)
    config = Config.model_validate(
        {"model": "toy", "tracking": {"uri": uri}, "policy": {"predictor": "models:/x@champion"}}
    )
    with pytest.raises(UserError) as refused:
        resolve_predictor(config=config)
    assert "\n" not in str(refused.value)
    assert not list(hvd_home.rglob("*.safetensors"))
