"""The pace of instances, and the share of new work that follows from it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core import messages as m
from stretto.core.controller import Controller
from stretto.core.paces import STEPS, paces_of
from stretto.core.plan import resolve_plan


def test_a_pace_is_the_speed_beside_the_fastest() -> None:
    assert paces_of({0: 40.0, 1: 20.0, 2: 39.0}) == {0: 1.0, 1: 0.5, 2: 1.0}
    assert paces_of({0: 3.0, 1: 1e-9}) == {0: 1.0, 1: 1 / STEPS}
    assert paces_of({}) == {}


@given(st.dictionaries(st.integers(0, 9), st.floats(1e-6, 1e6), min_size=1))
def test_paces_are_eighths_and_their_sum_is_exact(speeds: dict[int, float]) -> None:
    paces = paces_of(speeds)
    assert max(paces.values()) == 1.0
    assert all((STEPS * pace).is_integer() and pace > 0 for pace in paces.values())


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan")])
def test_a_speed_that_is_none_is_refused(speed: float) -> None:
    with pytest.raises(ValueError, match="the speed of instance 3"):
        paces_of({3: speed})


def starts(spread: str, speeds: dict[int, float]) -> Counter[int]:
    """The trajectories that start on each of two instances, which load version 0 once their speeds are known."""
    plan = resolve_plan("synchronous", batch=30, group_size=4, updates=2, retries=0, rows=120, spread=spread)  # type: ignore[arg-type]
    controller = Controller(plan)
    for instance in (0, 1):
        controller.handle(m.Joined(instance, 1))
    controller.handle(m.LoadSampled({}, speeds=speeds))
    found: Counter[int] = Counter()
    for instance in (0, 1):
        for command in controller.handle(m.Loaded(instance, 0)):
            if isinstance(command, m.Start):
                found.update(command.instances)
    assert found.total() == 120
    return found


@pytest.mark.parametrize("spread", ["never", "always"])
def test_an_instance_at_half_the_speed_gets_half_as_many_new_trajectories(spread: str) -> None:
    assert starts(spread, {0: 55.0, 1: 55.0}) == {0: 60, 1: 60}
    for slow, fast in ((0, 1), (1, 0)):
        found = starts(spread, {fast: 80.0, slow: 40.0})
        assert found[slow] / found[fast] == pytest.approx(0.5, abs=0.06), found


def test_evening_out_the_work_does_not_undo_what_the_paces_did() -> None:
    plan = resolve_plan("multi-version", batch=6, group_size=1, updates=9, staleness=8, rows=30, retries=0)
    controller = Controller(plan)
    running: dict[int, int] = {}

    def handle(event: m.Event) -> None:
        for command in controller.handle(event):
            assert not isinstance(command, m.Suspend)
            if isinstance(command, m.LoadVersion):
                loads.append(m.Loaded(command.instance, command.version))
            elif isinstance(command, m.Start):
                running.update(zip(command.trajectories, command.instances, strict=True))

    loads: list[m.Event] = []
    sample = m.LoadSampled({}, speeds={0: 2.0, 1: 1.0})
    for event in (m.Joined(0, 9), m.Joined(1, 9), sample):
        handle(event)
    while loads:
        handle(loads.pop())
    counts = Counter(running.values())
    assert counts[1] / counts[0] == pytest.approx(0.5, abs=0.1), counts
    for _ in range(5):  # evening out does not undo it
        handle(sample)


def test_instances_that_are_not_named_have_the_pace_of_the_fastest() -> None:
    plan = resolve_plan("multi-version", batch=8, group_size=1, updates=3, staleness=1, rows=64, retries=0)
    controller = Controller(plan)
    for event in (m.Joined(0, 4), m.Joined(1, 4), m.LoadSampled({}, speeds={0: 2.0, 1: 1.0})):
        controller.handle(event)
    assert controller.instances[1].pace == 0.5
    controller.handle(m.LoadSampled({}, speeds={0: 2.0}))
    assert controller.instances[1].pace == 1.0
