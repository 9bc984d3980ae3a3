"""Costs learnt from steps."""

from __future__ import annotations

import pytest

from hvd_ray.vllm_plugin.step_costs import FadingLine, LearntAcceptance, LearntCosts


def test_a_line_is_found_again() -> None:
    line = FadingLine(prior_slope=1 / 64)
    for step in range(200):
        rows = 1 + step % 16
        line.observe(rows, 40.0 + 0.5 * rows)
    assert line.at(1) == pytest.approx(40.5, rel=0.01)
    assert line.at(64) == pytest.approx(72.0, rel=0.03)


def test_rows_that_were_never_tried_are_priced_by_the_prior() -> None:
    line = FadingLine(prior_slope=1 / 64)
    for _ in range(50):
        line.observe(1, 40.0)
    assert line.at(1) == pytest.approx(40.0)
    assert line.at(65) == pytest.approx(80.0, rel=0.05)


def test_a_dear_second_row_is_told_from_dear_rows() -> None:
    line = FadingLine(prior_slope=1 / 64)
    for step in range(200):
        rows = (1, 2, 5, 9, 1, 17)[step % 6]
        line.observe(rows, 40.0 if rows == 1 else 75.0 + rows)
    assert line.at(1) == pytest.approx(40.0, rel=0.03)
    assert line.at(2) == pytest.approx(77.0, rel=0.02)
    assert line.at(33) == pytest.approx(108.0, rel=0.03)
    costs = LearntCosts(target=line)
    assert costs.verify_ms(9).tolist() == pytest.approx([line.at(rows) for rows in range(10)])


def test_a_pass_that_gets_cheaper_with_rows_is_held_to_be_level() -> None:
    line = FadingLine(prior_slope=1 / 64)
    for step in range(200):
        rows = 1 + step % 8
        line.observe(rows, 60.0 - rows)
    times = LearntCosts(target=line).verify_ms(8)
    assert (times[1:] > times[:-1]).all()
    assert times[8] < 1.02 * times[1]
    assert times[4] == pytest.approx(55.5, rel=0.03)


def test_the_line_follows_the_load_and_forgets() -> None:
    line = FadingLine(prior_slope=1 / 64)
    for ms in [40.0] * 300 + [80.0] * 600:
        line.observe(4, ms)
    assert line.at(4) == pytest.approx(80.0, rel=0.05)


def test_a_disturbed_step_teaches_little() -> None:
    line = FadingLine(prior_slope=1 / 64)
    for _ in range(100):
        line.observe(1, 40.0)
    line.observe(1, 40_000.0)
    assert line.at(1) < 45


def test_costs_rise_with_rows_and_know_the_head_once_it_ran() -> None:
    costs = LearntCosts()
    times = costs.verify_ms(8)
    assert len(times) == 9
    assert (times[1:] > times[:-1]).all()
    costs.target.observe(1, 40.0)
    assert costs.model_ms(2) == pytest.approx(9.6, rel=0.05)
    for tokens in (1, 4) * 50:
        costs.head.observe(tokens, 2.0 + tokens)
    assert costs.model_ms(4) == pytest.approx(6.0, rel=0.1)


def test_reading_a_prompt_is_priced_by_the_row() -> None:
    costs = LearntCosts()
    costs.target.observe(1, 20.0)
    costs.observe_reading(500, 1, 22.4)
    assert costs.reading_ms == pytest.approx(0.04), "the chain's part is assumed at first"
    for tokens in (1, 2) * 20:
        costs.head.observe(tokens, 2.5 * tokens)
    for _ in range(30):
        costs.observe_reading(500, 1, 22.5)
        costs.observe_reading(1000, 2, 45.0)
    assert costs.reading_ms == pytest.approx(0.04, rel=0.05)
    costs.observe_reading(10, 1, 60_000.0)
    assert costs.reading_ms < 0.043


def test_the_heads_acceptance_is_learnt_by_position_from_what_was_tried() -> None:
    learnt = LearntAcceptance(prior=(0.5, 0.5))
    assert learnt.by_position()[:3] == (0.5, 0.5, 0.5)
    for _ in range(300):
        learnt.observe(drafted=3, accepted=1)  # the first always, the second never
    first, second, third = learnt.by_position()[:3]
    assert first > 0.9
    assert second < 0.1
    assert third == 0.5, "never tried"


def test_a_whole_chain_says_nothing_of_the_position_beyond() -> None:
    learnt = LearntAcceptance(prior=(0.5,))
    learnt.observe(drafted=2, accepted=2)
    assert learnt.by_position()[2] == 0.5
    assert learnt.by_position()[1] > 0.5
