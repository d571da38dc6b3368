"""What one more row costs in a decode step, from load samples."""

from __future__ import annotations

import pytest

from stretto.run.load_sampler import StepTimes


def test_the_cost_of_a_row_is_the_slope_of_the_time_of_steps() -> None:
    times = StepTimes()
    for rows in (4, 16, 64, 10):
        times.add(rows, 0.01 + 0.002 * rows, steps=100)
    assert times.per_row == pytest.approx(0.002)


def test_steps_of_about_the_same_rows_do_not_tell_what_a_row_costs() -> None:
    times = StepTimes()
    assert times.per_row is None
    for rows in (63, 64, 65):
        times.add(rows, 0.1, steps=100)
    assert times.per_row is None


def test_steps_that_are_shorter_with_more_rows_make_rows_free_and_not_cheaper_than_that() -> None:
    times = StepTimes()
    times.add(4, 0.02, steps=10)
    times.add(40, 0.01, steps=10)
    assert times.per_row == 0.0


def test_later_steps_count_for_more() -> None:
    times = StepTimes()
    for slope in (0.001, 0.003):
        for _ in range(200):
            for rows in (4, 64):
                times.add(rows, slope * rows, steps=10)
    assert times.per_row == pytest.approx(0.003, rel=0.05)
