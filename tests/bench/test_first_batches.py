"""The bench of the first batches: with one batch of rows at the start, they are less sorted by length."""

import pytest

from bench.first_batches import TASKS, compare, draw_lengths


@pytest.mark.parametrize("task", TASKS)
def test_the_first_batch_is_less_short_and_nothing_else_changes_much(task: str) -> None:
    at_once, ramped = compare(task, staleness=2, updates=8, seeds=1)
    assert (at_once["ramps"], ramped["ramps"]) == (False, True)
    assert at_once["lengths"][0] < 0.8 * at_once["length"]
    assert ramped["lengths"][0] > at_once["lengths"][0] + 0.1 * at_once["length"]
    assert ramped["wall_s"] < 1.05 * at_once["wall_s"]
    assert ramped["staleness_mean"] == pytest.approx(at_once["staleness_mean"], abs=0.05)


def test_answers_of_a_group_are_more_alike_than_those_of_others() -> None:
    lengths = draw_lengths(200, 512, 0.0, seed=0)
    assert len(lengths) == 1_600
    assert max(lengths) <= 512
    groups = [lengths[start : start + 8] for start in range(0, len(lengths), 8)]
    means = [sum(group) / 8 for group in groups]
    spread = max(means) - min(means)
    assert spread > sum(max(group) - min(group) for group in groups) / len(groups)
