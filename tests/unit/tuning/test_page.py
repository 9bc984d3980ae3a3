"""The page of a sweep: one file, everything on it, nothing from elsewhere."""

import copy
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_ray.errors import UserError
from hvd_ray.tuning.folder import SweepFolder, write_json
from hvd_ray.tuning.page import page, write_page
from hvd_ray.tuning.page_figures import gap_figure, parallel_coordinates, tau_panels
from hvd_ray.tuning.svg import Scale, ramp, short


def trial(number: int, speed: float | None, **params: Any) -> dict[str, Any]:
    metrics = {} if speed is None else {"speed": speed, "emitted_per_pass": 1.5, "epoch": 4.0}
    return {
        "trial": f"id{number}",
        "number": number,
        "status": "failed" if speed is None else "finished",
        "params": {"policy": "hvd_tau", "depth": 2, "learning_rate": 0.001 * number, **params},
        "metrics": metrics,
        "error": "boom" if speed is None else None,
    }


def row(workload: str, ratio: float, interval: list[float] | None) -> dict[str, Any]:
    names = ("best", "tau_6", "suffix", "rule_score", "greedy")
    return {
        "workload": workload,
        "sessions": 9,
        "tokens": 1234,
        "speeds": dict(zip(names, (50.0, 40.0, 45.0, 41.0, 25.0), strict=True)),
        "gap": {"ratio": ratio, "interval": interval, "units": 9, "unit": "session"},
    }


def curve(level: float) -> dict[str, Any]:
    return {"speeds": [level, level + 1, level], "greedy": 25.0, "suffix": 45.0, "best": 50.0}


RESULT: dict[str, Any] = {
    "provenance": {"commit": "abc", "command": "hvd tune", "costs": "pass", "seed": 42},
    "unit": "tokens/s",
    "model": "toy",
    "sweep": {"space": {"learning_rate": {"log": [0.001, 0.004]}, "cost": {}, "depth": 2}},
    "trials": [
        trial(1, 41.0, tau=6.0),
        trial(2, 50.0, policy="hvd_cost"),
        trial(3, None, tau=1.0),
        trial(4, 43.0, tau=2.5),
    ],
    "best": trial(2, 50.0, policy="hvd_cost"),
    "curves": {
        "taus": [0.0, 6.0, 12.0],
        "workloads": {"all": curve(30), "chat": curve(28), "tools": curve(40)},
    },
    "test": [
        row("all", 1.25, [1.1, 1.4]),
        row("chat", 0.98, None),
        row("tools", 1.5, [1.2, 1.9]),
    ],
    "run_id": "r1",
    "registered": None,
}


class Elements(HTMLParser):
    """Every element with its attributes, and the text."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += data


def test_it_needs_nothing_from_elsewhere() -> None:
    document = page(RESULT)
    assert "http" not in document
    assert "@import" not in document
    assert "url(" not in document
    for tag, attributes in Elements(document).found:
        assert tag not in ("link", "img", "iframe", "object")
        assert {"src", "href"}.isdisjoint(attributes)


def test_it_shows_every_trial_workload_and_figure() -> None:
    words = Elements(page(RESULT)).words
    for expected in ("hvd_cost", "tools", "1.250 [1.10, 1.40]", "tokens/s", "1 failed", "1.25x"):
        assert expected in words
    assert "over tau = 6" in words


def test_every_trial_with_a_speed_is_a_line_and_the_best_stands_out() -> None:
    figure = parallel_coordinates(RESULT["trials"], best="id2", unit="tokens/s")
    lines = [a for tag, a in Elements(figure).found if a.get("class") == "trial"]
    assert [a["data-trial"] for a in lines] == ["id1", "id4", "id2"], "slow first, the best on top"
    widths = [float(a["stroke-width"] or 0) for a in lines]
    assert widths[2] > max(widths[:2])


def test_a_setting_that_never_differs_has_no_axis() -> None:
    words = Elements(parallel_coordinates(RESULT["trials"], best="id2", unit="tokens/s")).words
    assert "depth" not in words.replace("depth 2", "")
    assert "learning_rate" in words


def test_a_knob_searched_by_its_logarithm_is_drawn_so() -> None:
    trials = [trial(n, 9.0, learning_rate=rate) for n, rate in ((1, 1e-3), (2, 1e-2), (3, 1e-1))]
    heights = {}
    for names in ((), ("learning_rate",)):
        figure = parallel_coordinates(trials, best="id1", unit="t", log_names=names)
        paths = [a["d"] or "" for _, a in Elements(figure).found if a.get("class") == "trial"]
        heights[names] = sorted(float(path.split()[1]) for path in (p.split("L")[0] for p in paths))
    top, middle, bottom = heights[("learning_rate",)]
    assert middle - top == pytest.approx(bottom - middle, abs=0.2)
    top, middle, bottom = heights[()]
    assert middle - top > 5 * (bottom - middle)


def test_one_trial_alone_can_be_drawn() -> None:
    assert "data-trial" in parallel_coordinates([trial(1, 9.0)], best="id1", unit="tokens/s")


def test_there_is_a_panel_for_every_workload() -> None:
    elements = Elements(tau_panels(RESULT["curves"], unit="tokens/s"))
    labels = [a.get("aria-label") for tag, a in elements.found if tag == "svg"]
    assert len(labels) == 1 + 3
    assert "tools: tokens/s against tau" in labels
    assert sum(tag == "circle" for tag, _ in elements.found) == 3 * 3


@pytest.mark.parametrize(
    "figure",
    [
        parallel_coordinates(RESULT["trials"], best="id2", unit="t<&>"),
        tau_panels(RESULT["curves"], unit="t"),
        gap_figure(RESULT["test"]),
    ],
    ids=["trials", "tau", "gap"],
)
def test_figures_are_well_formed_and_hold_only_finite_places(figure: str) -> None:
    ElementTree.fromstring(f"<div>{figure}</div>")
    assert not re.search(r"\b(nan|inf)\b", figure)


def test_names_are_text_never_markup(tmp_path: Path) -> None:
    result = copy.deepcopy(RESULT)
    evil = "<script>alert(1)</script>"
    result["model"] = evil
    result["trials"][0]["params"]["without"] = evil
    result["curves"]["workloads"][evil] = curve(3)
    result["test"].append(row(evil, 1.0, None))
    write_page(tmp_path / "p.html", result)
    document = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert document.count("<script>") == 1, "our own"
    assert evil in Elements(document).words


def test_a_folder_without_a_finished_sweep_is_refused(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    with pytest.raises(UserError, match=r"no finished sweep .* go on with --resume"):
        folder.read_result()
    write_json(folder.result, [1])
    with pytest.raises(UserError, match="is no result of `hvd tune`"):
        folder.read_result()
    folder.result.write_text("{")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        folder.read_result()


FINITE = st.floats(1e-6, 1e6)


@given(st.lists(FINITE, min_size=1, max_size=5), st.booleans())
def test_a_scale_maps_its_values_inside_and_its_ticks_too(
    values: list[float], is_log: bool
) -> None:
    scale = Scale.over(values, start=100, end=0, is_log=is_log)
    for value in (*values, *scale.ticks()):
        assert -0.5 <= scale(value) <= 100.5
    assert len(scale.ticks()) <= 40


@given(st.floats(-1, 2))
def test_the_ramp_is_a_colour_everywhere(share: float) -> None:
    parts = [int(part) for part in re.findall(r"\d+", ramp(share))]
    assert len(parts) == 3
    assert all(0 <= part <= 255 for part in parts)


@pytest.mark.parametrize(
    ("value", "words"),
    [(12345.6, "12,346"), (431.2, "431"), (43.12, "43.1"), (1.0, "1.00"), (0.00031, "0.00031"),
     (0.0, "0.00")],
)  # fmt: skip
def test_figures_are_short(value: float, words: str) -> None:
    assert short(value) == words


@pytest.mark.parametrize(
    "change", [{"model": None}, {"trials": [1, 2]}, {"best": None}, {"curves": "none"}]
)
def test_a_damaged_result_is_one_line_and_no_page(tmp_path: Path, change: dict[str, Any]) -> None:
    damaged = {k: v for k, v in {**RESULT, **change}.items() if v is not None}
    with pytest.raises(UserError, match="its result is damaged"):
        write_page(tmp_path / "sweep.html", damaged)
    assert not (tmp_path / "sweep.html").exists()
