"""`hvd traces import` with real tokenizers: against the template itself, on Ray, and labelled."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_ray.config import Config
from hvd_ray.pipelines.import_transcripts import ImportOptions, import_transcripts
from hvd_ray.pipelines.label import LabelOptions, label
from hvd_ray.text import HFTextCodec
from hvd_ray.traces import transcripts_plan
from hvd_ray.traces.store import read_traces

SHARED = Path(__file__).parents[3] / "shared" / "data" / "transcripts"


class Silent:
    """A `RunProgress` that tells nobody."""

    def stage(self, text): ...
    def expect(self, total, *, unit=None): ...
    def advance(self, done, text): ...


def tool_row(number: int) -> dict:
    call = {"function": {"name": "name_of", "arguments": f'{{"note": {number}}}'}}
    return {
        "id": f"c{number}",
        "messages": [
            {"role": "system", "content": "Say the name of the note."},
            {"role": "user", "content": f"  What is the name of note {number}?\n\n"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": f"name {number}"},
            {"role": "assistant", "content": f"\nThe name of note {number} is name {number}. "},
        ],
    }


@pytest.fixture(scope="module")
def logs(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("logs")
    rows = [tool_row(number) for number in range(60)]
    (folder / "one.jsonl").write_text("\n".join(map(json.dumps, rows[:40])))
    (folder / "two.json").write_text(json.dumps(rows[40:], indent=1))
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def tokenizer_folder(tiny_llama_path, tmp_path_factory) -> Path:
    """A folder with a tokenizer and its template, without weights."""
    folder = tmp_path_factory.mktemp("models") / "tokenizer"
    folder.mkdir()
    for file in tiny_llama_path.iterdir():
        if "token" in file.name or "template" in file.name:
            shutil.copy(file, folder)
    return folder


def run(logs, out, tokenizer, **fields) -> dict:
    options = ImportOptions(tuple(logs), out, str(tokenizer), **fields)
    return import_transcripts(options, progress=Silent())


def direct(codec: HFTextCodec, messages: list[dict], k: int) -> tuple[list[int], list[int]]:
    """Prompt and answer of turn k, by the template and the tokenizer and nothing else."""
    tokenizer = codec.tokenizer
    prompt = tokenizer.apply_chat_template(messages[:k], tokenize=False, add_generation_prompt=True)
    answer = tokenizer.encode(messages[k]["content"], add_special_tokens=False)
    return tokenizer.encode(prompt, add_special_tokens=False), [*answer, tokenizer.eos_token_id]


def with_calls_as_text(message: dict) -> dict:
    texts = [message["content"]] if message.get("content") else []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        said = f'{{"name": {json.dumps(function["name"])}, "arguments": {function["arguments"]}}}'
        texts.append(f"<tool_call>\n{said}\n</tool_call>")
    return {"role": message["role"], "content": "\n".join(texts)}


def expected_of(rows: list[dict], codec: HFTextCodec):
    for row in rows:
        messages = [with_calls_as_text(message) for message in row["messages"]]
        for k, message in enumerate(messages):
            if message["role"] == "assistant":
                yield f"{row['id']}#{k}", *direct(codec, messages, k)


def assert_exact(traces, rows, codec):
    expected = list(expected_of(rows, codec))
    assert [trace.prompt_id for trace in traces] == [name for name, _, _ in expected]
    for trace, (_, prompt, output) in zip(traces, expected, strict=True):
        assert list(trace.prompt_token_ids) == prompt
        assert list(trace.output_token_ids) == output


@pytest.mark.ray
def test_on_ray_as_alone_with_a_tokenizer_without_weights(
    ray_session, logs, tokenizer_folder, tmp_path, monkeypatch
):
    address = ray_session.get_runtime_context().gcs_address
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(transcripts_plan, "PART_BYTES", 4000)
    alone = run(logs, tmp_path / "alone", tokenizer_folder)
    spread = run(logs, tmp_path / "spread", tokenizer_folder, num_workers=2)
    assert alone["parts"] > 4
    assert {**alone, "out": ""} == {**spread, "out": ""}
    traces = read_traces(tmp_path / "alone")
    assert traces == read_traces(tmp_path / "spread")
    rows = [tool_row(number) for number in range(60)]
    assert_exact(traces, rows, HFTextCodec(tokenizer_folder))
    labelled = label(
        LabelOptions(tmp_path / "alone", tmp_path / "labels"), Config(), progress=Silent()
    )
    assert labelled["traces"] == 120
    assert labelled["positions"] == alone["output_tokens"]


def test_the_command_answers_in_json_and_names_a_bad_line(logs, tokenizer_folder, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps(tool_row(1)) + "\nbroken\n")

    def hvd(*args: object) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "hvd_ray.cli", "traces", "import", *map(str, args)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    given = (logs[0], bad, "--tokenizer", tokenizer_folder, "--out", tmp_path / "out")
    refused = hvd(*given)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"{bad}:2: is no JSON" in refused.stderr.splitlines()[-1]
    assert "Traceback" not in refused.stderr
    done = hvd(*given, "--on-bad-line", "skip", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["rows"], result["rows_bad"], result["traces"]) == (42, 1, 82)
    assert result["bad_lines"][0].startswith(f"{bad}:2: ")


@pytest.mark.model
@pytest.mark.parametrize("name", ["tau_bench_airline", "swe_agent", "mt_bench_vicuna33b"])
def test_recorded_transcripts_are_exact(name, default_model_path, tmp_path):
    log = SHARED / f"{name}.jsonl"
    if not log.exists():
        pytest.skip("the recorded transcripts are not on this machine")
    run([log], tmp_path / "out", default_model_path, limit=12)
    rows = [json.loads(line) for line in log.read_text().splitlines()[:12]]
    traces = read_traces(tmp_path / "out")
    assert_exact(traces, rows, HFTextCodec(default_model_path))
    assert {t.session_id: t.split for t in traces} == {
        f"{name}/{row['id']}": row["split"] for row in rows
    }
