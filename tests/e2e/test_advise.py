"""`hvd advise` from the command line; its figures against the default model decoding live."""

import json

import numpy as np
import pytest

from hvd_ray.bench.workloads import load_shipped
from hvd_ray.config import load_config
from hvd_ray.systems import build_decoder, load_engine
from hvd_ray.types import Request, SamplingParams

NUM_PROMPTS, MAX_TOKENS = 8, 64


def log_of(path, *, num_sessions, repeats):
    """Conversations of two turns, whose answers are alike but for a number, or nothing alike."""
    rows = []
    for number in range(num_sessions):
        same = f"the name of note {number} is name {number} and " * 3
        messages = []
        for turn in range(2):
            letters = np.random.default_rng([number, turn]).integers(33, 126, 150)
            said = same if repeats else "".join(map(chr, letters))
            messages += [
                {"role": "user", "content": f"say it {number} {turn}"},
                {"role": "assistant", "content": f"{said} {turn}"},
            ]
        rows.append({"id": f"c{number}", "messages": messages})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_advice_on_a_log_with_repetition(hvd, tiny_llama_path, tmp_path):
    log = log_of(tmp_path / "notes.jsonl", num_sessions=24, repeats=True)
    (tmp_path / "gpu.yaml").write_text(
        "name: a GPU\nrows: [1, 64, 256]\nverify_ms: [5, 6, 16]\nis_assumed: false\n"
    )
    code, out, err = hvd(
        *("advise", log, "--tokenizer", tiny_llama_path, "--costs", tmp_path / "gpu.yaml"),
        *("--save-predictor", "payoff", "--json", "--out", "deep/advice.json"),
    )
    assert code == 0, err
    advice = json.loads(out)
    with open("deep/advice.json") as file:
        assert json.load(file) == advice
    assert advice["verdict"]["kind"] == "helps"
    assert advice["verdict"]["speedup"] > 1.5
    systems = {row["system"] for row in advice["rows"]}
    assert systems >= {"greedy", "ngram", "suffix", "hvd_tau", "hvd_cost", "oracle", "eagle3"}
    assert {row["is_assumed"] for row in advice["rows"] if row["uses_head"]} == {True}
    assert {row["is_assumed"] for row in advice["rows"] if not row["uses_head"]} == {False}
    assert {point["concurrency"] for point in advice["load"]} >= {1, 64}
    with open("deep/advice.html") as file:
        page = file.read()
    assert advice["verdict"]["lines"][0] in page
    assert "<svg" in page
    code, out, err = hvd(
        *("advise", log, "--tokenizer", tiny_llama_path, "--predictor", "payoff"),
        *("--split", "all", "--eagle3", "none", "--costs", "pass"),
    )
    assert code == 0, err
    assert "fewer passes than plain decoding" in " ".join(out.split())
    assert "+head" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_advice_on_a_log_without_repetition(hvd, tiny_llama_path, tmp_path):
    log = log_of(tmp_path / "noise.jsonl", num_sessions=12, repeats=False)
    code, out, err = hvd(
        *("advise", log, "--tokenizer", tiny_llama_path, "--predictor", "none"),
        *("--split", "all", "--eagle3", "none", "--costs", "pass"),
    )
    assert code == 0, err
    assert "It will not help you" in out
    assert "turn nothing on" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["absent.jsonl"], "absent.jsonl"),
        (["LOG", "--costs", "absent.yaml"], "hvd calibrate"),
        (["LOG", "--eagle3", "much"], "--eagle3"),
        (["LOG", "--split", "all"], "--predictor"),
        (["LOG", "--concurrency", "0"], "--concurrency"),
        (["LOG", "--concurrency", "8"], "needs a cost table"),
        (["LOG", "--predictor", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_one_clear_line(hvd, tiny_llama_path, tmp_path, arguments, said):
    log = log_of(tmp_path / "notes.jsonl", num_sessions=8, repeats=True)
    words = [log if word == "LOG" else word for word in arguments]
    code, _, err = hvd("advise", *words, "--tokenizer", tiny_llama_path)
    assert code == 2
    assert err.splitlines()[-1].startswith("hvd: error:")
    assert said in err.splitlines()[-1]


def test_advice_on_transcripts_is_what_live_decoding_shows(default_model_path, hvd, tmp_path):
    """The model's own answers, as a log: replay finds the passes that decoding took."""
    config = load_config(None, [f"model={default_model_path}"])
    engine, codec = load_engine(config)
    decoder = build_decoder("suffix", engine=engine, codec=codec, config=config)
    rows, tokens, passes = [], 0, 0
    for number, prompt in enumerate(load_shipped(["tool_loop"]).prompts[:NUM_PROMPTS]):
        messages = [{"role": m.role, "content": m.content} for m in prompt.messages]
        sampling = SamplingParams(max_tokens=MAX_TOKENS)
        request = Request(str(number), tuple(codec.encode_chat(messages)), sampling)
        completion = decoder.generate(request)
        tokens += len(completion.token_ids)
        passes += completion.num_target_passes
        answer = {"role": "assistant", "content": completion.text}
        rows.append({"id": str(number), "messages": [*messages, answer]})
    log = tmp_path / "answers.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, err = hvd(
        *("advise", log, "--tokenizer", default_model_path, "--predictor", "none", "--turns"),
        *(
            "last",
            "--split",
            "all",
            "--eagle3",
            "none",
            "--costs",
            "pass",
            "--keep-loops",
            "--json",
        ),
    )
    assert code == 0, err
    found = {row["system"]: row for row in json.loads(out)["rows"] if row["workload"] == "all"}
    assert found["suffix"]["emitted_per_pass"] == pytest.approx(tokens / passes, rel=0.05)
