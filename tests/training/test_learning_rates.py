"""The learning rate of every update, in runs of one phase and of several."""

import pytest
from pydantic import ValidationError

from stretto.training.learning_rates import LearningRates, learning_rate
from stretto.training.options import TrainingOptions


def rates(count, /, **options):
    made = TrainingOptions(learning_rate=1.0, **options)
    return [round(learning_rate(step, made), 6) for step in range(count)]


def test_the_rate_warms_up_linearly_and_then_stays():
    assert rates(5, warmup_steps=3) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_a_linear_schedule_falls_to_its_floor_and_stays_there():
    assert rates(7, schedule="linear", steps=4, final_fraction=0.2) == [1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2]


def test_a_cosine_schedule_starts_after_the_warm_up():
    got = rates(7, schedule="cosine", warmup_steps=2, steps=6)
    assert got[2] == 1.0
    assert got[4] == 0.5
    assert got[6] == 0.0


def test_a_schedule_falls_between_the_updates_that_are_stated():
    got = rates(9, schedule="linear", steps=9, schedule_start=4, schedule_end=8)
    assert got == [1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    longer = rates(3, schedule="linear", steps=2, schedule_end=10)
    assert longer == [1.0, 0.9, 0.8]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"schedule_start": 4, "schedule_end": 4}, "schedule_start"),
        ({"schedule_start": 100}, "steps"),
        ({"warmup_steps": 5, "schedule_start": 2}, "warm-up"),
    ],
)
def test_a_schedule_that_does_not_fall_after_the_warm_up_is_refused(wrong, named):
    with pytest.raises(ValidationError, match=named):
        TrainingOptions(schedule="linear", **wrong)


def test_the_rate_of_an_update_is_that_of_its_phase_counted_from_the_beginning_of_the_run():
    first = TrainingOptions(learning_rate=1.0, schedule="linear", steps=4, warmup_steps=1)
    second = TrainingOptions(learning_rate=0.5, schedule="linear", steps=8, schedule_start=4, schedule_end=8)
    never = TrainingOptions(learning_rate=9.0)  # a phase in which no update was trained
    made = LearningRates(((0, first), (4, never), (4, second)))
    assert [made.at(update) for update in range(4)] == [learning_rate(update, first) for update in range(4)]
    assert [made.at(update) for update in range(4, 9)] == [0.5, 0.375, 0.25, 0.125, 0.0]
    assert made.largest == 9.0
