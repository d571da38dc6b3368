"""Shares of tasks under the real core and a virtual clock: slow tasks, and those that lose groups, keep theirs."""

from __future__ import annotations

import pytest

from bench.mixture import SimulatedTask, simulate

SLOW = {"quick": SimulatedTask(0.7), "slow": SimulatedTask(0.3, seconds=10.0)}


@pytest.mark.parametrize("paradigm", ["multi-version", "synchronous", "one-step-off", "drop"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_slow_task_keeps_its_share(paradigm: str, seed: int) -> None:
    found = simulate(SLOW, paradigm=paradigm, seed=seed)
    assert found.worst < 0.02
    assert max(found.by_update.values()) < 0.1, "and is not put off until the end"


def test_a_task_that_loses_groups_is_sampled_more_often() -> None:
    tasks = {
        "a": SimulatedTask(0.5),
        "easy": SimulatedTask(0.3, without_signal=0.7),
        "bad": SimulatedTask(0.2, fails=0.5),
    }
    found = simulate(tasks)
    assert found.worst < 0.02
    assert found.drawn["easy"] > 2.5 * 0.3 * 800
    assert found.drawn["bad"] > 1.6 * 0.2 * 800


def test_a_bound_gives_to_the_others_what_a_task_loses_too_often() -> None:
    tasks = {"a": SimulatedTask(0.5), "easy": SimulatedTask(0.5, without_signal=0.8, oversample=2.0)}
    found = simulate(tasks)
    assert found.trained["easy"] < 0.4
    assert found.drawn["easy"] == pytest.approx(2 * found.drawn["a"], rel=0.05)
