"""The suite's tables and page from measured samples; the papers' figures keep their tags."""

import io

import numpy as np
import pytest
from rich.console import Console

from hvd_ray.bench.cells import aggregate_rows, workload_rows
from hvd_ray.bench.measure import measure
from hvd_ray.bench.result import UNTIMED, BenchResult
from hvd_ray.bench.session import summarise
from hvd_ray.bench.terminal import terminal_report
from hvd_ray.config import Config
from hvd_ray.engines.toy import ToyCodec, ToyEngine
from hvd_ray.paper.against import against_json
from hvd_ray.paper.beside import beside, ratio, wins
from hvd_ray.paper.cycles import class_names, cycles_json, draft_lengths, payoff_shares
from hvd_ray.paper.published import PUBLISHED
from hvd_ray.paper.replays import replays_json, traces_of
from hvd_ray.paper.report import paper_markdown, paper_page, paper_part
from hvd_ray.paper.tables import paper_tables
from hvd_ray.parts.payoff import PayoffSource
from hvd_ray.payoff.features import NUM_FEATURES
from hvd_ray.payoff.network import Network
from hvd_ray.payoff.predictor import MlpPredictor, PredictorCard
from hvd_ray.payoff.token_classes import TokenClasses
from hvd_ray.pipelines.spread import IN_PROCESS
from tests.unit.bench.conftest import builder, plan, prompt
from tests.unit.tuning.test_pieces import Many

SYSTEMS = ("greedy", "ngram", "suffix", "hvd_tau", "hvd_cost")


class Silent:
    def stage(self, text): ...
    def expect(self, total, *, unit=None): ...
    def advance(self, done, text): ...


@pytest.fixture(scope="module")
def samples():
    texts = ["abcabcabcab", "stustustust", "abcstuabcst", "mnomnomnomn", "qrsqrsqrsqr"]
    prompts = [prompt(text, workload="ab"[i % 2]) for i, text in enumerate(texts)]
    return measure(plan(prompts, systems=SYSTEMS), build=builder())


@pytest.fixture(scope="module")
def result(samples):
    labels = {"engine": "toy", "dtype": "float32", "seed": 0}
    rows, whole = workload_rows(samples, **labels), aggregate_rows(samples, **labels)
    return BenchResult({"config": {"model": "toy"}}, (), tuple(rows), tuple(whole))


@pytest.fixture(scope="module")
def own(samples):
    return {
        **cycles_json(samples),
        **replays_json(
            traces_of(samples, context_length=512),
            classes=TokenClasses.from_codec(ToyCodec(), 64),
            payoff=None,
            costs=None,
            config=Config(),
            progress=Silent(),
        ),
    }


def test_workers_replay_the_same(samples):
    rng = np.random.default_rng(0)
    layers = [(rng.normal(size=(NUM_FEATURES, 1)).astype(np.float32), np.ones(1, np.float32))]
    low_F, high_F = (np.full(NUM_FEATURES, bound, np.float32) for bound in (0, 9))
    predictor = MlpPredictor(Network(layers, low_F=low_F, high_F=high_F), PredictorCard(kind="mlp"))
    alone, apart = (
        replays_json(
            traces_of(samples, context_length=512),
            classes=TokenClasses.from_codec(ToyCodec(), 64),
            payoff=PayoffSource(predictor, "own", None),
            costs=None,
            config=Config(),
            progress=Silent(),
            workers=workers,
        )
        for workers in (IN_PROCESS, Many(3))
    )
    assert len(alone["taus"]) > 5
    assert alone == apart


def test_histograms_count_every_draft_once(samples):
    for share in payoff_shares(samples, systems=("suffix",)):
        assert sum(share.counts) == share.drafts
        assert len(share.counts) == len(class_names())
    steps = [s for x in samples if x.arm.system == "suffix" for s in x.completion.steps]
    drafted = sum(step.drafted > 0 for step in steps)
    assert sum(draft_lengths(samples)["suffix cold"]["suffix"]) == drafted


def test_wins_and_ratios_are_of_tokens_per_second(result):
    (won,) = [w for w in wins(result, "hvd_cost") if w[0] == "greedy"]
    mine = {r.workload: r for r in result.rows if r.system == "hvd_cost"}
    plain = {r.workload: r for r in result.rows if r.system == "greedy"}
    faster = [n for n in mine if mine[n].tokens_per_second > plain[n].tokens_per_second]
    assert won == ("greedy", len(faster), 2)
    (aggregate,) = [r for r in result.aggregate if r.system == "hvd_cost"]
    assert ratio(result, "hvd_cost", "greedy") == pytest.approx(aggregate.speedup_vs_greedy)


def test_every_published_figure_has_its_tag_and_ours_or_says_not_measured(result, own):
    rows = beside(result, own)
    assert [row.published for row in rows] == list(PUBLISHED)
    assert all(row.published.tag in ("[A]", "[N]", "[D]") for row in rows)
    ours = {row.published.key: row.ours for row in rows}
    assert ours["speedup"].endswith("x")
    assert ours["over_eagle3"] == "not measured"
    assert ours["precision"] == "not measured"


def test_markdown_and_page_hold_every_table(result, own):
    markdown, page = paper_markdown(result, own), paper_page(result, own)
    for item in paper_tables(result, own):
        assert f"## {item.heading}" in markdown
        assert f"<h2>{item.heading}</h2>" in page
        assert all(len(row) == len(item.head) for row in item.body)
    assert "2606.01019" in markdown
    assert page.count("<svg") >= 3


@pytest.mark.parametrize("is_timed", [True, False])
def test_a_run_that_was_not_timed_shows_only_what_it_counted(is_timed, samples, own):
    about = {"config": {"model": "toy"}, "options": {"is_timed": is_timed}}
    capabilities = ToyEngine(2).capabilities
    shown = summarise(samples, capabilities, Config(), notes=(), about=about)
    compared = {**own, "against": against_json(samples, "hvd_cost")}
    texts = {
        "markdown": paper_markdown(shown, compared),
        "page": paper_page(shown, compared),
        "readme": paper_part(shown, compared),
        "terminal": terminal_text(shown),
    }
    for kind, text in texts.items():
        plain = " ".join(text.split()).replace("&#x27;", "'")
        assert (UNTIMED in plain) is not is_timed, kind
        found = [words for words in CLOCKED if words in plain.replace(UNTIMED, "")]
        assert bool(found) is is_timed, (kind, found)
    assert "Cycles and routes" in texts["markdown"]
    assert "cycles per 1,000 tokens" in texts["readme"]
    assert "/pass" in texts["terminal"]


CLOCKED = (
    *("tok/s", "tokens/s", "speed-up", "Speed-up against greedy", "Tokens per second", "2.97x"),
    *("faster on", "What a cycle costs", "against each other system", "39.6 ms"),
    *("slower than plain", "shows no gain", "Tokens a second"),
)


def terminal_text(result):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(terminal_report(result))
    return console.export_text()
