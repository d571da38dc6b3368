"""Which groups are due and which are in reserve, and what becomes of either."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.core import admission
from stretto.core import messages as m
from stretto.core.controller import Controller
from stretto.core.plan import Plan, resolve_plan
from stretto.core.redundancy import Outstanding, may_exchange, reserve_after_restart


def plan_of(paradigm: str = "synchronous", **options: int) -> Plan:
    defaults = {"batch": 2, "group_size": 2, "updates": 3, "retries": 0, "reserve_groups": 1, "reserve_members": 1}
    return resolve_plan(paradigm, **(defaults | options))


def begun(plan: Plan) -> tuple[Controller, list[m.Start]]:
    """A controller with one instance that has loaded version 0, and the groups that it has started."""
    controller = Controller(plan)
    controller.handle(m.Joined(0, plan.slots))
    return controller, [each for each in controller.handle(m.Loaded(0, 0)) if isinstance(each, m.Start)]


def end(controller: Controller, *trajectories: int) -> list[m.Command]:
    """Each trajectory ends and is scored; returns the commands that follow, loads and starts left out."""
    commands: list[m.Command] = []
    for each in trajectories:
        commands += controller.handle(m.Generated(each, 5)) + controller.handle(m.Scored(each, float(each % 2)))
    return [each for each in commands if isinstance(each, m.Train | m.Drop)]


def test_more_groups_and_members_start_than_a_batch_needs() -> None:
    _, started = begun(plan_of())
    assert [each.trajectories for each in started] == [(0, 1, 2), (3, 4, 5), (6, 7, 8)]
    assert {each.version for each in started} == {0}


def test_the_first_members_and_the_first_groups_win_and_the_others_are_dropped() -> None:
    controller, _ = begun(plan_of())
    (surplus,) = end(controller, 8, 6)
    assert surplus == m.Drop(2, (7,), "surplus: 2 others of its group were scored first", surplus=True)
    assert end(controller, 1) == []
    drop, train, late = end(controller, 5, 3)
    assert drop == m.Drop(1, (4,), "surplus: 2 others of its group were scored first", surplus=True)
    assert train == m.Train(0, (3, 5, 6, 8))
    assert late == m.Drop(0, (0, 1, 2), "in reserve: the batch of update 0 was taken without it")
    assert controller.handle(m.Generated(0, 5)) == [], "a late report is ignored"


def test_a_group_that_came_too_late_is_trained_one_update_later_if_it_is_young_enough() -> None:
    controller, started = begun(plan_of("multi-version", staleness=1, in_flight=2, reserve_members=0))
    assert [each.deadline for each in started] == [1, 1, 1]
    (train,) = end(controller, 2, 3, 4, 5)
    assert train == m.Train(0, (2, 3, 4, 5)), "group 2 was in reserve, and took the place of group 0"
    assert end(controller, 0, 1) == [], "group 0 takes the place of another"
    assert not [each for each in controller.handle(m.Updated(0)) if isinstance(each, m.Drop)]
    train, late = end(controller, 6, 7)
    assert train == m.Train(1, (0, 1, 6, 7))
    assert late == m.Drop(4, (8, 9), "in reserve: the batch of update 1 was taken without it"), "of version 0 too"


def test_a_group_in_reserve_is_never_trained_late() -> None:
    controller, _ = begun(plan_of("multi-version", staleness=0, reserve_members=0))
    train, late = end(controller, 0, 1, 2, 3)
    assert isinstance(train, m.Train)
    assert late == m.Drop(2, (4, 5), "in reserve: the batch of update 0 was taken without it")
    assert controller.newest == 0, "while update 0 trains, nothing starts: it would be too old"
    assert not controller.ledger.groups


def test_a_publish_that_waits_until_nothing_runs_waits_for_due_groups_alone() -> None:
    controller, _ = begun(plan_of("one-step-off", reserve_members=0))
    end(controller, 0, 1, 2, 3)
    started = [each.id for each in controller.ledger.trajectories.values() if each.state.label == "running"]
    assert started == [4, 5, 6, 7, 8, 9], "a batch ahead, and one group in reserve"
    assert not [each for each in controller.handle(m.Updated(0)) if isinstance(each, m.Publish)]
    end(controller, 4, 5)  # group 2 was in reserve; group 3 goes there in its place
    commands = controller.handle(m.Generated(8, 5)) + controller.handle(m.Generated(9, 5))
    assert [each for each in commands if isinstance(each, m.Drop | m.Publish)] == [
        m.Drop(3, (6, 7), "version 1 was published before it had finished"),
        m.Publish(1),
    ]


def test_a_group_with_too_many_failures_trains_with_what_it_has() -> None:
    controller, _ = begun(plan_of(reserve_groups=0))
    for each in (0, 1):
        controller.handle(m.GenerationFailed(each, "cut off"))
    surplus, train = end(controller, 2, 3, 4)
    assert surplus == m.Drop(1, (5,), "surplus: 2 others of its group were scored first", surplus=True)
    assert train == m.Train(0, (2, 3, 4))


def test_a_place_is_exchanged_only_if_nothing_would_be_late() -> None:
    assert may_exchange({3: 2}, enters=4, leaves=3, next_update=3, batch=2), "a later deadline is always allowed"
    assert not may_exchange({3: 2}, enters=2, leaves=3, next_update=3, batch=2), "its limit has passed"
    assert not may_exchange({3: 2, 4: 1}, enters=3, leaves=4, next_update=3, batch=2), "three would be due at once"
    assert may_exchange({3: 1, 4: 2}, enters=3, leaves=4, next_update=3, batch=2)


@pytest.mark.parametrize("paradigm", ["drop"])
def test_a_paradigm_that_drops_what_is_too_old_has_no_redundancy(paradigm: str) -> None:
    with pytest.raises(ValueError, match="redundancy is refused in the paradigm `drop`"):
        plan_of(paradigm, staleness=1)


@settings(max_examples=300, deadline=None)
@given(
    deadlines=st.lists(st.integers(0, 3), max_size=7),
    finished=st.lists(st.booleans(), min_size=7, max_size=7),
    batch=st.integers(1, 3),
    most_due=st.integers(0, 8),
)
def test_after_a_restart_as_few_groups_as_possible_are_in_reserve(
    deadlines: list[int], finished: list[bool], batch: int, most_due: int
) -> None:
    groups = [Outstanding(id, deadline, finished[id]) for id, deadline in enumerate(deadlines)]
    reserve = reserve_after_restart(groups, 0, batch, most_due)

    def fits(due: tuple[Outstanding, ...]) -> bool:
        counts: dict[int, int] = {}
        for each in due:
            counts[each.deadline] = counts.get(each.deadline, 0) + 1
        return len(due) <= most_due and admission.invariant_holds(counts, 0, batch)

    assert fits(tuple(each for each in groups if each.id not in reserve))
    most = max(size for size in range(len(groups) + 1) if any(map(fits, combinations(groups, size))))
    assert len(groups) - len(reserve) == most
