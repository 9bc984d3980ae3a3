"""Tables, notes, plots and the README's generated part."""

from dataclasses import replace

import pytest
from rich.console import Console

from hvd_ray.bench.page import write_bench_page
from hvd_ray.bench.plots import plot_speedups
from hvd_ray.bench.report import (
    BEGIN,
    END,
    across,
    exactness_notes,
    markdown_report,
    markdown_table,
    percent,
    slowdown_notes,
    update_readme,
    write_report,
)
from hvd_ray.bench.result import BenchResult, Difference, Row, WithoutLoops
from hvd_ray.bench.terminal import terminal_report
from hvd_ray.config import Config
from hvd_ray.errors import UserError
from hvd_ray.systems import SYSTEMS

WORKLOADS = ("doc_edit", "tool_loop", "open_chat")


def _row(system, *, workload="doc_edit", cache="cold", speedup=1.5, ci=(1.25, 1.75), **changes):
    is_greedy = system == "greedy"
    row = Row(
        workload=workload,
        family="agentic",
        system=system,
        engine="torch",
        cache="none" if is_greedy else cache,
        dtype="bfloat16",
        temperatures=(0.0,),
        prompts=4,
        tokens=400,
        target_passes=200,
        tokens_per_second=31.26,
        speedup_vs_greedy=1.0 if is_greedy else speedup,
        speedup_ci=(1.0, 1.0) if is_greedy else ci,
        ci_unit="session",
        ci_is_degenerate=False,
        emitted_per_pass=1.0 if is_greedy else 2.0,
        mean_accepted_drafted_only=None if is_greedy else 4.0,
        cycles_per_1k_tokens=500.0,
        drafted_cycles=50,
        drafted=400,
        accepted=200,
        source_share={"none": 0.75, "suffix": 0.25},
        draft_ms_per_cycle=0.1,
        verify_ms_per_cycle=30.0,
        identical_to_greedy=1.0 if is_greedy else 0.75,
        differences=() if is_greedy else (Difference("p", 3, 0.125),),
        identical_in_one_pass=0.5 if is_greedy else None,
        loops=0.25,
        without_loops=WithoutLoops(3, 1.2, (1.1, 1.3), 1.6),
    )
    return replace(row, **changes)


@pytest.fixture
def result():
    rows = tuple(_row(s, workload=w) for w in WORKLOADS for s in SYSTEMS)
    aggregate = tuple(_row(s, workload="all", speedup=1.44) for s in SYSTEMS)
    provenance = {
        "config": {"model": "smollm2-135m"},
        "commit": "c0ffee",
        "command": "hvd bench",
    }
    return BenchResult(provenance, ("hvd_tau was left out.",), rows, aggregate)


def _printed(result, width=80):
    console = Console(width=width, record=True, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(terminal_report(result))
    return capture.get()


# -- notes -------------------------------------------------------------------------------------


def test_a_system_that_is_slower_is_said_so_plainly():
    rows = [
        _row("greedy"),
        _row("suffix", workload="chat", speedup=0.93, ci=(0.9, 0.96)),
        _row("suffix", workload="sql", speedup=0.8, ci=(0.7, 0.9)),
        _row("suffix", workload="edits", speedup=2.0),
    ]
    assert slowdown_notes(rows) == (
        "suffix is slower than plain decoding on chat (0.93x), sql (0.80x): leave it off there.",
    )


def test_what_may_be_noise_is_not_called_slower():
    (note,) = slowdown_notes([_row("suffix", speedup=0.98, ci=(0.9, 1.1))])
    assert "no gain on doc_edit (0.98x)" in note
    assert "slower" not in note


def test_one_slow_prompt_shows_nothing():
    (note,) = slowdown_notes([_row("suffix", speedup=0.5, ci=(0.5, 0.5), ci_is_degenerate=True)])
    assert "slower" not in note
    assert "too few prompts" in note


@pytest.mark.parametrize(
    ("system", "given", "temperature", "is_fault"),
    [
        ("eagle3", {"drafting": {"eagle3": {"is_sampled": True}}}, 0.8, False),
        ("eagle3", {"drafting": {"eagle3": {"is_sampled": True}}}, 0.0, True),
        ("eagle3", {}, 0.8, True),
        ("suffix", {"drafting": {"eagle3": {"is_sampled": True}}}, 0.8, True),
        ("eagle3+nested", {"drafting": {"eagle3": {"is_sampled": True}}}, 0.8, True),
        ("nested", {"tiers": {"is_sampled": True}}, 0.8, False),
        ("tiered", {}, 0.0, False),
    ],
)
def test_a_law_that_is_kept_with_other_tokens_is_no_fault(system, given, temperature, is_fault):
    row = _row(system, dtype="float32", temperatures=(temperature,))
    notes = exactness_notes([row], config=Config.model_validate(given))
    assert len(notes) == is_fault


def test_nothing_is_noted_where_all_is_faster():
    assert slowdown_notes([_row("greedy"), _row("suffix")]) == ()


# -- Markdown ----------------------------------------------------------------------------------


def test_a_markdown_table_is_aligned_also_in_the_raw():
    table = markdown_table(["name", "x"], [["a", "1.25"], ["longer name", "10"]])
    assert table.splitlines() == [
        "| name        |    x |",
        "| :---------- | ---: |",
        "| a           | 1.25 |",
        "| longer name |   10 |",
    ]


def test_a_bar_in_a_name_does_not_split_its_cell():
    table = markdown_table(["name", "x"], [["a|b", "1"]])
    assert table.splitlines()[2] == "| a\\|b | 1 |"
    assert len({len(line) for line in table.splitlines()}) == 1


def test_the_report_shows_each_workload_and_system_with_interval_and_per_pass(result):
    text = markdown_report([result])
    row = next(line for line in text.splitlines() if line.startswith("| tool_loop"))
    assert row.count("1.50 (1.25-1.75)") == len(SYSTEMS) - 1
    assert "| all " in text
    assert "1.44" in text
    assert "1.20 / 1.60" in text, "figures without the loops"
    assert "hvd_tau was left out." in text
    assert "c0ffee" in text
    assert "suffix 75 %" in text
    assert "one pass: 50 %" in text


def test_too_few_prompts_show_no_interval(result):
    rows = (_row("greedy"), _row("suffix", ci_is_degenerate=True, ci=(1.5, 1.5)))
    text = markdown_report([replace(result, rows=rows, aggregate=rows)])
    assert "1.50 (few)" in text
    assert "1.50-1.50" not in text


@pytest.mark.parametrize(
    ("share", "shown"),
    [
        (1.0, "100 %"),
        (0.9999, "99.9 %"),
        (0.996, "99.6 %"),
        (0.5, "50 %"),
        (1e-5, "0.1 %"),
        (0, "0 %"),
    ],
)
def test_almost_all_is_never_shown_as_all(share, shown):
    assert percent(share) == shown


# -- terminal ----------------------------------------------------------------------------------


def test_the_terminal_table_fits_80_columns_and_cuts_nothing(result):
    two = tuple(replace(row, cache="warm") for row in result.rows if row.system != "greedy")
    printed = _printed(replace(result, rows=result.rows + two))
    assert max(map(len, printed.splitlines())) <= 80
    assert "…" not in printed
    for word in (
        "rule_score   cold",
        "hvd_tau      warm",
        "1.50x",
        "1.25-1.75",
        "doc_edit",
        "75 %",
    ):
        assert word in printed


def test_a_workload_named_like_markup_is_shown_as_it_is(result):
    rows = (_row("greedy", workload="[bold]x[/bold]"), _row("suffix", workload="[bold]x[/bold]"))
    assert "[bold]x[/bold]" in _printed(replace(result, rows=rows, aggregate=rows))


def test_the_predictor_is_named_wherever_the_result_is_shown(result, tmp_path):
    assert "Predictor" not in _printed(result) + markdown_report([result])
    about = {"predictor_sha256": "0123456789abcdef" * 4}
    for reference, shown in (
        ("champion models:/hvd-payoff-smollm2-135m/12",) * 2,
        ("/home/me/runs/demo/predictor", "demo/predictor"),
    ):
        known = replace(result, provenance={**result.provenance, **about, "predictor": reference})
        line = f"Predictor: {shown} (sha256 0123456789ab)."
        assert line in _printed(known).splitlines()
        assert line in markdown_report([known]).splitlines()
        write_bench_page(tmp_path / "page.html", [known])
        assert line in (tmp_path / "page.html").read_text()


# -- files -------------------------------------------------------------------------------------


def test_the_report_folder_holds_the_text_and_a_plot_for_each_result(result, tmp_path):
    paths = write_report([result, result], tmp_path / "out")
    assert all(path.is_file() for path in paths)
    assert [path.suffix for path in paths] == [".md", ".png", ".png"]
    assert paths[1].read_bytes()[:4] == b"\x89PNG"
    text = paths[0].read_text()
    assert all(f"]({path.name})" in text for path in paths[1:])


def test_the_readme_keeps_everything_but_what_stands_between_the_markers(result, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"# Title\n\n{BEGIN}\nold table\n{END}\n\nThe end.\n")
    update_readme(readme, [result])
    once = readme.read_text()
    assert once.startswith(f"# Title\n\n{BEGIN}\n### smollm2-135m, bfloat16")
    assert once.endswith(f"{END}\n\nThe end.\n")
    assert "old table" not in once
    update_readme(readme, [result])
    assert readme.read_text() == once


@pytest.mark.parametrize("text", ["no markers", f"{END} {BEGIN}", f"{BEGIN}{BEGIN}{END}", BEGIN])
def test_a_readme_without_its_markers_is_left_alone(result, tmp_path, text):
    readme = tmp_path / "README.md"
    readme.write_text(text)
    with pytest.raises(UserError, match="bench:begin"):
        update_readme(readme, [result])
    assert readme.read_text() == text
    assert list(tmp_path.iterdir()) == [readme]


def test_many_workloads_are_drawn_in_rows_with_a_mark_of_its_own_for_each_system():
    workloads = [f"workload {number}" for number in range(8)]
    systems = ("ngram", "suffix", "eagle3", "hvd_cost", "hf_assisted")
    rows = tuple(_row(s, workload=w) for w in workloads for s in ("greedy", *systems))
    figure = plot_speedups(BenchResult({}, (), rows, ()))
    upper, lower = figure.axes
    drawn = [line for line in upper.lines if not line.get_label().startswith("_")]
    assert [line.get_label() for line in drawn] == list(systems)
    looks = {(line.get_color(), line.get_marker()) for line in drawn}
    assert len(looks) == len(systems)
    shown = [label.get_text() for axes in (upper, lower) for label in axes.get_xticklabels()]
    assert shown == workloads
    assert figure.get_figwidth() <= 11


def test_the_headline_stands_first_where_tables_are_wide():
    assert across(["ngram", "hvd_cost warm", "suffix", "hvd_cost cold", "ngram"]) == [
        *("hvd_cost warm", "hvd_cost cold"),
        *("ngram", "suffix"),
    ]
    assert across(["hvd_cost+tiered", "suffix"]) == ["hvd_cost+tiered", "suffix"]
