"""The cost of one more row in a decode step, and the speeds of instances, from load samples."""

from __future__ import annotations

import pytest

from stretto.run.load_sampler import LEAST_STEPS, InstanceSpeed, StepTimes


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


def test_the_time_that_is_expected_of_a_step_follows_its_rows() -> None:
    times = StepTimes()
    assert times.expected(8) == 0.0
    for rows in (4, 16, 64):
        times.add(rows, 0.01 + 0.002 * rows, steps=100)
    assert times.expected(32) == pytest.approx(0.074)


def test_a_speed_is_the_time_that_is_expected_over_the_time_that_steps_take() -> None:
    speed = InstanceSpeed()
    speed.add(0.01, 0.02, LEAST_STEPS - 1)
    assert speed.value is None, "too few steps"
    speed.add(0.01, 0.02, 1)
    assert speed.value == pytest.approx(0.5)
    for _ in range(60):
        speed.add(0.01, 0.01, 10)
    assert speed.value == pytest.approx(1.0, abs=0.01), "later samples count for more"


def test_instances_alike_have_one_speed_however_many_rows_they_have() -> None:
    times, speeds = StepTimes(), {rows: InstanceSpeed() for rows in (8, 48)}
    for _ in range(50):
        for rows, speed in speeds.items():
            times.add(rows, 0.01 + 0.001 * rows, 20)
            speed.add(times.expected(rows), 0.01 + 0.001 * rows, 20)
    values = [speed.value for speed in speeds.values()]
    assert values == pytest.approx([1.0, 1.0], abs=0.05)
