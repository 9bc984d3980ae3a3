"""`hvd bench` and `hvd report` from the command line, on a tiny Llama."""

import json
import re

import pytest

from hvd_ray.bench.rivals import RIVALS
from hvd_ray.config import SYSTEM_ALIASES
from hvd_ray.systems import SYSTEMS

PROMISED = {
    "workload",
    "family",
    "system",
    "engine",
    "prompts",
    "tokens",
    "target_passes",
    "tokens_per_second",
    "speedup_vs_greedy",
    "speedup_ci",
    "emitted_per_pass",
    "cycles_per_1k_tokens",
    "drafted",
    "accepted",
    "source_share",
    "draft_ms_per_cycle",
    "verify_ms_per_cycle",
    "identical_to_greedy",
}


@pytest.fixture
def prompt_file(tmp_path):
    """Two workloads of four prompts, one of them sampled."""
    rows = []
    for workload, sampling in (("edits", {}), ("chat", {"temperature": 0.8, "seed": 3})):
        for i, split in enumerate(("train", "test", "test", "test")):
            text = f"say it to the name {i} and the name {i} and the name"
            message = [{"role": "user", "content": text}]
            row = {"id": f"{workload}-{i}", "workload": workload, "split": split}
            rows.append(row | {"messages": message, "sampling": sampling})
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_help_names_every_system(hvd):
    code, out, _ = hvd("bench", "--help")
    assert code == 0
    words = set(re.split(r"[^\w=.]+", out.replace(". ", " ")))
    assert words >= {*SYSTEMS, *SYSTEM_ALIASES, *RIVALS, "tiers.is_forced=true"}


def test_bench_measures_writes_and_prints_the_same_result(hvd, tiny_llama_path, prompt_file):
    code, out, err = hvd(
        *("bench", "--systems", "ngram,suffix,rule_score,rule_match", "--prompts", prompt_file),
        *("--max-tokens", 24, "--dtype", "float32", "--json", "--out", "deep/result.json"),
        *("--cache", "both", f"model={tiny_llama_path}"),
    )
    assert code == 0, err
    tree = json.loads(out)
    with open("deep/result.json") as file:
        assert json.load(file) == tree
    arms = {(row["system"], row["cache"]) for row in tree["rows"]}
    assert len(arms) == 2 + 3 * 2
    assert len(tree["rows"]) == 2 * len(arms)
    assert all(set(row) >= PROMISED for row in tree["rows"])
    assert all(row["identical_to_greedy"] == 1 for row in tree["rows"] + tree["aggregate"])
    assert all(row["identical_in_one_pass"] in (1, None) for row in tree["rows"])
    assert {row["workload"]: row["temperatures"] for row in tree["rows"]} == {
        "edits": [0.0],
        "chat": [0.8],
    }
    assert any(row["accepted"] for row in tree["rows"])
    assert tree["provenance"]["config"]["dtype"] == "float32"
    assert len(tree["provenance"]["workload_hash"]) == 64


def test_bench_without_a_predictor_says_what_it_leaves_out(hvd, tiny_llama_path, prompt_file):
    code, out, err = hvd(
        *("bench", "--prompts", prompt_file, "--max-tokens", 4, "--limit", 1),
        f"model={tiny_llama_path}",
    )
    assert code == 0, err
    assert "hvd_tau left out" in out
    assert max(map(len, out.splitlines())) <= 80


def test_report_makes_tables_and_plots_of_a_result(hvd, tiny_llama_path, prompt_file):
    hvd(
        *("bench", "--systems", "suffix", "--prompts", prompt_file, "--max-tokens", 4),
        *("--out", "r.json", f"model={tiny_llama_path}"),
    )
    with open("README.md", "w") as readme:
        readme.write("before\n<!-- bench:begin -->\n<!-- bench:end -->\nafter\n")
    code, out, err = hvd("report", "r.json", "--out", "docs", "--readme", "README.md")
    assert code == 0, err
    assert out.count("written: ") == 4
    with open("docs/report.html") as page:
        assert "<svg" in page.read()
    with open("README.md") as readme:
        text = readme.read()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| edits " in text
    assert "](docs/speedup-1-bfloat16.png)" in text


def test_a_suite_is_resumed_and_reported(hvd, tiny_llama_path, prompt_file, tmp_path):
    (tmp_path / "set").mkdir()
    prompt_file.rename(tmp_path / "set" / "all.jsonl")
    command = (
        *("bench", "--suite", "paper", "--prompts-dir", tmp_path / "set", "--limit", 1),
        *("--max-tokens", 8, "--systems", "suffix,hf_prompt_lookup,hf_assisted"),
        *("--out", "paper", "--dtype", "float32", f"model={tiny_llama_path}"),
    )
    code, out, err = hvd(*command)
    assert code == 0, err
    cells = sorted(tmp_path.glob("here/paper/cells/*/*.json"))
    assert len(cells) == 2, "a prompt of each workload"
    before = [cell.stat().st_mtime_ns for cell in cells]
    cells[0].unlink()
    code, out, err = hvd(*command, "--json")
    assert code == 0, err
    assert cells[0].stat().st_mtime_ns > before[0]
    assert cells[1].stat().st_mtime_ns == before[1], "what was measured is not measured again"
    tree = json.loads(out)
    arms = {(row["system"], row["cache"]) for row in tree["rows"]}
    assert arms == {
        *(("greedy", "none"), ("suffix", "cold"), ("suffix", "warm")),
        *(("hf_prompt_lookup", "none"), ("hf_assisted", "none")),
    }
    assert "transformers" in tree["provenance"]["rivals"]["hf_assisted"]
    assert tree["paper"]["cycle_costs"]
    code, _, err = hvd(*command, "--max-tokens", 9)
    assert code == 2
    assert "max_tokens" in err
    code, out, err = hvd("report", "paper/paper.json", "--out", "pages")
    assert code == 0, err
    for page in ("paper/paper.html", "pages/report.html"):
        with open(page) as file:
            assert "Beside the papers" in file.read()


def test_tiers_are_scored_beside_others_and_timed_alone(hvd, tiny_llama_path, tmp_path):
    (tmp_path / "set").mkdir()
    for task in ("gsm8k", "wmt14_de_en", "cnn_dailymail", "json_schema"):
        rows = [
            {"id": f"{task}{i}", "workload": task, "split": "test", "prompt": f"{task} {i} and {i}"}
            for i in range(2)
        ]
        (tmp_path / "set" / f"{task}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = (
        *("bench", "--suite", "tiers", "--prompts-dir", tmp_path / "set", "--systems", "suffix"),
        *("--max-tokens", 6, "--dtype", "float32", f"model={tiny_llama_path}"),
    )
    code, out, err = hvd(*command, "--untimed", "--out", "scored")
    assert code == 0, err
    assert "Not timed" in out
    assert out.count("gsm8k, same_number 1.00") == 2, "a lossless system gives greedy's own answers"
    assert "cnn_dailymail, rouge_l" in out
    assert max(map(len, out.splitlines())) <= 80
    code, _, err = hvd(*command, "--limit", 1, "--out", "timed", "--json")
    assert code == 0, err
    code, out, err = hvd("report", "scored/tiers.json", "--times", "timed/tiers.json")
    assert code == 0, err
    assert "Times are of a run alone over the first 1 prompts of each workload" in out
    assert "Speed-up against greedy in tokens per second" in out
    code, _, err = hvd("report", "timed/tiers.json", "--times", "scored/tiers.json")
    assert code == 2
    assert "--untimed" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "thesis"], "there is paper"),
        (["--suite", "paper", "--workloads", "doc_edit"], "own prompts"),
        (["--suite", "paper", "--prompts-dir", "nowhere"], "workloads are not shipped"),
        (["--engine", "vllm", "--concurrency", "1,8"], "several are for --suite paper"),
        (["--engine", "vllm", "--concurrency", "eight"], "numbers by comma, e.g. 1,8"),
        (["--concurrency", "0"], "--concurrency must be 1 or more, got 0"),
        (["--suite", "tiers", "--prompts-dir", "nowhere"], "gsm8k.jsonl: absent"),
        (["--prompts-dir", "nowhere"], "is for --suite"),
        (["--workers", "2"], "--workers is for --suite paper"),
        (["--suite", "paper", "--workers", "0"], "--workers must be 1 or more, got 0"),
        (["--systems", "warp"], "unknown; choose from greedy, ngram"),
        (["--systems", "suffix,eagle3_tree+nested"], "not supported: trees behind nested"),
        (["--systems", "tiered", "tiers.theta_accept=0.3"], "error: setting tiers: theta_accept"),
        (["--workloads", "nonsense"], "known are doc_edit"),
        (["--limit", "0"], "--limit must be 1 or more, got 0"),
        (["--max-tokens", "0"], "--max-tokens must be 1 or more, got 0"),
        (["--workloads", "doc_edit", "--prompts", "p.jsonl"], "not both"),
        (["--prompts", "absent.jsonl"], "cannot read absent.jsonl"),
        (["--prompts", "empty.jsonl"], "empty.jsonl:1: empty prompt"),
        (["--out", "p.jsonl/result.json"], "cannot write p.jsonl/result.json"),
        (["--cache", "tepid"], "--cache must be one of"),
        (["--engine", "tpu"], "not supported"),
        (["--predictor", "nowhere"], "nowhere"),
        (["--systems", "hvd_tau", "--prompts", "p.jsonl", "model=none/ships"], "hvd train"),
        (["policy.tau=much"], "policy.tau"),
        (["nonsense.key=1"], "unknown"),
        (["doc_edit"], "'doc_edit' is no setting"),
        (["--micro", "--out", "."], "cannot write"),
        (["--micro", "--systems", "suffix"], "--micro measures one decision"),
    ],
)
def test_a_users_mistake_is_one_line_and_leaves_nothing(hvd, hvd_home, arguments, message):
    with open("p.jsonl", "w") as file:
        file.write('{"prompt": "abc"}\n')
    with open("empty.jsonl", "w") as file:
        file.write('{"prompt": " "}\n')
    before = sorted(hvd_home.parent.rglob("*"))
    code, out, err = hvd("bench", *arguments)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    left = set(hvd_home.parent.rglob("*")) - set(before)
    assert not [path for path in left if hvd_home not in path.parents and path != hvd_home]


def test_a_prompt_over_the_context_is_named_by_file_and_line(hvd, tiny_llama_path):
    with open("p.jsonl", "w") as file:
        file.write('{"prompt": "abc"}\n' + json.dumps({"prompt": "abc" * 1000}) + "\n")
    code, out, err = hvd("bench", "--systems", "suffix", "--prompts", "p.jsonl",
                         "--out", "r.json", f"model={tiny_llama_path}")  # fmt: skip
    assert code == 2
    assert "p.jsonl:2: prompt 'p:2' has 3000 tokens" in err
    assert out == ""


def test_a_result_that_is_none_is_refused(hvd):
    with open("r.json", "w") as file:
        file.write("{}")
    code, out, err = hvd("report", "r.json", "--out", "docs")
    assert (code, out) == (2, "")
    assert "r.json is no result of `hvd bench`" in err
    with pytest.raises(FileNotFoundError):
        open("docs/bench.md").close()


@pytest.mark.model
def test_micro_gives_the_costs_on_the_shipped_texts(hvd, default_model_path):
    code, out, err = hvd(
        "bench", "--micro", "--json", "--out", "m.json", f"model={default_model_path}"
    )
    assert code == 0, err
    figures = json.loads(out)
    assert set(figures["decision_us"]) == {"1", "64"}
    assert figures["provenance"]["predictor"].startswith("untrained")
    assert figures["lookup_us"] > 0
    assert figures["label_positions_per_second_per_core"] > 1000
